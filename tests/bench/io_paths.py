"""The product's two ways from the file to the arena, as closed loops whose speed can be taken.

Layers: `LayerReader` fills stage buffers that are free again at once. Neurons: the ring of orders
and the loop in C behind it, with an executor that keeps it full. The arena is shared memory in
pages of 4 KiB, as the product's.
"""

from __future__ import annotations

import mmap
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from polyneuron.io.file_device import DeviceOptions, open_device
from polyneuron.io.layer_reader import LayerReader
from polyneuron.io.ncf_format import NcfSection, SectionKind
from polyneuron.io.neuron_reader import NeuronReader, open_neuron_device
from polyneuron.kernels._kernels import ffi
from polyneuron.kernels.arena import PAGE_BYTES, Arena, monotonic_ns
from tests.bench.speed import Speed
from tests.support.neuron_ring import NeuronRing, RingShape

MIB = 1 << 20
SECTION_BYTES = 96 * MIB  # a layer of a 7B model, about
NUM_BUFFERS = 3
NUM_ORDERED = 8  # batches that may be under way
BATCH = 64
NUM_LAYERS = 16
WAIT_NS = 30 * 10**9


@contextmanager
def shared_memory(num_bytes: int) -> Iterator[NDArray[np.uint8]]:
    """Bytes of an anonymous memory file, every page there."""
    descriptor = os.memfd_create("bench")
    try:
        os.ftruncate(descriptor, num_bytes)
        memory = np.frombuffer(mmap.mmap(descriptor, num_bytes), np.uint8)
        memory[:] = 1
        yield memory
    finally:
        os.close(descriptor)


class _Reading:
    """A reader in a thread, and what it took."""

    def __init__(self, run: Callable[[], object]) -> None:
        self.cpu_ns = 0
        self._thread = threading.Thread(target=self._run, args=(run,))
        self._thread.start()

    def _run(self, run: Callable[[], object]) -> None:
        start_ns = time.thread_time_ns()
        run()
        self.cpu_ns = time.thread_time_ns() - start_ns

    def join(self) -> None:
        self._thread.join()


def stream_layers(path: Path, max_ns: int, options: DeviceOptions) -> Speed:
    """Sections of the file, one after the other, round and round, as a dense model's layers."""
    section_bytes = min(SECTION_BYTES, path.stat().st_size // PAGE_BYTES * PAGE_BYTES)
    sections = [
        NcfSection(f"layer.{index}", SectionKind.TILES, index * section_bytes, section_bytes, b"")
        for index in range(path.stat().st_size // section_bytes)
    ]
    with shared_memory(PAGE_BYTES + NUM_BUFFERS * section_bytes) as memory:
        arena = Arena.over(memory)
        stream = arena.layer_stream(0)
        ffi.buffer(stream)[:] = bytes(ffi.sizeof("struct layer_stream"))
        stream.num_loads, stream.num_buffers = len(sections), NUM_BUFFERS
        stream.buffers, stream.buffer_bytes = PAGE_BYTES, section_bytes

        def read_layers() -> None:
            with open_device(path, options=options) as device:
                LayerReader(device, arena, 0, [sections]).run()

        start_ns = monotonic_ns()
        reading = _Reading(read_layers)
        while monotonic_ns() < start_ns + max_ns or not stream.bytes_read:
            landed = arena.wait_word(0, stream.consumed, max_ns)
            arena.store_word(ffi.offsetof("struct layer_stream", "consumed"), landed)
        num_bytes, elapsed_ns = int(stream.bytes_read), monotonic_ns() - start_ns
        arena.stop_stream(0)
        reading.join()
        speed = _speed(num_bytes, MIB, elapsed_ns, reading.cpu_ns)
        del stream, memory
    return speed


def read_neurons(
    path: Path, read_bytes: int, max_ns: int, options: DeviceOptions, is_registered: bool
) -> Speed:
    """Random bundles of the whole file into slots, ordered in batches ahead of the reader."""
    per_layer = path.stat().st_size // NUM_LAYERS // read_bytes
    shape = RingShape(
        num_layers=NUM_LAYERS,
        neurons_per_layer=per_layer,
        bundle_bytes=read_bytes,
        read_begin=0,
        read_bytes=read_bytes,
        num_slots=(NUM_ORDERED + 2) * BATCH,
        capacity=1024,
        file_begin=0,
    )
    with shared_memory(NeuronRing(shape).num_bytes) as memory:
        ring = NeuronRing(shape, memory)
        ring.format()
        slots = shape.num_slots if is_registered else 0
        with open_neuron_device(path, ring.arena, ring.ring, options, slots) as device:
            batches = _batches(shape)
            start_ns = monotonic_ns()
            reading = _Reading(NeuronReader(device, ring.arena, ring.ring).run)
            _order(ring, batches, start_ns + max_ns)
            elapsed_ns, num_reads = monotonic_ns() - start_ns, int(ring.reads.reads)
            ring.stop()
            reading.join()
            assert ring.reads.error == 0
        del ring, memory
    return _speed(num_reads * read_bytes, read_bytes, elapsed_ns, reading.cpu_ns)


def _speed(num_bytes: int, read_bytes: int, elapsed_ns: int, cpu_ns: int) -> Speed:
    num_reads = num_bytes // read_bytes
    return Speed(
        num_bytes * 1e9 / elapsed_ns, num_reads * 1e9 / elapsed_ns, cpu_ns / num_reads / 1e3
    )


def _batches(shape: RingShape) -> list[NDArray[np.uint32]]:
    """Random neurons, ascending within a batch, drawn before time is taken."""
    choices = np.random.default_rng(random.getrandbits(40))
    picks = [choices.integers(0, shape.num_neurons, BATCH, np.uint32) for _ in range(4096)]
    return [np.unique(pick) for pick in picks]


def _order(ring: NeuronRing, batches: list[NDArray[np.uint32]], end_ns: int) -> None:
    """Use batch after batch; each waits until the one NUM_ORDERED before it has landed.

    The neuron ordered last is waited for first: who reads is measured, not who is woken.
    """
    for epoch in range(1, 1 << 30):
        if epoch > NUM_ORDERED:
            for neuron in batches[(epoch - NUM_ORDERED) % len(batches)][::-1].tolist():
                ring.wait(neuron)
            if monotonic_ns() > end_ns:
                return
        ring.order(epoch, batches[epoch % len(batches)])
