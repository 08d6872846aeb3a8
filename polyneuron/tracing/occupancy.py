"""What executors did with the time of the steps whose ops were recorded."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from polyneuron.tracing.record_table import RecordTable
from polyneuron.tracing.recording import AWAIT_ROWS, WAIT, Detail, Recording


@dataclass(frozen=True, slots=True)
class Occupancy:
    """One executor's time, in ns; what is in none of the three it was idle or not recorded."""

    executor: str
    steps_ns: int
    """Of all steps with detail, together."""
    busy_ns: int
    stall_ns: int
    """It waited for flash."""
    wait_ns: int
    """It waited for other executors."""


def occupancies(recording: Recording) -> list[Occupancy]:
    """Of every executor that told of ops or clusters, in the order in which they are drawn."""
    detailed = [step for step in recording.steps if step.detail]
    steps_ns = sum(step.ns for step in detailed)
    steps = np.array(sorted({step.step for step in detailed}), dtype=np.int64)
    detail = recording.detail
    return [_occupancy(detail, actor, steps, steps_ns) for actor in detail.executors()]


def _occupancy(detail: Detail, actor: str, steps: NDArray[np.int64], steps_ns: int) -> Occupancy:
    ops, clusters = (
        _of_steps(detail.ops_of(actor), steps),
        _of_steps(detail.clusters_of(actor), steps),
    )
    awaits = ops.where(is_word(ops, "kind", detail.kinds, AWAIT_ROWS))
    is_wait = is_word(clusters, "stage", detail.stages, WAIT)
    waits = clusters.where(is_wait)
    waits = waits.where(~_inside(waits, awaits))
    stall_ns = _total(awaits, "ns") + _total(waits, "ns")
    if len(ops):
        busy_ns = max(0, _total(ops, "ns") - stall_ns)
    else:
        busy_ns = _total(clusters.where(~is_wait), "ns")
    return Occupancy(actor, steps_ns, busy_ns, stall_ns, _total(ops, "wait_ns"))


def is_word(table: RecordTable, column: str, words: list[str], word: str) -> NDArray[np.bool_]:
    """Which records have this word in a column of word numbers."""
    number = words.index(word) if word in words else -1
    found: NDArray[np.bool_] = table.column(column) == number
    return found


def _of_steps(table: RecordTable, steps: NDArray[np.int64]) -> RecordTable:
    return table.where(np.isin(table.column("step"), steps))


def _inside(records: RecordTable, spans: RecordTable) -> NDArray[np.bool_]:
    """Which records begin within one of the spans, which do not overlap."""
    if not len(spans):
        return np.zeros(len(records), dtype=np.bool_)
    starts = spans.column("t_ns")
    before = np.searchsorted(starts, records.column("t_ns"), side="right") - 1
    ends = starts + spans.column("ns")
    found: NDArray[np.bool_] = (before >= 0) & (records.column("t_ns") < ends[before])
    return found


def _total(table: RecordTable, column: str) -> int:
    return int(table.column(column).sum())
