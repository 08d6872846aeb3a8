"""Reads weights from a GGUF into the arena, packing them into tiles on the way.

Memory stays bounded: rows pass through a few buffers, a whole number of tiles at a time, and the
next ones are being read while one is packed.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from polyneuron.errors import FormatError
from polyneuron.io.block_device import BlockDevice, ByteRange
from polyneuron.io.gguf_file import GgufTensor
from polyneuron.io.model_files import ModelFiles, views_of
from polyneuron.io.pack import PackError, pack_rows_into, vector_values
from polyneuron.io.read_ahead import read_ahead
from polyneuron.kernels.arena import Arena
from polyneuron.kernels.quant import TILE_ROWS, StorageType, tile_bytes

READ_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class WeightRead:
    """One tensor to be brought to `offset` in the arena; storage None: a float vector."""

    tensor: GgufTensor
    storage: StorageType | None
    offset: int
    num_bytes: int
    files: ModelFiles | None = None
    """Where the tensor's offset lies; None: in the model's one file."""

    @property
    def file_bytes(self) -> int:
        """Bytes to be read from the file."""
        return self.tensor.num_bytes


@dataclass(frozen=True, slots=True)
class ReadReport:
    """What reading a file's weights came to."""

    num_bytes: int
    is_direct: bool
    lossy: dict[str, PackError]
    """Tensors whose values changed on the way to their storage type."""


def read_weights(
    device: BlockDevice, reads: list[WeightRead], arena: Arena, progress: Callable[[int], None]
) -> ReadReport:
    """Bring every weight to its place; `progress` is called with the bytes read so far."""
    chunks = [chunk for read in reads for chunk in _chunks(read)]
    views = read_ahead(device, [chunk.source for chunk in chunks])
    total, lossy = _place_all(device.info().path, chunks, views, arena, progress)
    return ReadReport(total, device.info().is_direct, lossy)


def read_parted(
    path: Path, reads: list[WeightRead], arena: Arena, progress: Callable[[int], None]
) -> ReadReport:
    """The same for weights in several files; `path` stands for all of them in errors."""
    chunks = [chunk for read in reads for chunk in _chunks(read)]
    files = reads[0].files
    assert files is not None
    views = views_of(files, [chunk.source for chunk in chunks])
    total, lossy = _place_all(path, chunks, views, arena, progress)
    return ReadReport(total, False, lossy)


def _place_all(
    path: Path,
    chunks: list[_Chunk],
    ahead: Generator[memoryview, None, None],
    arena: Arena,
    progress: Callable[[int], None],
) -> tuple[int, dict[str, PackError]]:
    """Bytes read, and the tensors whose values changed."""
    total = 0
    lossy: dict[str, PackError] = {}
    with closing(ahead) as views:
        for chunk, raw in zip(chunks, views, strict=True):
            name = chunk.read.tensor.name
            try:
                error = _place(chunk.read, chunk.row, chunk.num_rows, raw, arena)
            except FormatError as problem:  # names the tensor; only here is the file known
                raise FormatError(f"{path}: {problem}") from None
            finally:
                raw.release()
            if error is not None and not error.is_lossless:
                lossy[name] = lossy.get(name, PackError()) + error
            total += chunk.source.num_bytes
            progress(total)
    return total, lossy


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Rows of one tensor that are read at once."""

    read: WeightRead
    row: int
    num_rows: int
    source: ByteRange


def _chunks(read: WeightRead) -> Iterator[_Chunk]:
    """Whole tiles, about READ_BYTES each."""
    tensor = read.tensor
    tiles = max(1, READ_BYTES // (tensor.row_bytes * TILE_ROWS))
    for row in range(0, tensor.num_rows, tiles * TILE_ROWS):
        count = min(tiles * TILE_ROWS, tensor.num_rows - row)
        start = tensor.offset + row * tensor.row_bytes
        yield _Chunk(read, row, count, ByteRange(start, count * tensor.row_bytes))


def _place(
    read: WeightRead, row: int, count: int, raw: memoryview, arena: Arena
) -> PackError | None:
    if read.storage is None:
        values = vector_values(read.tensor, raw)
        target = arena.view(read.offset, (read.num_bytes // 4,), np.float32)
        target[: len(values)] = values
        target[len(values) :] = 0.0
        return None
    size = tile_bytes(read.storage, read.tensor.num_cols)
    tiles = -(-count // TILE_ROWS)
    out = arena.bytes_at(read.offset + row // TILE_ROWS * size, tiles * size)
    return pack_rows_into(read.tensor, read.storage, raw, out)
