"""Checked faces of the kernels: numpy in, numpy out; the GIL is free during each call.

Weights are uint8 arrays as `quant` packs them. No other thread may resize or free an argument
while a call runs.
"""

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
    weight_pointer,
    write_pointer,
)
from polyneuron.kernels.isa import library
from polyneuron.kernels.quant import (
    BLOCK_COLS,
    KV_BLOCK_TOKENS,
    TILE_ROWS,
    Bytes,
    StorageType,
    kv_block_bytes,
    row_bytes,
    tile_bytes,
)

if TYPE_CHECKING:
    from polyneuron.kernels._kernels import CData

RowIds = npt.NDArray[np.uint32]


class FeedForwardKind(IntEnum):
    """Activation of a feed-forward block; values are those of `enum feed_forward_kind`."""

    SILU = 0
    REGLU = 1
    DRELU = 2
    RELU = 3
    GEGLU = 4
    GELU = 5

    @property
    def has_gate(self) -> bool:
        """Whether a gate matrix belongs to it."""
        return self not in (FeedForwardKind.RELU, FeedForwardKind.GELU)


class RopeLayout(IntEnum):
    """Which elements of a head turn together; values are those of `enum rope_layout`."""

    INTERLEAVED = 0
    HALVES = 1


def _acts_pointer(storage_type: StorageType, x: Array, cols: int, num_axes: int) -> "CData":
    if x.ndim != num_axes:
        raise ValueError(f"x: has {x.ndim} axes, needs {num_axes}")
    dtype = ACT_BLOCK if storage_type.is_quantised else np.dtype(np.float32)
    length = cols // BLOCK_COLS if storage_type.is_quantised else cols
    return read_pointer("x", x, dtype, (*x.shape[:-1], length))


def matmul_tiles(
    storage_type: StorageType, w: Bytes, cols: int, x: Array, out: F32 | None = None
) -> F32:
    """w (tiles), x (num_tokens, cols) -> out (num_tokens, 32 * num_tiles).

    x is `quantize_acts` of the activations for quantised types, else float32.
    """
    weights, tiles = weight_pointer("w", w, tile_bytes(storage_type, cols))
    acts = _acts_pointer(storage_type, x, cols, 2)
    shape = (x.shape[0], TILE_ROWS * tiles)
    out = np.empty(shape, np.float32) if out is None else out
    target = write_pointer("out", out, np.float32, shape)
    library().matmul_tiles(storage_type, target, shape[1], weights, tiles, cols, acts, shape[0])
    return out


def gather_row(storage_type: StorageType, w: Bytes, cols: int, row: int) -> F32:
    """One row of a tiled matrix -> (cols), as float32."""
    weights, tiles = weight_pointer("w", w, tile_bytes(storage_type, cols))
    if not 0 <= row < tiles * TILE_ROWS:
        raise ValueError(f"row: {row} is outside of 0..{tiles * TILE_ROWS - 1}")
    out = np.empty(cols, np.float32)
    library().gather_row(storage_type, ffi.from_buffer("float[]", out), weights, cols, row)
    return out


def _row_ids_pointer(row_ids: RowIds | None, num_stored: int) -> "tuple[CData, int]":
    if row_ids is None:
        return ffi.NULL, num_stored
    pointer = read_pointer("row_ids", row_ids, np.uint32, (row_ids.size,))
    if row_ids.size and int(row_ids.max()) >= num_stored:
        raise ValueError(f"row_ids: {row_ids.max()} is outside of 0..{num_stored - 1}")
    return pointer, row_ids.size


def dot_rows(
    storage_type: StorageType, rows: Bytes, cols: int, x: Array, row_ids: RowIds | None = None
) -> F32:
    """rows (neuron-major), x (cols) -> the product of each named row (all, in order, if None)."""
    stride = row_bytes(storage_type, cols)
    weights, num_stored = weight_pointer("rows", rows, stride)
    ids, num_rows = _row_ids_pointer(row_ids, num_stored)
    acts = _acts_pointer(storage_type, x, cols, 1)
    out = np.empty(num_rows, np.float32)
    target = ffi.from_buffer("float[]", out)
    library().dot_rows(storage_type, target, weights, stride, ids, num_rows, cols, acts)
    return out


def axpy_rows(
    storage_type: StorageType, out: F32, rows: Bytes, coef: F32, row_ids: RowIds | None = None
) -> None:
    """out (cols) += coef[i] * rows[row_ids[i]], i ascending."""
    cols = last_axis("out", out)
    stride = row_bytes(storage_type, cols)
    weights, num_stored = weight_pointer("rows", rows, stride)
    ids, num_rows = _row_ids_pointer(row_ids, num_stored)
    target = write_pointer("out", out, np.float32, (cols,))
    factors = read_pointer("coef", coef, np.float32, (num_rows,))
    library().axpy_rows(storage_type, target, weights, stride, ids, factors, num_rows, cols)


def rmsnorm(x: F32, w: F32, eps: float) -> F32:
    """x (n), w (n) -> x / sqrt(mean(x^2) + eps) * w."""
    n = last_axis("x", x)
    out = np.empty(n, np.float32)
    source = read_pointer("x", x, np.float32, (n,))
    weights = read_pointer("w", w, np.float32, (n,))
    library().rmsnorm_f32(ffi.from_buffer("float[]", out), source, weights, n, eps)
    return out


def layernorm(x: F32, w: F32, b: F32, eps: float) -> F32:
    """x (n), w (n), b (n) -> (x - mean) / sqrt(variance + eps) * w + b."""
    n = last_axis("x", x)
    out = np.empty(n, np.float32)
    source = read_pointer("x", x, np.float32, (n,))
    weights = read_pointer("w", w, np.float32, (n,))
    bias = read_pointer("b", b, np.float32, (n,))
    library().layernorm_f32(ffi.from_buffer("float[]", out), source, weights, bias, n, eps)
    return out


def softcap(x: F32, cap: float) -> None:
    """x = cap * tanh(x / cap) in place, cap above 0."""
    if not cap > 0:
        raise ValueError(f"cap: is {cap}, needs to be above 0")
    library().softcap_f32(write_pointer("x", x, np.float32), x.size, cap)


def add(out: F32, x: F32) -> None:
    """out += x, elementwise."""
    target = write_pointer("out", out, np.float32)
    library().add_f32(target, read_pointer("x", x, np.float32, out.shape), x.size)


def feed_forward_act(kind: FeedForwardKind, gate: F32, up: F32) -> F32:
    """act(gate) * up; gate is not read for RELU and GELU."""
    out = np.empty(up.shape, np.float32)
    gates = read_pointer("gate", gate, np.float32, up.shape)
    ups = read_pointer("up", up, np.float32)
    library().feed_forward_act(kind, ffi.from_buffer("float[]", out), gates, ups, up.size)
    return out


def rope_head(layout: RopeLayout, x: F32, cos_row: F32, sin_row: F32) -> None:
    """Rotate the first 2 * len(cos_row) elements of x (head_dim) in place."""
    pairs = last_axis("cos_row", cos_row)
    if 2 * pairs > last_axis("x", x):
        raise ValueError(f"x: {x.shape[-1]} elements, cos_row needs at least {2 * pairs}")
    target = write_pointer("x", x, np.float32, (x.size,))
    cosines = read_pointer("cos_row", cos_row, np.float32, (pairs,))
    sines = read_pointer("sin_row", sin_row, np.float32, (pairs,))
    library().rope_head(layout, target, cosines, sines, 2 * pairs)


def exp(x: F32) -> F32:
    """exp of each element, within 2 ulp; 0 below -87."""
    source = read_pointer("x", x, np.float32)
    out = np.empty(x.shape, np.float32)
    library().exp_f32(ffi.from_buffer("float[]", out), source, x.size)
    return out


def softmax(x: F32) -> None:
    """Softmax of x (n) in place."""
    n = last_axis("x", x)
    library().softmax_f32(write_pointer("x", x, np.float32, (n,)), n)


def argmax(x: F32) -> int:
    """Index of the largest element of x (n), the lowest among equals."""
    n = last_axis("x", x)
    return library().argmax_f32(read_pointer("x", x, np.float32, (n,)), n)


def top_k(x: F32, k: int) -> tuple[RowIds, F32]:
    """Ids and values of the k largest of x (n), descending, lowest id first among equals."""
    n = last_axis("x", x)
    if not 0 < k <= n:
        raise ValueError(f"k: {k} is outside of 1..{n}")
    ids, values = np.empty(k, np.uint32), np.empty(k, np.float32)
    source = read_pointer("x", x, np.float32, (n,))
    id_target = ffi.from_buffer("uint32_t[]", ids)
    library().top_k_f32(id_target, ffi.from_buffer("float[]", values), source, n, k)
    return ids, values


def _check_slot(slot: int) -> None:
    if not 0 <= slot < KV_BLOCK_TOKENS:
        raise ValueError(f"slot: {slot} is outside of 0..{KV_BLOCK_TOKENS - 1}")


def kv_write(
    kv_block: Bytes, slot: int, k: F32, v: F32, storage_type: StorageType = StorageType.F16
) -> None:
    """Store k and v (head_dim) as token `slot` of a KV block (kv_block_bytes)."""
    head_dim = last_axis("k", k)
    _check_slot(slot)
    block_bytes = kv_block_bytes(head_dim, storage_type)
    target = write_pointer("kv_block", kv_block, np.uint8, (block_bytes,))
    keys = read_pointer("k", k, np.float32, (head_dim,))
    values = read_pointer("v", v, np.float32, (head_dim,))
    library().kv_write(storage_type, target, slot, keys, values, head_dim)


def spread_values(x: F32, scale: float) -> F32:
    """H x * scale of x (n): values mixed so that a few large ones do not stand out."""
    out = np.ascontiguousarray(x, np.float32).copy()
    library().spread_values(ffi.from_buffer("float[]", out), last_axis("x", out), scale)
    return out


def kv_read(
    kv_block: Bytes, slot: int, head_dim: int, storage_type: StorageType = StorageType.F16
) -> tuple[F32, F32]:
    """k and v (head_dim) of token `slot` of a KV block, as attention reads them."""
    _check_slot(slot)
    block_bytes = kv_block_bytes(head_dim, storage_type)
    source = read_pointer("kv_block", kv_block, np.uint8, (block_bytes,))
    k, v = np.empty(head_dim, np.float32), np.empty(head_dim, np.float32)
    keys, values = ffi.from_buffer("float[]", k), ffi.from_buffer("float[]", v)
    library().kv_read(storage_type, keys, values, source, slot, head_dim)
    return k, v


def attention_heads(
    q: F32,
    kv: Bytes,
    block_table: npt.NDArray[np.int32],
    num_positions: int,
    scale: float,
    first: int = 0,
    cap: float = 0.0,
    storage_type: StorageType = StorageType.F16,
) -> F32:
    """q (num_queries, head_dim), kv (num_blocks, kv_block_bytes) -> out as q.

    Position p is in block block_table[p / 32] of kv; those from `first` on (below 32) are seen.
    Scores are soft-capped where `cap` is above 0.
    """
    if not 0 <= first < min(KV_BLOCK_TOKENS, max(num_positions, 1)):
        raise ValueError(f"first: {first} is outside of the first block or of {num_positions}")
    if q.ndim != 2 or kv.ndim != 2:
        raise ValueError(f"q, kv: have {q.ndim} and {kv.ndim} axes, need 2 and 2")
    num_queries, head_dim = q.shape
    queries = read_pointer("q", q, np.float32)
    blocks, table = _kv_pointers(kv, block_table, head_dim, num_positions, storage_type)
    out = np.empty(q.shape, np.float32)
    num_blocks = -(-num_positions // KV_BLOCK_TOKENS)
    scratch = np.empty(num_queries * num_blocks * KV_BLOCK_TOKENS, np.float32)
    library().attention_heads(
        storage_type,
        ffi.from_buffer("float[]", out),
        queries,
        num_queries,
        head_dim,
        blocks,
        table,
        kv_block_bytes(head_dim, storage_type),
        first,
        num_positions,
        scale,
        cap,
        ffi.from_buffer("float[]", scratch),
    )
    return out


def _kv_pointers(
    kv: Bytes,
    block_table: npt.NDArray[np.int32],
    head_dim: int,
    num_positions: int,
    storage_type: StorageType,
) -> "tuple[CData, CData]":
    """Of the blocks and of their table, which must name one for each position."""
    block_bytes = kv_block_bytes(head_dim, storage_type)
    blocks = read_pointer("kv", kv, np.uint8, (kv.shape[0], block_bytes))
    table = read_pointer("block_table", block_table, np.int32, (block_table.size,))
    if not 0 < num_positions <= block_table.size * KV_BLOCK_TOKENS:
        raise ValueError(f"num_positions: {num_positions}, block_table has {block_table.size}")
    used = block_table[: -(-num_positions // KV_BLOCK_TOKENS)]
    if int(used.min()) < 0 or int(used.max()) >= kv.shape[0]:
        raise ValueError(f"block_table: names blocks outside of 0..{kv.shape[0] - 1}")
    return blocks, table


def attention_block(
    q: F32,
    kv: Bytes,
    block_table: npt.NDArray[np.int32],
    num_positions: int,
    scale: float,
    window: int = 0,
    cap: float = 0.0,
    storage_type: StorageType = StorageType.F16,
) -> F32:
    """q (num_tokens, num_queries, head_dim) -> out as q; token t sees num_positions + t of kv.

    Of these the last `window` where it is not 0. Bit-equal to `attention_heads` token by token.
    """
    if q.ndim != 3 or kv.ndim != 2:
        raise ValueError(f"q, kv: have {q.ndim} and {kv.ndim} axes, need 3 and 2")
    num_tokens, num_queries, head_dim = q.shape
    if num_positions < 1 or num_tokens < 1:
        raise ValueError(f"num_positions: {num_positions}, of {num_tokens} tokens: need 1 each")
    queries = read_pointer("q", q, np.float32)
    last = num_positions + num_tokens - 1
    blocks, table = _kv_pointers(kv, block_table, head_dim, last, storage_type)
    out = np.empty(q.shape, np.float32)
    num_floats = attention_block_scratch(num_tokens * num_queries, head_dim, last)
    stride = num_queries * head_dim
    library().attention_block(
        storage_type, ffi.from_buffer("float[]", out), stride, queries, stride, num_tokens,
        num_queries, head_dim, blocks, table, kv_block_bytes(head_dim, storage_type),
        num_positions, window, scale, cap,
        ffi.from_buffer("float[]", np.empty(num_floats, np.float32)),
    )  # fmt: skip
    return out


def attention_block_scratch(num_rows: int, head_dim: int, num_positions: int) -> int:
    """Floats of scratch that `attention_block` takes for so many heads of all tokens together."""
    return library().attention_block_scratch(num_rows, head_dim, num_positions)
