"""Which work each read let go on: the wait that it ended, or what next began on its layer.

Records do not name the reads they needed. A read is for one layer of one step: an executor that
waited on that layer when the read came was waiting for it; if none was, the first stage to compute
there afterwards is what it was there for in time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from polyneuron.tracing.record_table import Column, RecordTable
from polyneuron.tracing.recording import AWAIT_ROWS, WAIT, Detail

_PREDICTS = frozenset({"pred", "predict", "norm"})
"""Stages and ops that need no row of a neuron."""


@dataclass(frozen=True, slots=True)
class ReadUses:
    """By read, in the order of the table of reads."""

    executors: list[str]
    executor: NDArray[np.int64]
    """Index of who used it; -1 where that was not recorded."""
    t_ns: Column
    """A moment within the record that used it, not before the read was complete."""
    ended_wait: NDArray[np.bool_]
    """An executor had nothing to do until it came."""


@dataclass(frozen=True, slots=True)
class _Work:
    """Records of all executors: (records, 5): step, layer, executor, start, end."""

    waits: NDArray[np.int64]
    clusters: NDArray[np.int64]
    ops: NDArray[np.int64]


def read_uses(detail: Detail) -> ReadUses:
    """The uses of every read of a recording."""
    reads, executors = detail.reads, detail.executors()
    used_by = np.full(len(reads), -1, dtype=np.int64)
    used_ns, ended_wait = np.zeros_like(used_by), np.zeros(len(reads), dtype=np.bool_)
    work = _work(detail, executors)
    waits, clusters, ops = (dict(_by_layer(part)) for part in (work.waits, work.clusters, work.ops))
    places = np.column_stack([reads.column(name) for name in ("step", "layer")])
    for key, chosen in _groups(places):
        done_ns = (reads.column("t_ns") + reads.column("ns"))[chosen]
        _use_next(waits.get(key), done_ns, chosen, used_by, used_ns, is_wait=True)
        ended_wait[chosen] = used_by[chosen] >= 0
        for later in (clusters.get(key), ops.get(key)):
            _use_next(later, done_ns, chosen, used_by, used_ns, is_wait=False)
    return ReadUses(executors, used_by, used_ns, ended_wait)


def _use_next(
    work: NDArray[np.int64] | None,
    done_ns: Column,
    chosen: NDArray[np.int64],
    used_by: NDArray[np.int64],
    used_ns: Column,
    *,
    is_wait: bool,
) -> None:
    """Give reads without a use the wait that was on, or the first work to begin, when they came."""
    if work is None:
        return
    starts, ends = work[:, 3], work[:, 4]
    by = ends if is_wait else starts
    order = np.argsort(by, kind="stable")
    found = np.searchsorted(by[order], done_ns)
    is_found = (found < len(order)) & (used_by[chosen] < 0)
    found = order[np.minimum(found, len(order) - 1)]
    if is_wait:
        is_found &= starts[found] <= done_ns
    used_by[chosen[is_found]] = work[found[is_found], 2]
    used_ns[chosen[is_found]] = np.maximum(starts[found], done_ns)[is_found]


def _work(detail: Detail, executors: list[str]) -> _Work:
    waits: list[NDArray[np.int64]] = []
    clusters: list[NDArray[np.int64]] = []
    ops: list[NDArray[np.int64]] = []
    for index, actor in enumerate(executors):
        for table, words, column, waiting, found in (
            (detail.clusters_of(actor), detail.stages, "stage", WAIT, clusters),
            (detail.ops_of(actor), detail.kinds, "kind", AWAIT_ROWS, ops),
        ):
            numbers = table.column(column)
            of_rows = [i for i, word in enumerate(words) if word not in {*_PREDICTS, waiting}]
            is_wait = np.isin(numbers, [i for i, word in enumerate(words) if word == waiting])
            waits.append(_spans(table.where(is_wait), index))
            found.append(_spans(table.where(np.isin(numbers, of_rows)), index))
    none = np.empty((0, 5), dtype=np.int64)
    return _Work(*(np.concatenate([none, *part]) for part in (waits, clusters, ops)))


def _spans(table: RecordTable, executor: int) -> NDArray[np.int64]:
    start, ns = table.column("t_ns"), table.column("ns")
    place = np.full(len(table), executor, dtype=np.int64)
    return np.column_stack([table.column("step"), table.column("layer"), place, start, start + ns])


def _by_layer(work: NDArray[np.int64]) -> Iterator[tuple[tuple[int, int], NDArray[np.int64]]]:
    for key, chosen in _groups(work[:, :2]):
        yield key, work[chosen]


def _groups(
    places: NDArray[np.int64],
) -> Iterator[tuple[tuple[int, int], NDArray[np.int64]]]:
    """The indices of rows by (step, layer); rows of no known step are in none."""
    order = np.lexsort((places[:, 1], places[:, 0]))
    ranked = places[order]
    begins = np.flatnonzero(np.any(np.diff(ranked, axis=0, prepend=-2), axis=1))
    for chosen in np.split(order, begins[1:]) if len(order) else []:
        step, layer = (int(number) for number in places[chosen[0]])
        if step >= 0:
            yield (step, layer), chosen
