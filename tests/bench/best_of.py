"""Candidates of one prompt against as many runs in turn: `python -m tests.bench.best_of MODEL`.

As in the paper's figure 13: one of them ends every few tokens, so the batch shrinks from N to 1.
Both sides compute the same tokens on the same engine, the prompt once or N times.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from polyneuron import Engine, EngineConfig, SamplingParams
from polyneuron.actors.messages import RequestOutcome
from polyneuron.config import FeedForwardMode
from polyneuron.measure.bench_report import markdown
from polyneuron.sizes import parse_size

SAMPLING = SamplingParams(seed=1)
HEAD = ("test", "tokens", "tokens/s")


@dataclass(frozen=True, slots=True)
class Side:
    """One repetition of one side; `times` are of decode: (sequences in the step, its ns)."""

    answers: list[list[int]]
    prompt_ns: int
    times: list[tuple[int, int]]

    @property
    def decoded(self) -> int:
        """Tokens of decode: the first one of an answer is the prompt's."""
        return sum(size for size, _ in self.times)

    @property
    def decode_ns(self) -> int:
        """The time of all decode steps, sampling included."""
        return sum(ns for _, ns in self.times)

    @property
    def total_ns(self) -> int:
        """From the first token of the prompt to the last of the answers."""
        return self.prompt_ns + self.decode_ns


def step_times(outcome: RequestOutcome) -> Iterator[tuple[int, int]]:
    """(sequences, ns) of each decode step that a request took part in."""
    changes = [*outcome.batch_sizes, (len(outcome.token_ns) + 1, 0)]
    for (first, size), (end, _) in itertools.pairwise(changes):
        yield from ((size, ns) for ns in outcome.token_ns[first - 1 : end - 1])


def run(engine: Engine, requests: Sequence[Mapping[str, Any]]) -> Side:
    """Candidates of one prompt, to the end of the longest."""
    opened = engine.submit(*requests)
    for request in opened:
        request.wait_finished()
    answers = [request.mailbox.tokens_from(0) for request in opened]
    outcomes = [request.take_outcome() for request in opened]
    longest = max(outcomes, key=lambda outcome: len(outcome.token_ns))
    return Side(answers, outcomes[0].prefill_ns, list(step_times(longest)))


def in_turn(engine: Engine, requests: Sequence[Mapping[str, Any]]) -> Side:
    """The same requests one after another."""
    sides = [run(engine, [request]) for request in requests]
    return Side(
        [answer for side in sides for answer in side.answers],
        sum(side.prompt_ns for side in sides),
        [step for side in sides for step in side.times],
    )


def make_requests(prompt: list[int], count: int, every: int) -> list[dict[str, Any]]:
    """Candidates of which one ends every `every` decode steps."""
    return [
        {
            "prompt": prompt, "max_tokens": 1 + every * (i + 1), "score_answer": True,
            "sampling": asdict(params),
        }
        for i, params in enumerate(SAMPLING.for_candidates(count))
    ]  # fmt: skip


def per_second(sides: Sequence[Side], size: int | None = None) -> float:
    """Median of tokens a second in decode; of steps of so many sequences only, if given."""
    kept = [[step for step in side.times if size in (None, step[0])] for side in sides]
    return statistics.median(1e9 * sum(n for n, _ in s) / sum(ns for _, ns in s) for s in kept)


def rows(together: Sequence[Side], apart: Sequence[Side]) -> Iterator[tuple[str, ...]]:
    """The table: each size of the batch, both sides, and their ratios."""
    for size in sorted({size for size, _ in together[0].times}, reverse=True):
        tokens = sum(n for n, _ in together[0].times if n == size)
        yield f"decode, {size} at once", str(tokens), f"{per_second(together, size):.2f}"
    for name, sides in (("candidates", together), ("in turn", apart)):
        yield f"decode, {name}", str(sides[0].decoded), f"{per_second(sides):.2f}"
    ratios = per_second(together) / per_second(apart)
    yield "ratio, decode", "", f"{ratios:.2f}x"
    totals = [statistics.median(side.total_ns for side in sides) for sides in (apart, together)]
    yield "ratio, prompt included", "", f"{totals[0] / totals[1]:.2f}x"


def measure(engine: Engine, args: argparse.Namespace) -> list[tuple[str, ...]]:
    """Both sides in turn, repeated; raises AssertionError when they differ in a token."""
    prompt = np.random.default_rng(0).integers(0, engine.spec.vocab_size, args.prompt).tolist()
    requests = make_requests(prompt, args.count, args.every)
    run(engine, requests[:1])  # warm
    pairs = [(run(engine, requests), in_turn(engine, requests)) for _ in range(args.repetitions)]
    for one, other in pairs:
        assert one.answers == other.answers, "candidates must be what their seeds give alone"
    together, apart = zip(*pairs, strict=True)
    return list(rows(together, apart))


def table(words: Sequence[str] | None = None) -> list[tuple[str, ...]]:
    """The rows for these arguments: test, tokens, tokens a second or a ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="a .gguf or .ncf file, or the word smollm2")
    parser.add_argument("--count", type=int, default=4, help="candidates")
    parser.add_argument("--every", type=int, default=16, help="decode steps between two ends")
    parser.add_argument("--prompt", type=int, default=32, help="its tokens")
    parser.add_argument("-r", "--repetitions", type=int, default=3)
    parser.add_argument("--memory", default="0")
    parser.add_argument("--ffn-resident", type=float)
    parser.add_argument("--mode", default="auto")
    args = parser.parse_args(words)
    num_ctx = args.prompt + 1 + args.count * args.every
    config = EngineConfig(
        num_ctx=num_ctx, max_sequences=args.count, max_logit_rows=args.count,
        ffn_resident=args.ffn_resident, mode=FeedForwardMode(args.mode),
        memory_bytes=parse_size(args.memory, "--memory", None),
    )  # fmt: skip
    with Engine(args.model, config) as engine:
        print(engine.mode().line(), file=sys.stderr)
        return measure(engine, args)


def main() -> None:
    """Measure and print one table."""
    print("\n".join(markdown([HEAD, *table()], 1)))


if __name__ == "__main__":
    main()
