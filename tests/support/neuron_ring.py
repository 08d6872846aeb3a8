"""A neuron cache, its ring of reads and a file of bundles, and what executors do with them."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from polyneuron.io.block_device import aligned_bytes
from polyneuron.io.neuron_reader import NeuronReader
from polyneuron.kernels._kernels import ffi, lib
from polyneuron.kernels.arena import PAGE_BYTES, Arena, NeuronRead, neuron_reads_bytes
from polyneuron.kernels.neuron_cache import NO_SLOT, NeuronCache, NeuronState, neuron_cache_bytes

SECOND_NS = 10**9
WAIT_NS = 20 * SECOND_NS
NO_LAYER_OFFSET = 1 << 62
"""An offset that no file has."""


@dataclass(frozen=True)
class RingShape:
    """Sizes of the file, the cache and the ring."""

    num_layers: int = 3
    neurons_per_layer: int = 40
    bundle_bytes: int = 1536
    read_begin: int = 512
    read_bytes: int = 1024
    num_slots: int = 24
    capacity: int = 32
    file_begin: int = PAGE_BYTES
    """Bytes of something else in front."""

    @property
    def num_neurons(self) -> int:
        return self.num_layers * self.neurons_per_layer

    @property
    def layer_bytes(self) -> int:
        """Of a layer in the file: whole pages."""
        return -(-self.neurons_per_layer * self.bundle_bytes // PAGE_BYTES) * PAGE_BYTES

    def layer_offset(self, layer: int) -> int:
        """Layers lie backwards, so that no order is taken for granted."""
        return self.file_begin + (self.num_layers - 1 - layer) * self.layer_bytes

    @property
    def file_bytes(self) -> int:
        return self.file_begin + self.num_layers * self.layer_bytes

    def place(self, neuron: int) -> slice:
        """The bytes of the file that a read of this neuron brings."""
        layer, index = divmod(neuron, self.neurons_per_layer)
        start = self.layer_offset(layer) + index * self.bundle_bytes + self.read_begin
        return slice(start, start + self.read_bytes)


class NeuronRing:
    """The shared memory, and executors' calls; bytes the cache and the ring lie in are `memory`."""

    def __init__(self, shape: RingShape, memory: np.ndarray | None = None) -> None:
        self.shape = shape
        self.ring = PAGE_BYTES
        self.cache_offset = self.ring + _pages(neuron_reads_bytes(shape.capacity))
        cache_bytes = neuron_cache_bytes(shape.num_neurons, shape.num_slots)
        self.slots = self.cache_offset + _pages(cache_bytes)
        self.num_bytes = self.slots + _pages(shape.num_slots * shape.read_bytes)
        if memory is None:
            memory = aligned_bytes(self.num_bytes, PAGE_BYTES)
        self.arena = Arena.over(memory)
        self.cache = NeuronCache(self.arena.address + self.cache_offset)
        self.reads = self.arena.neuron_reads(self.ring)

    def format(self) -> None:
        """Every neuron absent, no order."""
        shape = self.shape
        offsets = [shape.layer_offset(layer) for layer in range(shape.num_layers)]
        self.arena.view(0, (shape.num_layers,), np.uint64)[:] = offsets
        self.cache.format(shape.num_neurons, shape.num_slots, 0, shape.num_slots)
        self.arena.format_neuron_reads(self.ring, shape.capacity)
        self.reads.cache = self.cache_offset
        file = self.reads.file
        file.neurons_per_layer, file.num_layers = shape.neurons_per_layer, shape.num_layers
        file.layer_offsets, file.bundle_bytes = 0, shape.bundle_bytes
        file.read_begin, file.read_bytes = shape.read_begin, shape.read_bytes
        file.slots, file.slot_bytes = self.slots, shape.read_bytes

    def move_file(self, offset: int) -> None:
        """Lead all reads of layer 0 to another place."""
        self.arena.view(0, (self.shape.num_layers,), np.uint64)[0] = offset

    def order(self, epoch: int, neurons: NDArray[np.uint32]) -> NDArray[np.uint32]:
        """What an executor does: use neurons (ascending, no doubles), order the missing ones;
        returns slots."""
        with self.cache.locked(WAIT_NS):
            used = self.cache.use(epoch, neurons)
            assert used is not None
            misses = ffi.from_buffer("struct neuron_miss[]", used.misses)
            lib.neuron_reads_push(self.arena.base, self.ring, misses, used.misses.size)
        return used.slots & NO_SLOT

    def use(self, epoch: int, neurons: Sequence[int]) -> list[int]:
        """The same of neurons in any order; their slots in that order."""
        places = np.argsort(neurons)
        slots = self.order(epoch, np.array(neurons, np.uint32)[places])
        return slots[np.argsort(places)].tolist()

    def wait(self, neuron: int, timeout_ns: int = WAIT_NS) -> int:
        """1 landed, 0 not in time, -1 absent."""
        return self.cache.wait(neuron, timeout_ns)

    def state(self, neuron: int) -> NeuronState:
        return self.cache.state(neuron)

    def rows(self, slot: int) -> bytes:
        """What lies in a slot."""
        num_bytes = self.shape.read_bytes
        return bytes(self.arena.bytes_at(self.slots + slot * num_bytes, num_bytes))

    def pop(self, max_orders: int = 64, timeout_ns: int = 0) -> list[NeuronRead]:
        return self.arena.pop_neuron_reads(self.ring, max_orders, timeout_ns)

    def end(self, neuron: int, error: int = 0) -> None:
        self.arena.end_neuron_read(self.ring, neuron, error)

    def stop(self) -> None:
        self.arena.stop_neuron_reads(self.ring)


def fresh_ring(shape: RingShape) -> NeuronRing:
    """A formatted ring in this process's own memory."""
    ring = NeuronRing(shape)
    ring.format()
    return ring


def write_bundles(path: Path, shape: RingShape, seed: int = 0) -> bytes:
    """A file of random bytes of the shape's size; returns them."""
    content = np.random.default_rng(seed).bytes(shape.file_bytes)
    path.write_bytes(content)
    return content


class RunningReader:
    """A reader at work in a thread of its own, which opens nothing and closes nothing."""

    def __init__(self, reader: NeuronReader, ring: NeuronRing) -> None:
        self._ring = ring
        self.result: int | None = None
        self._thread = threading.Thread(target=self._run, args=(reader,), daemon=True)
        self._thread.start()

    def _run(self, reader: NeuronReader) -> None:
        self.result = reader.run()

    def join(self) -> int:
        """Wait for its end; what `run` returned."""
        self._thread.join(30.0)
        assert not self._thread.is_alive() and self.result is not None
        return self.result

    def stop(self) -> int:
        """Stop the ring and wait for its end."""
        self._ring.stop()
        return self.join()


def check_landed(ring: NeuronRing, content: bytes, neurons: list[int], slots: list[int]) -> None:
    for neuron, slot in zip(neurons, slots, strict=True):
        assert ring.wait(neuron) == 1
        assert ring.rows(slot) == content[ring.shape.place(neuron)]


def run_steps(ring: NeuronRing, content: bytes, seed: int, num_steps: int) -> None:
    """Steps of an executor: random neurons of all layers, waited for and looked at."""
    chance = random.Random(seed)
    for epoch in range(1, num_steps + 1):
        count = chance.randint(1, ring.shape.num_slots)
        neurons = chance.sample(range(ring.shape.num_neurons), count)
        check_landed(ring, content, neurons, ring.use(epoch, neurons))


def _pages(num_bytes: int) -> int:
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
