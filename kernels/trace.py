"""Python's face of trace records: what executors and readers did and when (trace_api.h)."""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from polyneuron.kernels._kernels import ffi, lib
from polyneuron.kernels.arena import Arena

DRAIN_RECORDS = 1 << 12
"""Records copied at once."""

TRACE_RECORD = np.dtype(
    [
        ("start_ns", np.uint64), ("end_ns", np.uint64), ("wait_ns", np.uint64),
        ("value", np.uint64), ("step_seq", np.uint32), ("what", np.uint32), ("kind", np.uint32),
        ("layer", np.uint32), ("index", np.uint32), ("count", np.uint32), ("executor", np.uint32),
        ("reserved", np.uint32),
    ]
)  # fmt: skip
assert TRACE_RECORD.itemsize == ffi.sizeof("struct trace_record")
assert all(
    TRACE_RECORD.fields[name][1] == ffi.offsetof("struct trace_record", name)
    for name in TRACE_RECORD.names or ()
    if TRACE_RECORD.fields is not None
)


class TraceWhat(IntEnum):
    """What a record is of."""

    OP = 0
    CLUSTER = 1
    READ = 2


class TraceStage(IntEnum):
    """A stage of a neuron cluster."""

    PRED = 0
    GC = 1
    UDC = 2
    WAIT = 3


def trace_ring_bytes(capacity: int) -> int:
    """Bytes of a ring of `capacity` records, a power of two."""
    return int(lib.trace_ring_bytes(capacity))


class TraceRing:
    """A ring of records at `offset` of the arena; the consumer's side keeps its place here."""

    def __init__(self, arena: Arena, offset: int) -> None:
        self._base, self._offset = arena.base, offset
        self._ring = lib.trace_ring_at(arena.base, offset)
        self._tail = ffi.new("uint64_t *", int(self._ring.head))
        self._lost = ffi.new("uint64_t *")
        self._records = np.zeros(DRAIN_RECORDS, TRACE_RECORD)
        self._pointer = ffi.cast("struct trace_record *", self._records.ctypes.data)

    def want_reads(self, step_seq: int) -> None:
        """Of a reader's ring: keep the reads that end from now on, as of this step; 0: none."""
        self._ring.step_seq = step_seq

    def drain(self) -> NDArray[np.void]:
        """The records (n,) of TRACE_RECORD since the last call, in order; a copy, at most 4096.

        Fewer than that: nothing more is there.
        """
        if self._ring.head == self._tail[0]:
            return self._records[:0]
        count = lib.trace_drain(
            self._base, self._offset, self._tail, self._pointer, DRAIN_RECORDS, self._lost
        )
        return self._records[:count].copy()

    def take_lost(self) -> int:
        """How many records were overwritten before they were drained, since the last call."""
        lost, self._lost[0] = int(self._lost[0]), 0
        return lost


def format_ring(arena: Arena, offset: int, capacity: int) -> None:
    """Write an empty ring of `capacity` records, a power of two."""
    lib.trace_format(arena.base, offset, capacity)


def put_read(
    arena: Arena,
    offset: int,
    *,
    latency_ns: int,
    layer: int,
    neuron: int,
    num_bytes: int,
    status: int,
) -> None:
    """A reader in Python: a read ended now; `neuron` -1 is a run of the layer, status 0 or errno.

    Kept if the running step wants to know.
    """
    lib.trace_put_read(arena.base, offset, latency_ns, layer, neuron % (1 << 64), num_bytes, status)
