"""Rings of trace records: order, overflow, and what a new executor finds."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from polyneuron.kernels._kernels import ffi, lib
from polyneuron.kernels.arena import HEADER_BYTES, PAGE_BYTES, Arena, Unit, board_bytes
from polyneuron.kernels.trace import (
    DRAIN_RECORDS,
    TRACE_RECORD,
    TraceRing,
    TraceWhat,
    format_ring,
    put_read,
    trace_ring_bytes,
)

CAPACITY = 1 << 14
RING = PAGE_BYTES


def make_arena(num_bytes: int) -> Arena:
    return Arena.over(np.zeros(num_bytes + PAGE_BYTES, np.uint8))


@pytest.fixture
def arena() -> Arena:
    return make_arena(RING + trace_ring_bytes(CAPACITY))


def ring_of(arena: Arena, capacity: int) -> TraceRing:
    format_ring(arena, RING, capacity)
    return TraceRing(arena, RING)


def put(arena: Arena, numbers: range) -> None:
    """Write records whose every number is the same, so that a torn one shows."""
    record = ffi.new("struct trace_record *")
    for number in numbers:
        record.start_ns = record.end_ns = record.wait_ns = record.value = number
        record.index = record.count = record.step_seq = number
        lib.trace_put(arena.base, RING, record)


def drained(ring: TraceRing) -> Iterator[int]:
    """Numbers of all records there are."""
    count = DRAIN_RECORDS
    while count == DRAIN_RECORDS:
        records = ring.drain()
        count = len(records)
        for name in ("end_ns", "wait_ns", "value", "index", "count", "step_seq"):
            assert (records[name] == records["start_ns"]).all()
        yield from records["start_ns"].tolist()


class TestOrder:
    def test_records_come_once_and_in_order(self, arena: Arena) -> None:
        ring = ring_of(arena, 16)
        put(arena, range(10))
        assert list(drained(ring)) == list(range(10))
        assert list(drained(ring)) == []
        put(arena, range(10, 13))
        assert list(drained(ring)) == [10, 11, 12]
        assert ring.take_lost() == 0

    def test_many_are_drained_in_pieces(self, arena: Arena) -> None:
        ring = ring_of(arena, CAPACITY)
        put(arena, range(3 * DRAIN_RECORDS + 5))
        assert list(drained(ring)) == list(range(3 * DRAIN_RECORDS + 5))

    def test_ring_goes_round(self, arena: Arena) -> None:
        ring = ring_of(arena, 8)
        for start in range(0, 70, 7):
            put(arena, range(start, start + 7))
            assert list(drained(ring)) == list(range(start, start + 7))
        assert ring.take_lost() == 0

    def test_reader_begins_where_it_finds_the_ring(self, arena: Arena) -> None:
        ring_of(arena, 8)
        put(arena, range(5))
        late = TraceRing(arena, RING)
        put(arena, range(5, 7))
        assert list(drained(late)) == [5, 6]


class TestOverflow:
    @pytest.mark.parametrize("count", [8, 9, 20, 1000])
    def test_oldest_are_lost_and_counted(self, arena: Arena, count: int) -> None:
        ring = ring_of(arena, 8)
        put(arena, range(count))
        assert list(drained(ring)) == list(range(count - 7, count))
        assert ring.take_lost() == count - 7
        assert ring.take_lost() == 0

    def test_writer_meanwhile_tears_nothing(self, arena: Arena) -> None:
        """Every record is drained whole or counted as lost."""
        ring, total = ring_of(arena, 64), 30_000
        writer = threading.Thread(target=put, args=(arena, range(total)))
        writer.start()
        seen: list[int] = []
        while writer.is_alive():
            seen += drained(ring)
        writer.join()
        seen += drained(ring)
        assert seen == sorted(set(seen))
        assert len(seen) + ring.take_lost() == total


class TestReads:
    def read(self, arena: Arena, neuron: int = 7) -> None:
        put_read(arena, RING, latency_ns=5, layer=2, neuron=neuron, num_bytes=512, status=61)

    def test_only_wanted_ones_are_kept(self, arena: Arena) -> None:
        ring = ring_of(arena, 8)
        self.read(arena)
        ring.want_reads(9)
        self.read(arena)
        ring.want_reads(0)
        self.read(arena)
        (record,) = ring.drain()
        assert record["end_ns"] - record["start_ns"] == 5
        names = ("what", "layer", "value", "count", "kind", "step_seq")
        assert [record[name] for name in names] == [TraceWhat.READ, 2, 7, 512, 61, 9]

    def test_run_of_a_layer_has_no_neuron(self, arena: Arena) -> None:
        ring = ring_of(arena, 8)
        ring.want_reads(1)
        self.read(arena, neuron=-1)
        assert ring.drain()["value"] == (1 << 64) - 1


class TestExecutors:
    def test_new_executor_goes_on_in_the_ring(self) -> None:
        """What a lost one wrote stays, and the consumer's place stays right."""
        ring_at = HEADER_BYTES + -(-board_bytes(4) // PAGE_BYTES) * PAGE_BYTES
        arena = make_arena(ring_at + trace_ring_bytes(8))
        arena.format(HEADER_BYTES, 4, 1)
        format_ring(arena, ring_at, 8)
        arena.executor(0).trace = ring_at
        ring = TraceRing(arena, ring_at)
        record = ffi.new("struct trace_record *")
        for generation in (1, 2):
            assert arena.attach(0, Unit.CPU, os.getpid()) == generation
            record.index = generation
            lib.trace_put(arena.base, ring_at, record)
        assert ring.drain()["index"].tolist() == [1, 2]

    def test_record_is_as_in_c(self) -> None:
        assert TRACE_RECORD.itemsize == ffi.sizeof("struct trace_record") == 64
