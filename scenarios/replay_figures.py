"""The figures of a replayed run, from what its requests measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from polyneuron.actors.io_counters import NO_IO, IoCounters
from polyneuron.actors.messages import RequestOutcome
from polyneuron.scenarios.replay_run import Answer, ReplayRun
from polyneuron.scenarios.result import Figures

NS_PER_S = 1e9


def run_figures(run: ReplayRun) -> Figures:
    """Every figure that the real engine can tell."""
    outcomes = [(answer, answer.outcome) for answer in run.answers if answer.outcome is not None]
    ended = [outcome for _, outcome in outcomes]
    token_ns = np.array([ns for outcome in ended for ns in outcome.token_ns], np.float64)
    spans = [_decode_span(answer, outcome) for answer, outcome in outcomes if outcome.token_ns]
    prefill_ns = sum(outcome.prefill_ns for outcome in ended)
    # Candidates of one prompt share its computation: only the first one has a time for it.
    prompts = sum(outcome.num_prompt for outcome in ended if outcome.prefill_ns)
    figures: Figures = {
        "decode_tok_s": _rate(token_ns.size, _covered_ns(spans)),
        "prefill_tok_s": _rate(prompts, prefill_ns),
        "ttft_ms": _mean([(start - a.begun_ns) / 1e6 for (a, _), (start, _) in _first(outcomes)]),
        "tokens": float(run.num_tokens),
        "requests_finished": float(_count(run, failed=False)),
        "requests_failed": float(_count(run, failed=True)),
        "restarts": float(run.restarts),
        "peak_memory_bytes": float(run.peak_bytes),
    }
    if token_ns.size:
        figures["token_ms_mean"] = float(token_ns.mean()) / 1e6
        for percent in (50, 90, 99):
            figures[f"token_ms_p{percent}"] = float(np.percentile(token_ns, percent)) / 1e6
        workers = run.engine.config.num_workers
        figures |= _io_figures(ended, float(token_ns.sum()), workers)
    return figures


def tokens_equal(run: ReplayRun, undisturbed: ReplayRun) -> bool:
    """Whether every answer is the undisturbed one's; of a failed one, its beginning."""
    pairs = zip(run.answers, sorted_like(undisturbed.answers, run.answers), strict=True)
    return all(
        answer.tokens == other.tokens[: len(answer.tokens)]
        and (answer.error is not None or len(answer.tokens) == len(other.tokens))
        for answer, other in pairs
    )


def sorted_like(answers: Sequence[Answer], others: Sequence[Answer]) -> list[Answer]:
    """The answers in the order in which the other run began its requests."""
    by_request: dict[int, list[Answer]] = {}
    for answer in answers:
        by_request.setdefault(answer.request, []).append(answer)
    return [by_request[other.request].pop(0) for other in others]


def _decode_span(answer: Answer, outcome: RequestOutcome) -> tuple[int, int]:
    """From the first token to the last one, in the clock of the run."""
    return answer.ended_ns - sum(outcome.token_ns), answer.ended_ns


def _first(
    outcomes: Iterable[tuple[Answer, RequestOutcome]],
) -> list[tuple[tuple[Answer, RequestOutcome], tuple[int, int]]]:
    """The first candidate of each request with its span."""
    seen: dict[int, tuple[Answer, RequestOutcome]] = {}
    for answer, outcome in outcomes:
        seen.setdefault(answer.request, (answer, outcome))
    return [(pair, _decode_span(*pair)) for pair in seen.values()]


def _covered_ns(spans: Iterable[tuple[int, int]]) -> int:
    """Time in which at least one span lies."""
    total, reached = 0, -(1 << 62)
    for start, end in sorted(spans):
        total += max(0, end - max(start, reached))
        reached = max(reached, end)
    return total


def _io_figures(ended: Sequence[RequestOutcome], decode_ns: float, workers: int) -> Figures:
    """What decode read and waited for; a step of several sequences is shared among them."""
    total, steps, read, num_reads = NO_IO, 0, 0.0, 0.0
    for outcome in ended:
        count = len(outcome.token_ns)
        sharing = _mean_batch(outcome.batch_sizes, count)
        total = total.plus(outcome.decode_io)
        steps += count
        read += outcome.decode_io.bytes_read / sharing
        num_reads += outcome.decode_io.reads / sharing
    misses = [rate for outcome in ended for rate in outcome.miss_rates]
    if not total.bytes_read + total.hits:
        return {}
    return {
        "bytes_per_token": read / steps,
        "reads_per_token": num_reads / steps,
        "io_share": total.stall_ns / (workers * decode_ns),
        "miss_rate_p99": float(np.percentile(misses, 99)) if misses else None,
        **_rates(total),
    }


def _rates(total: IoCounters) -> Figures:
    hit_rate = total.hit_rate
    return {"hit_rate": hit_rate, "miss_rate": None if hit_rate is None else 1.0 - hit_rate}


def _mean_batch(changes: Sequence[tuple[int, int]], num_steps: int) -> float:
    """Sequences a step computed on average, from where that number changed."""
    if not changes or not num_steps:
        return 1.0
    begins = [index for index, _ in changes]
    ends = [*begins[1:], max(num_steps + begins[0], begins[-1] + 1)]
    weights = [max(0, end - begin) for begin, end in zip(begins, ends, strict=True)]
    total = sum(size * weight for (_, size), weight in zip(changes, weights, strict=True))
    return total / sum(weights) if sum(weights) else 1.0


def _count(run: ReplayRun, *, failed: bool) -> int:
    """Requests of which an answer failed, or of which none did."""
    bad = {answer.request for answer in run.answers if answer.error is not None}
    return len(bad) if failed else len({answer.request for answer in run.answers} - bad)


def _rate(count: float, ns: float) -> float | None:
    return count / ns * NS_PER_S if ns > 0 else None


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
