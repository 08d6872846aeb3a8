"""Storage types of weights: sizes, packing into tiles and rows, quantised activations."""

from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from polyneuron.kernels._kernels import ffi
from polyneuron.kernels.buffers import (
    ACT_BLOCK,
    F32,
    Array,
    last_axis,
    read_pointer,
    write_pointer,
)
from polyneuron.kernels.isa import library

if TYPE_CHECKING:
    from polyneuron.kernels._kernels import CData

TILE_ROWS = 32
BLOCK_COLS = 32
KV_BLOCK_TOKENS = 32

Bytes = npt.NDArray[np.uint8]


class StorageType(IntEnum):
    """How a matrix is stored; values are those of `enum storage_type`."""

    F32 = 0
    F16 = 1
    Q8 = 2
    Q4 = 3
    Q4M = 4
    Q1 = 5

    @property
    def is_quantised(self) -> bool:
        """Whether it takes int8 activations and columns in multiples of 32."""
        return self not in (StorageType.F16, StorageType.F32)

    @property
    def is_for_weights(self) -> bool:
        """Whether a model's weights may be stored so; q1 is for predictors, and in tiles only."""
        return self is not StorageType.Q1


KV_TYPES = (StorageType.F16, StorageType.Q8, StorageType.Q4)
"""What keys and values may be stored as."""


class GgmlType(IntEnum):
    """The ggml types that have a lossless packing."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q8_0 = 8


# ggml type -> (values a block, bytes a block)
_GGML_BLOCKS = {
    GgmlType.F32: (1, 4),
    GgmlType.F16: (1, 2),
    GgmlType.Q4_0: (32, 18),
    GgmlType.Q4_1: (32, 20),
    GgmlType.Q5_0: (32, 22),
    GgmlType.Q8_0: (32, 34),
}


def _check_cols(storage_type: StorageType, cols: int) -> None:
    multiple = BLOCK_COLS if storage_type.is_quantised else 1
    if cols <= 0 or cols % multiple:
        stored = storage_type.name.lower()
        raise ValueError(f"cols: {cols} with {stored}, needs a positive multiple of {multiple}")


def tile_bytes(storage_type: StorageType, cols: int) -> int:
    """Bytes of one tile: 32 rows over all columns."""
    _check_cols(storage_type, cols)
    return library().tile_bytes(storage_type, cols)


def row_bytes(storage_type: StorageType, cols: int) -> int:
    """Bytes of one row in the neuron-major row layout; ValueError for q1, which has none."""
    if storage_type is StorageType.Q1:
        raise ValueError("storage_type: q1 is stored in tiles only; choose q4 or q8 for rows")
    _check_cols(storage_type, cols)
    return library().row_bytes(storage_type, cols)


def kv_block_bytes(head_dim: int, storage_type: StorageType = StorageType.F16) -> int:
    """Bytes of a KV block: 32 tokens of one layer and one kv head, as f16, q8 or q4.

    ValueError for other types, and for q8 or q4 of a head_dim that is no multiple of 32.
    """
    if storage_type not in KV_TYPES:
        raise ValueError(f"storage_type: {storage_type.name.lower()}, needs f16, q8 or q4")
    _check_cols(storage_type, head_dim)
    return library().kv_block_bytes(storage_type, head_dim)


def num_tiles(num_rows: int) -> int:
    """Tiles that hold `num_rows` rows, the last one padded with zeros."""
    return -(-num_rows // TILE_ROWS)


def quantize_acts(x: F32) -> npt.NDArray[np.void]:
    """x (..., cols) -> blocks of 32 int8 activations (..., cols / 32)."""
    cols = last_axis("x", x, multiple_of=BLOCK_COLS)
    source = read_pointer("x", x, np.float32)
    out = np.empty((*x.shape[:-1], cols // BLOCK_COLS), ACT_BLOCK)
    library().quantize_acts(ffi.from_buffer("struct act_block[]", out), source, x.size)
    return out


def _new_tiles(storage_type: StorageType, num_rows: int, cols: int, out: Bytes | None) -> Bytes:
    wanted = num_tiles(num_rows) * tile_bytes(storage_type, cols)
    if out is None:
        return np.empty(wanted, np.uint8)
    write_pointer("out", out, np.uint8, (wanted,))
    return out


def _new_rows(storage_type: StorageType, num_rows: int, cols: int, out: Bytes | None) -> Bytes:
    wanted = num_rows * row_bytes(storage_type, cols)
    if out is None:
        return np.empty(wanted, np.uint8)
    write_pointer("out", out, np.uint8, (wanted,))
    return out


def _check_source(ggml_type: GgmlType, src: Array, num_rows: int, cols: int) -> None:
    values, block_bytes = _GGML_BLOCKS[ggml_type]
    wanted = num_rows * cols // values * block_bytes
    if src.nbytes != wanted:
        raise ValueError(
            f"src: {src.nbytes} bytes, {ggml_type.name} of ({num_rows}, {cols}) needs {wanted}"
        )


def _check_packed(status: int, storage_type: StorageType, source: str) -> None:
    if status != 0:
        raise ValueError(f"src: {source} cannot be packed as {storage_type.name.lower()}")


def pack_tiles(
    storage_type: StorageType,
    ggml_type: GgmlType,
    src: Bytes,
    num_rows: int,
    cols: int,
    out: Bytes | None = None,
) -> Bytes:
    """ggml blocks (num_rows, cols), as bytes, -> tiles, changing no value."""
    _check_source(ggml_type, src, num_rows, cols)
    out = _new_tiles(storage_type, num_rows, cols, out)
    source = read_pointer("src", src, np.uint8)
    target = ffi.from_buffer(out)
    status = library().pack_tiles(storage_type, target, ggml_type, source, num_rows, cols)
    _check_packed(status, storage_type, ggml_type.name)
    return out


def pack_rows(
    storage_type: StorageType,
    ggml_type: GgmlType,
    src: Bytes,
    num_rows: int,
    cols: int,
    out: Bytes | None = None,
) -> Bytes:
    """ggml blocks (num_rows, cols), as bytes, -> neuron-major rows, changing no value."""
    _check_source(ggml_type, src, num_rows, cols)
    out = _new_rows(storage_type, num_rows, cols, out)
    source = read_pointer("src", src, np.uint8)
    target = ffi.from_buffer(out)
    status = library().pack_rows(storage_type, target, ggml_type, source, num_rows, cols)
    _check_packed(status, storage_type, ggml_type.name)
    return out


def _rows_and_cols(src: F32) -> tuple[int, int]:
    if src.ndim != 2:
        raise ValueError(f"src: has {src.ndim} axes, needs (num_rows, cols)")
    return src.shape


def pack_tiles_from_f32(storage_type: StorageType, src: F32, out: Bytes | None = None) -> Bytes:
    """src (num_rows, cols) -> tiles.

    q8, f16, f32 are rounded to nearest even, q4 as ggml's Q4_0, q1 as by `pack_tiles_q1`.
    """
    num_rows, cols = _rows_and_cols(src)
    source = read_pointer("src", src, np.float32)
    out = _new_tiles(storage_type, num_rows, cols, out)
    target = ffi.from_buffer(out)
    status = library().pack_tiles_from_f32(storage_type, target, source, num_rows, cols)
    _check_packed(status, storage_type, "float32")
    return out


def pack_rows_from_f32(storage_type: StorageType, src: F32, out: Bytes | None = None) -> Bytes:
    """src (num_rows, cols) -> neuron-major rows, rounded as by `pack_tiles_from_f32`."""
    num_rows, cols = _rows_and_cols(src)
    source = read_pointer("src", src, np.float32)
    out = _new_rows(storage_type, num_rows, cols, out)
    target = ffi.from_buffer(out)
    status = library().pack_rows_from_f32(storage_type, target, source, num_rows, cols)
    _check_packed(status, storage_type, "float32")
    return out


def _row_stride(rows: Bytes, row_size: int) -> int:
    """Bytes from one row to the next of rows (num_rows, row_size or more)."""
    if not isinstance(rows, np.ndarray) or rows.dtype != np.uint8 or rows.ndim != 2:
        raise ValueError("rows: needs a uint8 array of 2 axes (num_rows, row bytes)")
    num_rows, width = rows.shape
    stride = rows.strides[0] if num_rows > 1 else width
    if width < row_size or stride < row_size or rows.strides[1] != 1:
        raise ValueError(
            f"rows: shape is {rows.shape}, strides are {rows.strides}; a row has {row_size} bytes, "
            "one beside the other"
        )
    return stride


def pack_tiles_from_rows(
    storage_type: StorageType, rows: Bytes, cols: int, out: Bytes | None = None
) -> Bytes:
    """Neuron-major rows (num_rows, row_bytes or more) -> tiles, every bit kept.

    Rows may lie any number of bytes apart, as they do in bundles.
    """
    stride = _row_stride(rows, row_bytes(storage_type, cols))
    out = _new_tiles(storage_type, len(rows), cols, out)
    source, target = ffi.cast("uint8_t *", rows.ctypes.data), ffi.from_buffer(out)
    library().pack_tiles_from_rows(storage_type, target, source, stride, len(rows), cols)
    return out


def pack_tiles_q1(
    src: F32, scale: npt.NDArray[np.float16] | None = None, out: Bytes | None = None
) -> Bytes:
    """src (num_rows, cols) -> q1 tiles: a value of 0 or more is +scale, any other -scale.

    scale (num_rows, cols / 32); None: the mean magnitude of each block of 32, which is the least
    squares fit of a sign and a scale (Rastegari et al. 2016, XNOR-Net).
    """
    num_rows, cols = _rows_and_cols(src)
    source = read_pointer("src", src, np.float32)
    out = _new_tiles(StorageType.Q1, num_rows, cols, out)
    scale_bits = ffi.NULL if scale is None else _half_bits("scale", scale, num_rows, cols)
    library().pack_tiles_q1(ffi.from_buffer(out), source, scale_bits, num_rows, cols)
    return out


def _half_bits(name: str, halves: npt.NDArray[np.float16], num_rows: int, cols: int) -> "CData":
    """Pointer to the bits of one half a block."""
    if halves.dtype != np.float16:
        raise ValueError(f"{name}: dtype is {halves.dtype}, needs float16")
    return read_pointer(name, halves.view(np.uint16), np.uint16, (num_rows, cols // BLOCK_COLS))


def pack_tiles_q4m_parts(
    quants: npt.NDArray[np.uint8],
    scale: npt.NDArray[np.float16],
    minimum: npt.NDArray[np.float16],
    out: Bytes | None = None,
) -> Bytes:
    """quants (num_rows, cols) 0..15, scale and minimum (num_rows, cols / 32) -> q4m tiles."""
    if quants.ndim != 2:
        raise ValueError(f"quants: has {quants.ndim} axes, needs (num_rows, cols)")
    num_rows, cols = quants.shape
    out = _new_tiles(StorageType.Q4M, num_rows, cols, out)
    source = read_pointer("quants", quants, np.uint8)
    scale_bits = _half_bits("scale", scale, num_rows, cols)
    min_bits = _half_bits("minimum", minimum, num_rows, cols)
    target = ffi.from_buffer(out)
    library().pack_tiles_q4m_parts(target, source, scale_bits, min_bits, num_rows, cols)
    return out
