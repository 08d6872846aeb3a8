"""What executors did with the time of the steps whose ops were recorded."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from polyneuron.tracing.op_waits import enclosing, flash_waits_ns, is_word
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
    all_ops, all_clusters = detail.ops_of(actor), detail.clusters_of(actor)
    chosen = np.isin(all_ops.column("step"), steps)
    ops, before_ns = all_ops.where(chosen), int(flash_waits_ns(detail, actor)[chosen].sum())
    clusters = all_clusters.where(np.isin(all_clusters.column("step"), steps))
    awaits = ops.where(is_word(ops, "kind", detail.kinds, AWAIT_ROWS))
    is_wait = is_word(clusters, "stage", detail.stages, WAIT)
    waits = clusters.where(is_wait)
    waits = waits.where(enclosing(waits, awaits) < 0)
    inside_ns = _total(awaits, "ns") + _total(waits, "ns")
    if len(ops):
        busy_ns = max(0, _total(ops, "ns") - inside_ns)
    else:
        busy_ns = _total(clusters.where(~is_wait), "ns")
    wait_ns = _total(ops, "wait_ns") - before_ns
    return Occupancy(actor, steps_ns, busy_ns, inside_ns + before_ns, wait_ns)


def _total(table: RecordTable, column: str) -> int:
    return int(table.column(column).sum())
