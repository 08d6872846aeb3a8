"""From a GGUF's blocks to the tiles the kernels read: which storage type, and the packing itself.

Lossless where the source's blocks have a twin among the storage types; otherwise the block values
are decoded and rounded once more, and the error is counted.
"""

import math
from dataclasses import dataclass

import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

from polyneuron.errors import FormatError
from polyneuron.io.gguf_file import GgufTensor
from polyneuron.io.gguf_values import quoted
from polyneuron.kernels.gemv import gather_row
from polyneuron.kernels.quant import (
    TILE_ROWS,
    GgmlType,
    StorageType,
    num_tiles,
    pack_tiles,
    pack_tiles_from_f32,
    pack_tiles_q4m_parts,
    tile_bytes,
)

F32 = NDArray[np.float32]
Bytes = NDArray[np.uint8]
Readable = bytes | bytearray | memoryview | Bytes
Writable = bytearray | memoryview | Bytes

BF16, Q4_K = 30, 12
MAX_CHUNK_VALUES = 1 << 18  # decoding takes about 20 bytes a value: 5 MB stay in the cache
HALF_MAX = 65504.0

_LOSSLESS: dict[int, StorageType] = {
    GgmlType.F32: StorageType.F32,
    GgmlType.F16: StorageType.F16,
    GgmlType.Q4_0: StorageType.Q4,
    GgmlType.Q4_1: StorageType.Q4M,
    GgmlType.Q5_0: StorageType.Q8,
    GgmlType.Q8_0: StorageType.Q8,
}


@dataclass(frozen=True, slots=True)
class PackError:
    """How far stored weights are from the source's; errors of parts of a tensor add up."""

    max_abs: float = 0.0
    squared_error: float = 0.0
    squared_values: float = 0.0

    @property
    def is_lossless(self) -> bool:
        """Whether every value is stored as it was."""
        return self.max_abs == 0.0

    @property
    def relative_rms(self) -> float:
        """Root of the squared error over the squared values; 0 when nothing was rounded."""
        if self.squared_error == 0.0:
            return 0.0
        return math.sqrt(self.squared_error / self.squared_values)

    def __add__(self, other: "PackError") -> "PackError":
        return PackError(
            max(self.max_abs, other.max_abs),
            self.squared_error + other.squared_error,
            self.squared_values + other.squared_values,
        )


def storage_type(tensor: GgufTensor, *, bf16_fits: bool = True) -> StorageType:
    """The storage type of a tensor; `bf16_fits`: what `bf16_fits_f16` said of a BF16 one's data."""
    if len(tensor.shape) == 1:
        return StorageType.F32
    if tensor.type_id == BF16:
        return StorageType.F16 if bf16_fits else StorageType.F32
    if tensor.type_id == Q4_K:
        return StorageType.Q4M
    return _LOSSLESS.get(tensor.type_id, StorageType.Q8)


def is_lossless(tensor: GgufTensor, storage: StorageType) -> bool:
    """Whether packing as `storage` changes no value."""
    return storage is StorageType.F32 or _LOSSLESS.get(tensor.type_id) is storage


def packed_bytes(tensor: GgufTensor, storage: StorageType) -> int:
    """Bytes a tensor takes in memory: tiles of 32 rows, or a plain f32 vector."""
    if len(tensor.shape) == 1:
        return 4 * tensor.num_cols
    return num_tiles(tensor.num_rows) * tile_bytes(storage, tensor.num_cols)


def bf16_fits_f16(raw: Readable) -> bool:
    """Whether every value of BF16 data is in the range of f16."""
    magnitudes = np.frombuffer(raw, dtype="<u2") & 0x7FFF
    return (
        not magnitudes.size or int(magnitudes.max()) <= int(np.float32(HALF_MAX).view("u4")) >> 16
    )


def decode_rows(tensor: GgufTensor, raw: Readable) -> F32:
    """The float32 values (num_rows, num_cols) of some whole rows."""
    blocks = np.frombuffer(raw, dtype=np.uint8)
    if blocks.size % tensor.row_bytes:
        raise ValueError(f"raw: {blocks.size} bytes, needs whole rows of {tensor.row_bytes}")
    rows = blocks.reshape(-1, tensor.row_bytes)
    with np.errstate(all="ignore"):  # damaged scales: found by _check_finite
        values: F32 = dequantize(rows, GGMLQuantizationType(tensor.type_id))
    return values.astype(np.float32, copy=False)


def vector_values(tensor: GgufTensor, raw: Readable) -> F32:
    """A norm or bias: the values (num_cols) of a 1-D tensor."""
    values = decode_rows(tensor, raw).reshape(-1)
    _check_finite(tensor, values)
    return values


def pack_rows_into(
    tensor: GgufTensor, storage: StorageType, raw: Readable, out: Writable
) -> PackError:
    """Pack whole rows of a matrix, a multiple of 32 of them or up to its last, into tiles at `out`.

    `out` holds exactly the tiles; memory beside it stays within some 10 MB.
    """
    source = np.frombuffer(raw, dtype=np.uint8)
    target = np.frombuffer(out, dtype=np.uint8)
    num_rows, rest = divmod(source.size, tensor.row_bytes)
    if rest or not num_rows:
        raise ValueError(f"raw: {source.size} bytes, needs whole rows of {tensor.row_bytes}")
    tile_size = tile_bytes(storage, tensor.num_cols)
    if target.size != num_tiles(num_rows) * tile_size:
        raise ValueError(f"out: {target.size} bytes, needs {num_tiles(num_rows)} x {tile_size}")
    if _LOSSLESS.get(tensor.type_id) is storage:
        ggml_type = GgmlType(tensor.type_id)
        pack_tiles(storage, ggml_type, source, num_rows, tensor.num_cols, out=target)
        return PackError()
    chunk_tiles = max(1, MAX_CHUNK_VALUES // (tensor.num_cols * TILE_ROWS))
    total = PackError()
    for first in range(0, num_tiles(num_rows), chunk_tiles):
        first_row = first * TILE_ROWS
        end_row = min(num_rows, first_row + chunk_tiles * TILE_ROWS)
        rows = source[first_row * tensor.row_bytes : end_row * tensor.row_bytes]
        tiles = target[first * tile_size : (first + num_tiles(end_row - first_row)) * tile_size]
        total += _pack_chunk(tensor, storage, rows, tiles)
    return total


def _pack_chunk(tensor: GgufTensor, storage: StorageType, rows: Bytes, tiles: Bytes) -> PackError:
    values = decode_rows(tensor, rows)
    _check_finite(tensor, values)
    if tensor.type_id == Q4_K and storage is StorageType.Q4M:
        quants, scale, minimum = split_q4_k(rows, tensor.num_cols)
        pack_tiles_q4m_parts(quants, scale, minimum, out=tiles)
    else:
        if storage is StorageType.F16 and np.abs(values).max() > HALF_MAX:
            raise FormatError(
                f"tensor {quoted(tensor.name)} holds values beyond the range of f16; convert it "
                "with --weights f32"
            )
        pack_tiles_from_f32(storage, values, out=tiles)
    if storage is StorageType.F32:
        return PackError()
    error = _error(storage, values, tiles)
    if not math.isfinite(error.max_abs):
        raise FormatError(f"tensor {quoted(tensor.name)} holds values too large to be stored")
    return error


def _check_finite(tensor: GgufTensor, values: F32) -> None:
    if not np.isfinite(values).all():
        raise FormatError(f"tensor {quoted(tensor.name)} holds values that are not finite numbers")


def _error(storage: StorageType, values: F32, tiles: Bytes) -> PackError:
    """Compare with what the kernels will read from the tiles."""
    num_rows, num_cols = values.shape
    difference = np.empty_like(values)
    with np.errstate(all="ignore"):  # values too large to be stored: found by the caller
        for row in range(num_rows):
            np.subtract(gather_row(storage, tiles, num_cols, row), values[row], out=difference[row])
    return PackError(
        max_abs=float(max(difference.max(), -difference.min())),
        squared_error=float(np.vdot(difference, difference)),
        squared_values=float(np.vdot(values, values)),
    )


def split_q4_k(
    rows: Bytes, num_cols: int
) -> tuple[NDArray[np.uint8], NDArray[np.float16], NDArray[np.float16]]:
    """Q4_K blocks as q4m parts: quants (rows, cols), scale and minimum (rows, cols / 32).

    The quants stay; only scale x sub-scale and minimum x sub-minimum are rounded to f16.
    """
    blocks = rows.reshape(-1, 144)
    halves = np.ascontiguousarray(blocks[:, :4]).view("<f2").astype(np.float32)
    packed = blocks[:, 4:16].reshape(-1, 3, 4)
    low, middle, high = packed[:, 0], packed[:, 1], packed[:, 2]
    sub_scale = np.concatenate([low & 63, (high & 15) | (low >> 2 & 48)], axis=1)
    sub_minimum = np.concatenate([middle & 63, (high >> 4) | (middle >> 2 & 48)], axis=1)
    nibbles = blocks[:, 16:].reshape(-1, 4, 1, 32) >> np.array([0, 4], np.uint8).reshape(2, 1) & 15
    shape = (-1, num_cols // 32)
    return (
        np.ascontiguousarray(nibbles.reshape(-1, num_cols)),
        (halves[:, :1] * sub_scale).astype(np.float16).reshape(shape),
        (-halves[:, 1:] * sub_minimum).astype(np.float16).reshape(shape),
    )
