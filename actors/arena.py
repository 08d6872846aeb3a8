"""Who provides the arena: Ray's object store for the product, an anonymous memory file for tests.

Both give the same thing, a byte array that several processes map. The Ray object is put by the
driver, which owns it: actors may die and come back, and nothing is left when the job ends.
"""

from __future__ import annotations

import mmap
import os

import numpy as np
from numpy.typing import NDArray

from polyneuron.config import Phase
from polyneuron.kernels.arena import PAGE_BYTES, Arena
from polyneuron.kernels.neuron_cache import NeuronCache
from polyneuron.kernels.trace import format_ring
from polyneuron.planning.bundles import ring_places
from polyneuron.planning.layout import TRACE_RECORDS, ArenaLayout, trace_rings

LOCK_TIMEOUT_NS = 1_000_000_000


def object_bytes(layout: ArenaLayout) -> int:
    """Bytes of the shared object that holds the arena wherever in a page it begins."""
    return layout.num_bytes + PAGE_BYTES


def format_arena(arena: Arena, layout: ArenaLayout, num_executors: int) -> None:
    """Write header, regions and executor places into a fresh arena."""
    arena.format(layout.at("boards.board"), layout.max_ops, num_executors)
    if layout.config.trace:
        for name in trace_rings(layout.config):
            format_ring(arena, layout.at(f"trace.{name}"), TRACE_RECORDS)
    _format_stream(arena, layout)
    if layout.has_neuron_cache:
        format_neuron_cache(arena, layout)
    for index in range(num_executors):
        record = arena.executor(index)
        record.scratch = layout.at(f"scratch.{index}")
        record.scratch_bytes = layout.spans[f"scratch.{index}"].num_bytes
        record.notice = layout.at("inputs.npu_notice")
        record.trace = layout.at(f"trace.{index}") if layout.config.trace else 0


def _format_stream(arena: Arena, layout: ArenaLayout) -> None:
    """Describe the stage buffers; when nothing is streamed nobody looks at it."""
    stream = arena.layer_stream(layout.at("boards.stream"))
    stream.num_loads, stream.num_buffers = len(layout.loads(Phase.PREFILL)), layout.num_buffers
    if layout.num_buffers:
        stream.buffers = layout.at("stage.0")
        stream.buffer_bytes = layout.spans["stage.0"].num_bytes


def format_neuron_cache(arena: Arena, layout: ArenaLayout, num_slots: int | None = None) -> None:
    """Every neuron absent, no read ordered: at the start, and after a loss while it changed.

    Of the slots the first `num_slots` may be used, by default all.
    """
    bundles = layout.bundles
    assert bundles is not None
    rows, slots = bundles.slot_rows, bundles.cold_slots
    cache = NeuronCache(arena.address + layout.at("boards.cache"))
    num_kept = len(bundles.layers) * rows.num_kept
    cache.format(num_kept, slots, 0, num_slots or slots, rows.cluster_neurons)
    offsets = arena.view(layout.at("boards.bundle_offsets"), (len(bundles.layers),), np.uint64)
    offsets[:] = [layer.section.offset for layer in bundles.layers]
    arena.format_neuron_reads(layout.at("boards.reads"), ring_places(slots))
    reads = arena.neuron_reads(layout.at("boards.reads"))
    reads.cache = layout.at("boards.cache")
    reads.trace = layout.at("trace.reads") if layout.config.trace else 0
    file = reads.file
    file.neurons_per_layer, file.num_layers = rows.num_kept, len(bundles.layers)
    file.layer_offsets = layout.at("boards.bundle_offsets")
    file.bundle_bytes, file.read_begin = rows.bundle_bytes * rows.slot_neurons, rows.read_begin
    file.read_bytes, file.slots, file.slot_bytes = (
        rows.kept_bytes, bundles.slots_offset, rows.kept_bytes
    )  # fmt: skip


def resize_neuron_cache(arena: Arena, layout: ArenaLayout, num_slots: int) -> None:
    """Keep the first `num_slots` slots and give the memory of the others back to the system.

    Between steps, and with no read under way.
    """
    bundles = layout.bundles
    assert bundles is not None
    assert bundles.rows.least_slots(layout.config.decode_tokens) <= num_slots
    assert num_slots <= bundles.cold_slots
    cache = NeuronCache(arena.address + layout.at("boards.cache"))
    with cache.locked(LOCK_TIMEOUT_NS):
        cache.resize((arena.step.epoch + len(bundles.layers)) % (1 << 32), 0, num_slots)
    kept = bundles.slots_offset + num_slots * bundles.slot_rows.kept_bytes
    arena.release(kept, bundles.slots_offset + bundles.slots_bytes)


class LocalArena:
    """An arena in an anonymous memory file: for tests and for anything without Ray."""

    def __init__(self, layout: ArenaLayout) -> None:
        self._fd = os.memfd_create("polyneuron-arena")
        os.ftruncate(self._fd, object_bytes(layout))
        self._map = mmap.mmap(self._fd, object_bytes(layout))
        self.array: NDArray[np.uint8] = np.frombuffer(self._map, dtype=np.uint8)
        self.arena = Arena.over(self.array)

    def close(self) -> None:
        """Give the memory back once no view of it is left."""
        os.close(self._fd)
