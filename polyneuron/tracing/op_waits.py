"""Of the time that ops waited before they began: how much was for flash, how much for others."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from polyneuron.tracing.record_table import Column, RecordTable
from polyneuron.tracing.recording import AWAIT_ROWS, WAIT, Detail


def is_word(table: RecordTable, column: str, words: list[str], word: str) -> NDArray[np.bool_]:
    """Which records have this word in a column of word numbers."""
    number = words.index(word) if word in words else -1
    found: NDArray[np.bool_] = table.column(column) == number
    return found


def flash_waits_ns(detail: Detail, actor: str) -> Column:
    """The part of each op's `wait_ns` that was for flash, (ops,); 0 where that was not told.

    An op tells all its time waiting for flash; what of it was inside the op is in its clusters.
    """
    ops, clusters = detail.ops_of(actor), detail.clusters_of(actor)
    inside_ns = np.zeros(len(ops), dtype=np.int64)
    waits = clusters.where(is_word(clusters, "stage", detail.stages, WAIT))
    place = enclosing(waits, ops)
    np.add.at(inside_ns, place[place >= 0], waits.column("ns")[place >= 0])
    is_wait = is_word(ops, "kind", detail.kinds, AWAIT_ROWS)
    inside_ns = np.where(is_wait, ops.column("ns"), inside_ns)
    before_ns = np.maximum(ops.column("stall_ns") - inside_ns, 0)
    found: Column = np.minimum(before_ns, ops.column("wait_ns"))
    return found


def enclosing(records: RecordTable, spans: RecordTable) -> NDArray[np.int64]:
    """For each record the span it begins in, -1 for none; spans do not overlap."""
    if not len(spans):
        return np.full(len(records), -1, dtype=np.int64)
    starts, times = spans.column("t_ns"), records.column("t_ns")
    place = np.searchsorted(starts, times, side="right") - 1
    ends = starts + spans.column("ns")
    found: NDArray[np.int64] = np.where((place >= 0) & (times < ends[place]), place, -1)
    return found
