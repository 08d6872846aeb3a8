"""Reads weights from a GGUF into the arena, packing them into tiles on the way.

Memory stays bounded: rows pass through one buffer, a whole number of tiles at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from polyneuron.errors import FormatError
from polyneuron.io.file_device import open_device
from polyneuron.io.gguf_file import GgufTensor
from polyneuron.io.pack import PackError, pack_rows_into, vector_values
from polyneuron.kernels.arena import Arena
from polyneuron.kernels.quant import StorageType, tile_bytes

READ_BYTES = 8 << 20
TILE_ROWS = 32


@dataclass(frozen=True, slots=True)
class WeightRead:
    """One tensor to be brought to `offset` in the arena; storage None: a float vector."""

    tensor: GgufTensor
    storage: StorageType | None
    offset: int
    num_bytes: int

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
    path: Path, reads: list[WeightRead], arena: Arena, progress: Callable[[int], None]
) -> ReadReport:
    """Bring every weight to its place; `progress` is called with the bytes read so far."""
    largest = max((_chunk_bytes(read.tensor) for read in reads), default=0)
    total = 0
    lossy: dict[str, PackError] = {}
    with open_device(path, largest) as device:
        for read in reads:
            rows = _chunk_rows(read.tensor)
            for row in range(0, read.tensor.num_rows, rows):
                count = min(rows, read.tensor.num_rows - row)
                start = read.tensor.offset + row * read.tensor.row_bytes
                raw = device.read(start, count * read.tensor.row_bytes)
                try:
                    error = _place(read, row, count, raw, arena)
                except FormatError as problem:  # names the tensor; only here is the file known
                    raise FormatError(f"{path}: {problem}") from None
                finally:
                    raw.release()
                if error is not None and not error.is_lossless:
                    lossy[read.tensor.name] = lossy.get(read.tensor.name, PackError()) + error
                total += count * read.tensor.row_bytes
                progress(total)
        return ReadReport(total, device.is_direct, lossy)


def _chunk_rows(tensor: GgufTensor) -> int:
    """Rows read at once: whole tiles, about READ_BYTES."""
    tiles = READ_BYTES // (tensor.row_bytes * TILE_ROWS)
    return min(tensor.num_rows, max(1, tiles) * TILE_ROWS)


def _chunk_bytes(tensor: GgufTensor) -> int:
    return _chunk_rows(tensor) * tensor.row_bytes


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
