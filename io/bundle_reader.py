"""Reads layers of bundles in one sequential pass: deciding rows become tiles, others go to slots.

The arena does not hold bundles as the file does (docs/FORMAT.md): what is needed to decide lies
apart from what only active neurons need.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from polyneuron.io.block_device import BlockDevice, ByteRange
from polyneuron.io.ncf_format import EXTENT_BYTES, NcfSection
from polyneuron.io.read_ahead import read_ahead
from polyneuron.io.section_reader import damaged
from polyneuron.io.weight_reader import ReadReport
from polyneuron.kernels.arena import Arena
from polyneuron.kernels.checksum import crc32c
from polyneuron.kernels.neuron_cache import NeuronCache
from polyneuron.kernels.quant import TILE_ROWS, StorageType, pack_tiles_from_rows, tile_bytes

CHUNK_BYTES = 8 << 20
LOCK_TIMEOUT_NS = 1_000_000_000
SLOT_MASK = 0xFFFFFF  # a slot without SLOT_LATE
Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class SlotRun:
    """Neurons of a layer whose rows go to slots: bytes of a bundle from `read_begin` on."""

    neurons: range
    offset: int
    """Of the first neuron's slot; of a cache's first slot."""
    read_begin: int
    slot_bytes: int

    def share(self, neurons: range, bundles: Bytes) -> tuple[range, Bytes]:
        """Which of some bundles are of this run, and what of them goes to the slots."""
        first = max(self.neurons.start, neurons.start)
        mine = range(first, max(first, min(self.neurons.stop, neurons.stop)))
        rows = bundles[mine.start - neurons.start : mine.stop - neurons.start]
        return mine, rows[:, self.read_begin : self.read_begin + self.slot_bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class BundleRead:
    """One layer to be brought to the arena; offsets in the arena, 0 for none."""

    section: NcfSection
    cols: int
    decide_type: StorageType
    decide_row: int
    """In a bundle."""
    num_tiled: int
    """Neurons, from the first on, whose deciding rows go to `tiles_offset` as tiles."""
    tiles_offset: int
    pinned: SlotRun | None = None
    """Neurons that stay."""
    warm: SlotRun | None = None
    """Neurons that fill the neuron cache: they are read in passing anyway."""
    cache_offset: int = 0
    """The neuron cache, when the layer's rows are cached."""
    first_neuron: int = 0
    """The layer's first neuron, as the cache counts them."""

    @property
    def file_bytes(self) -> int:
        """Bytes to be read from the file."""
        return self.section.num_bytes


class _Extents:
    """Sums a section's bytes as they come and compares them MiB by MiB."""

    def __init__(self, path: Path, section: NcfSection) -> None:
        self._path, self._section = path, section
        self._crc, self._done = 0, 0

    def feed(self, view: memoryview) -> None:
        """Go on with the next bytes; ChecksumError naming section and place."""
        at = 0
        while at < len(view):
            room = EXTENT_BYTES - self._done % EXTENT_BYTES
            part = view[at : at + room]
            self._crc = crc32c(part, self._crc)
            self._done += len(part)
            at += len(part)
            if self._done % EXTENT_BYTES == 0 or self._done == self._section.num_bytes:
                self._compare((self._done - 1) // EXTENT_BYTES)

    def _compare(self, index: int) -> None:
        if self._crc != int(self._section.checksums[index]):
            raise damaged(self._path, self._section, index)
        self._crc = 0


def read_bundles(
    device: BlockDevice, reads: Sequence[BundleRead], arena: Arena, progress: Callable[[int], None]
) -> ReadReport:
    """Bring layers to their places, verified; `progress` gets the bytes so far.

    Raises DeviceError or ChecksumError naming file and place.
    """
    plan = [(read, neurons, wanted) for read in reads for neurons, wanted in _chunks(read)]
    total, sums = 0, None
    with closing(read_ahead(device, [wanted for _, _, wanted in plan])) as views:
        for (read, neurons, wanted), view in zip(plan, views, strict=True):
            if neurons.start == 0:
                sums = _Extents(device.info().path, read.section)
            assert sums is not None
            sums.feed(view)
            _place(read, neurons, np.frombuffer(view, np.uint8), arena)
            total += wanted.num_bytes
            progress(total)
    return ReadReport(total, device.info().is_direct, {})


def _chunks(read: BundleRead) -> Iterator[tuple[range, ByteRange]]:
    """Whole tiles of neurons with their bytes; the last chunk ends where the section ends."""
    shape, section = read.section.bundles, read.section
    assert shape is not None
    step = max(1, CHUNK_BYTES // (shape.bundle_bytes * TILE_ROWS)) * TILE_ROWS
    for first in range(0, shape.num_neurons, step):
        last = min(first + step, shape.num_neurons)
        start = first * shape.bundle_bytes
        stop = section.num_bytes if last == shape.num_neurons else last * shape.bundle_bytes
        yield range(first, last), ByteRange(section.offset + start, stop - start)


def _place(read: BundleRead, neurons: range, view: Bytes, arena: Arena) -> None:
    shape = read.section.bundles
    assert shape is not None
    bundles = view[: len(neurons) * shape.bundle_bytes].reshape(len(neurons), shape.bundle_bytes)
    tiled = range(neurons.start, min(neurons.stop, read.num_tiled))
    if tiled:
        _pack_deciding(read, tiled, bundles[: len(tiled)], arena)
    if run := read.pinned:
        mine, slots = run.share(neurons, bundles)
        place = run.offset + (mine.start - run.neurons.start) * run.slot_bytes
        if mine:
            arena.view(place, slots.shape, np.uint8)[:] = slots
    if read.warm:
        mine, slots = read.warm.share(neurons, bundles)
        if mine:
            _warm(read, read.warm, mine, slots, arena)


def _pack_deciding(read: BundleRead, neurons: range, bundles: Bytes, arena: Arena) -> None:
    one_tile = tile_bytes(read.decide_type, read.cols)
    num = -(-len(neurons) // TILE_ROWS)
    place = read.tiles_offset + neurons.start // TILE_ROWS * one_tile
    tiles = arena.view(place, (num * one_tile,), np.uint8)
    pack_tiles_from_rows(read.decide_type, bundles[:, read.decide_row :], read.cols, tiles)


def _warm(read: BundleRead, run: SlotRun, neurons: range, rows: Bytes, arena: Arena) -> None:
    """Admit neurons whose rows are at hand."""
    cache = NeuronCache(arena.address + read.cache_offset)
    ids = np.arange(neurons.start, neurons.stop, dtype=np.uint32) + read.first_neuron
    with cache.locked(LOCK_TIMEOUT_NS):
        use = cache.use(neurons.start, ids)
    assert use is not None  # nothing else is in use yet
    slots = use.slots & SLOT_MASK
    view = arena.view(run.offset, (int(slots.max()) + 1, run.slot_bytes), np.uint8)
    view[slots] = rows
    for neuron in ids:
        cache.landed(int(neuron))
