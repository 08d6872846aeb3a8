"""What steps read, hit and waited for, against what the engine itself counts."""

from __future__ import annotations

from pathlib import Path

import pytest

from polyneuron.actors.arena import format_neuron_cache
from polyneuron.actors.io_counters import IoCounters, IoMeter
from polyneuron.clock import MonotonicClock
from polyneuron.io.block_device import BlockDevice
from polyneuron.io.device_wrappers import LatencyDevice
from polyneuron.io.ncf_format import Layout
from polyneuron.model.convert import convert
from tests.support.local_engine import LocalEngine
from tests.support.tiny_gguf import TinyModel, write_tiny_gguf

DRELU = TinyModel(family="bamboo", num_layers=5, d_ff=352, tensor_type="Q4_0", tied_head=False)
NUM_TOKENS = 12
LATE_NS = 3_000_000


def write(folder: Path, layout: Layout) -> Path:
    path = folder / f"{layout}.ncf"
    convert(write_tiny_gguf(folder / f"{layout}.gguf", DRELU), path, layout=layout)
    return path


def late(device: BlockDevice) -> BlockDevice:
    return LatencyDevice(device, MonotonicClock(), lambda _: LATE_NS)


class TestMeter:
    def test_neurons_used_are_hits_or_misses(self, tmp_path: Path) -> None:
        with LocalEngine(write(tmp_path, Layout.BUNDLES), ffn_resident=0.8, wrap=late) as engine:
            meter, before = IoMeter(engine.arena, engine.layout), engine.cache().counters()
            engine.generate([3], NUM_TOKENS)  # so short a prompt is computed as tokens are
            io, more = meter.take(), meter.take()
            bundles, used = engine.layout.bundles, engine.cache().counters()
            reads = engine.arena.neuron_reads(engine.layout.at("boards.reads"))
            assert bundles is not None
            missed_before = before.misses + before.late  # what the cache was warmed with
            assert io.hits == used.hits - before.hits > 0
            assert io.misses == used.misses + used.late - missed_before > 0
            assert io.bytes_read >= reads.reads * bundles.rows.slot_bytes > 0
            assert io.stall_ns >= LATE_NS  # who missed the first neuron waited for it
            assert (more.hits, more.misses, more.stall_ns) == (0, 0, 0)

    def test_layers_are_counted_as_they_pass(self, tmp_path: Path) -> None:
        with LocalEngine(write(tmp_path, Layout.TILES), ffn_resident=0.4, wrap=late) as engine:
            meter = IoMeter(engine.arena, engine.layout)
            engine.generate([3], NUM_TOKENS)
            io, streamed = meter.take(), engine.budget.streamed_bytes
            ahead = sum(section.num_bytes for section in engine.source.manifest.sections[1:])
        assert NUM_TOKENS * streamed <= io.bytes_read <= NUM_TOKENS * streamed + ahead
        assert io.stall_ns >= LATE_NS
        assert io.hit_rate is None

    def test_renewed_cache_counts_from_zero(self, tmp_path: Path) -> None:
        with LocalEngine(write(tmp_path, Layout.BUNDLES), ffn_resident=0.8) as engine:
            meter = IoMeter(engine.arena, engine.layout)
            engine.generate([3], NUM_TOKENS)
            format_neuron_cache(engine.arena, engine.layout)
            assert min(meter.take()) >= 0


class TestCounters:
    def test_sum_and_hit_rate(self) -> None:
        total = IoCounters(10, 2, 3, 6, 1).plus(IoCounters(5, 1, 0, 0, 1))
        assert total == IoCounters(15, 3, 3, 6, 2)
        assert total.hit_rate == pytest.approx(0.75)
        assert IoCounters(bytes_read=1).hit_rate is None
