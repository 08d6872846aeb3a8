"""The figures of a timeline, as `polyneuron trace --json` prints them.

Times are in ms. What was not measured is None, never 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from polyneuron.timeline_events import Event
from polyneuron.tracing.occupancy import Occupancy, occupancies
from polyneuron.tracing.record_table import RecordTable
from polyneuron.tracing.recording import DECODE, PREFILL, Mark, Recording, Request, Step

PERCENTILES = {"p50": 50, "p90": 90, "p99": 99}
DISTRIBUTION = ("mean", *PERCENTILES)
COUNTS = ("needed", "hits", "misses", "predicted", "active", "bytes", "reads")
TIMES = ("compute_ns", "stall_ns", "wait_ns")

Figures = dict[str, Any]


def summarize(recording: Recording) -> Figures:
    """Everything there is to say about a timeline in figures."""
    steps = recording.steps
    return {
        "run": dict(recording.run) or None,
        "events": recording.num_events,
        "cut": recording.is_cut,
        "lost_records": recording.num_lost,
        "duration_ms": _ms(recording.last_ns - recording.first_ns),
        "requests": [_request(request, recording.first_ns) for request in recording.requests],
        PREFILL: phase_figures([step for step in steps if step.phase == PREFILL]),
        DECODE: phase_figures([step for step in steps if step.phase == DECODE]),
        "detailed_steps": sum(step.detail for step in steps),
        "executors": [_executor(executor) for executor in occupancies(recording)],
        "flash": _flash(recording.detail.reads),
        "changes": _marks(recording, {Event.PHASE, Event.BATCH, Event.GRAPH, Event.PLAN}),
        "faults": _marks(recording, {Event.FAULT}),
        "restarts": [_restart(figures) for figures in _marks(recording, {Event.RESTART})],
        "steps": [_step(step, recording.first_ns) for step in steps],
    }


def distribution(values: Iterable[float | None]) -> dict[str, float | None]:
    """Mean and percentiles of what was measured; None each where nothing was."""
    known = [value for value in values if value is not None]
    if not known:
        return dict.fromkeys(DISTRIBUTION)
    found = [np.mean(known), *np.percentile(known, list(PERCENTILES.values()))]
    return {name: _rounded(value) for name, value in zip(DISTRIBUTION, found, strict=True)}


def phase_figures(steps: Sequence[Step]) -> Figures | None:
    """A phase's steps; counts and the executors' times are those of one token. None without."""
    if not steps:
        return None
    tokens, step_ns = sum(step.tokens for step in steps), sum(step.ns for step in steps)
    return {
        "steps": len(steps),
        "tokens": tokens,
        "tokens_per_second": _rounded(tokens / step_ns * 1e9) if step_ns else None,
        "step_ms": distribution(step.ns / 1e6 for step in steps),
        **{f"{name}_share": _share_of_time(steps, f"{name}_ns") for name in _SHARES},
        "hit_rate": _hit_rate(steps),
        "miss_rate": distribution(_miss_rate(step) for step in steps),
        "token": {
            **{name.replace("_ns", "_ms"): _per_token(steps, name, 1e6) for name in TIMES},
            **{name: _per_token(steps, name) for name in COUNTS},
        },
    }


_SHARES = ("compute", "stall", "wait")


def _per_token(steps: Sequence[Step], name: str, unit: float = 1.0) -> dict[str, float | None]:
    values = [(getattr(step, name), step.tokens) for step in steps]
    return distribution(
        None if value is None or not tokens else value / tokens / unit for value, tokens in values
    )


def _share_of_time(steps: Sequence[Step], name: str) -> float | None:
    """Of the executors' time in the steps that measured it."""
    known = [(getattr(step, name), step.executor_ns) for step in steps]
    known = [(ns, of_ns) for ns, of_ns in known if ns is not None]
    total = sum(of_ns for _, of_ns in known)
    return _rounded(sum(ns for ns, _ in known) / total) if total else None


def _hit_rate(steps: Sequence[Step]) -> float | None:
    known = [(s.hits, s.misses) for s in steps if s.hits is not None and s.misses is not None]
    hits, misses = sum(hits for hits, _ in known), sum(misses for _, misses in known)
    return _rounded(hits / (hits + misses)) if hits + misses else None


def _miss_rate(step: Step) -> float | None:
    return None if step.hit_rate is None else 1.0 - step.hit_rate


def _request(request: Request, first_ns: int) -> Figures:
    tbt_ns, ttft_ns = request.tbt_ns(), request.ttft_ns()
    return {
        "request": request.request,
        "state": request.state or None,
        "reason": request.reason,
        "prompt_tokens": request.prompt_tokens,
        "tokens": len(request.token_ns) if request.num_tokens is None else request.num_tokens,
        "queued_ms": _since(request.queued_ns, first_ns),
        "admitted_ms": _since(request.admitted_ns, first_ns),
        "finished_ms": _since(request.finished_ns, first_ns),
        "ttft_ms": None if ttft_ns is None else _ms(ttft_ns),
        "tbt_ms": distribution(ns / 1e6 for ns in tbt_ns),
    }


def _since(ns: int | None, first_ns: int) -> float | None:
    return None if ns is None else _ms(ns - first_ns)


def _executor(executor: Occupancy) -> Figures:
    whole = executor.steps_ns
    shares = (executor.busy_ns, executor.stall_ns, executor.wait_ns)
    names = ("busy_share", "stall_share", "wait_share")
    found = [_rounded(min(1.0, ns / whole)) if whole else None for ns in shares]
    return {"executor": executor.executor, **dict(zip(names, found, strict=True))}


def _flash(reads: RecordTable) -> Figures | None:
    """The reads that were recorded one by one; None without."""
    if not len(reads):
        return None
    return {
        "reads": len(reads),
        "bytes": int(reads.column("bytes").sum()),
        "failed": int(np.count_nonzero(reads.column("status"))),
        "read_ms": distribution((reads.column("ns") / 1e6).tolist()),
    }


def _marks(recording: Recording, events: set[Event]) -> list[Figures]:
    chosen = [mark for mark in recording.marks if mark.event in events]
    return [_mark(mark, recording.first_ns) for mark in chosen]


def _mark(mark: Mark, first_ns: int) -> Figures:
    return {
        "t_ms": _ms(mark.t_ns - first_ns),
        "actor": mark.actor,
        "event": mark.event,
        **mark.keys,
    }


def _restart(figures: Figures) -> Figures:
    """A restart with its duration in the unit of all others here."""
    return {**{k: v for k, v in figures.items() if k != "ns"}, "took_ms": _ms(figures["ns"])}


def _step(step: Step, first_ns: int) -> Figures:
    times = {name.replace("_ns", "_ms"): getattr(step, name) for name in TIMES}
    return {
        "step": step.step,
        "t_ms": _ms(step.t_ns - first_ns),
        "step_ms": _ms(step.ns),
        "phase": step.phase,
        "graph": step.graph,
        "tokens": step.tokens,
        "sequences": step.sequences,
        **{name: None if ns is None else _ms(ns) for name, ns in times.items()},
        "hit_rate": None if step.hit_rate is None else _rounded(step.hit_rate),
        **{name: getattr(step, name) for name in COUNTS},
    }


def _ms(ns: int) -> float:
    return ns / 1e6


def _rounded(value: Any) -> float:
    return float(f"{float(value):.6g}")
