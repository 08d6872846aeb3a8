"""numpy versions of the kernels, in their order of operations: equal to C bit for bit.

Everything is float32 with one rounding an operation; sums are written out where order matters.
Weights come unpacked (`Weights`), so the stored layouts are checked against plain arrays.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from polyneuron.kernels.buffers import ACT_BLOCK, F32, Array
from polyneuron.kernels.gemv import FeedForwardKind, RopeLayout
from polyneuron.kernels.quant import BLOCK_COLS, TILE_ROWS, StorageType

LANES = 16
GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)
HALF_MAX = np.float32(65504.0)
ACT_AMAX_MIN = np.float32(2.0**-120)
EXP_MIN, EXP_MAX = np.float32(-87.0), np.float32(89.0)
LOG2E = np.float32(1.44269504088896341)
LN2_HI, LN2_LO = np.float32(0.693359375), np.float32(-2.12194440e-4)
EXP_COEFFICIENTS = tuple(
    np.float32(c)
    for c in (
        1.9875691500e-4,
        1.3981999507e-3,
        8.3334519073e-3,
        4.1665795894e-2,
        1.6666665459e-1,
        5.0000001201e-1,
    )
)
TANH_SMALL = np.float32(0.55)
TANH_COEFFICIENTS = tuple(
    np.float32(c)
    for c in (
        -0.006282468880775852,
        0.021077755488767135,
        -0.05385385732165259,
        0.13332601680677658,
        -0.33333318045594607,
    )
)
TAIL_P = np.float32(0.31)
TAIL_COEFFICIENTS = tuple(
    np.float32(c)
    for c in (
        0.03577285220934911,
        -0.14130152665536078,
        0.1545135264459365,
        -0.014358887968782626,
        0.10980108091293085,
        0.10787205114475978,
        0.12404283622116008,
        0.12365814814979573,
    )
)
GELU_CUBE, GELU_TWICE_ROOT = np.float32(0.044715), np.float32(1.5957691216057308)


@dataclass(frozen=True, slots=True)
class Weights:
    """A matrix as stored, unpacked: quants (rows, cols) and halves (rows, cols / 32), or values."""

    storage_type: StorageType
    quants: npt.NDArray[np.int32] | None = None
    scale: npt.NDArray[np.float16] | None = None
    minimum: npt.NDArray[np.float16] | None = None
    values: npt.NDArray[np.float16] | F32 | None = None

    def dense(self) -> F32:
        """The values (rows, cols): quant * scale, then + minimum."""
        if self.values is not None:
            return self.values.astype(np.float32)
        assert self.quants is not None and self.scale is not None
        scale = np.repeat(self.scale.astype(np.float32), BLOCK_COLS, axis=1)
        dense: F32 = self.quants.astype(np.float32) * scale
        if self.minimum is not None:
            dense = dense + np.repeat(self.minimum.astype(np.float32), BLOCK_COLS, axis=1)
        return dense


def tree_sum(lanes: F32) -> np.float32:
    """16 lanes: lane i + lane i+8, then +4, +2, +1."""
    for step in (8, 4, 2, 1):
        lanes = lanes[:step] + lanes[step : 2 * step]
    return np.float32(lanes[0])


def lane_sum(x: F32) -> np.float32:
    """Sum of x (n): lane i mod 16 takes x[i], ascending; then the tree."""
    padded = np.zeros(-(-x.size // LANES) * LANES, np.float32)
    padded[: x.size] = x
    lanes = np.zeros(LANES, np.float32)
    for row in padded.reshape(-1, LANES):
        lanes = lanes + row
    return tree_sum(lanes)


def quantize_acts(x: F32) -> npt.NDArray[np.void]:
    """x (..., cols) -> blocks of 32 int8 (..., cols / 32); an amax below 2^-120 gives zeros."""
    blocks = x.reshape(*x.shape[:-1], -1, BLOCK_COLS)
    out = np.zeros(blocks.shape[:-1], ACT_BLOCK)
    amax = np.abs(blocks).max(axis=-1)
    is_zero = amax < ACT_AMAX_MIN
    with np.errstate(invalid="ignore"):
        inverse = np.float32(127.0) / np.where(is_zero, np.float32(1.0), amax)
        scaled = blocks * inverse[..., np.newaxis]
    scaled = np.where(np.isnan(scaled) | is_zero[..., np.newaxis], np.float32(0.0), scaled)
    quants = np.rint(scaled).astype(np.int32)
    out["quants"] = quants
    out["scale"] = np.where(is_zero, np.float32(0.0), amax / np.float32(127.0))
    out["sum"] = quants.sum(axis=-1)
    return out


def quantize_q4(x: F32) -> Weights:
    """x (rows, cols) by the rule of ggml's Q4_0; its scale is held within the range of f16."""
    blocks = x.reshape(len(x), -1, BLOCK_COLS)
    first_largest = np.abs(blocks).argmax(axis=-1, keepdims=True)
    scale = np.take_along_axis(blocks, first_largest, axis=-1) / np.float32(-8.0)
    scale = np.clip(scale, -HALF_MAX, HALF_MAX)
    with np.errstate(divide="ignore", over="ignore", under="ignore"):
        inverse = np.float32(1.0) / scale
    inverse = np.where(np.isfinite(inverse), inverse, np.float32(0.0))
    quants = np.clip(np.trunc(blocks * inverse + np.float32(8.5)), 0.0, 15.0).astype(np.int32) - 8
    return Weights(StorageType.Q4, quants.reshape(x.shape), scale[..., 0].astype(np.float16))


def quantize_q8(x: F32) -> Weights:
    """x (rows, cols) -> symmetric quants; the scale is rounded to f16 before they are made."""
    blocks = x.reshape(len(x), -1, BLOCK_COLS)
    wanted = np.minimum(np.abs(blocks).max(axis=-1) / np.float32(127.0), HALF_MAX)
    scale = wanted.astype(np.float16)
    wide = scale.astype(np.float32)[..., np.newaxis]
    with np.errstate(divide="ignore", invalid="ignore"):
        scaled = np.where(wide > 0, blocks / wide, np.float32(0.0))
    quants = np.rint(np.clip(scaled, -127.0, 127.0)).astype(np.int32)
    return Weights(StorageType.Q8, quants.reshape(x.shape), scale)


def spread_values(x: F32, scale: float) -> F32:
    """H x * scale of x (n), H of the largest power of two that divides n, run by run."""
    size = x.size & -x.size
    half = 1
    while half < size:
        pairs = x.reshape(-1, 2, half)
        a, b = pairs[:, 0], pairs[:, 1]
        x = np.stack([a + b, a - b], axis=1).reshape(-1)
        half *= 2
    return x * np.float32(scale)


def stored_keys(x: F32, storage_type: StorageType) -> F32:
    """Keys or values x (rows, head_dim), all finite, as attention reads them from the KV cache."""
    if storage_type is StorageType.F16:
        return x.astype(np.float16).astype(np.float32)
    quantize = quantize_q8 if storage_type is StorageType.Q8 else quantize_q4
    return quantize(x).dense()


def quantize_q1(x: F32, scale: npt.NDArray[np.float16] | None = None) -> Weights:
    """x (rows, cols) -> signs, 0 or more being +1; without a scale, the mean magnitude of blocks.

    The magnitudes are added in order, and the mean is held within the range of f16.
    """
    if scale is None:
        magnitudes = np.abs(x).reshape(len(x), -1, BLOCK_COLS)
        total = np.zeros(magnitudes.shape[:-1], np.float32)
        with np.errstate(over="ignore"):
            for k in range(BLOCK_COLS):
                total = total + magnitudes[..., k]
        scale = np.minimum(total / np.float32(BLOCK_COLS), HALF_MAX).astype(np.float16)
    return Weights(StorageType.Q1, np.where(x >= 0, 1, -1).astype(np.int32), scale)


def matmul(weights: Weights, x: Array) -> F32:
    """weights (rows, cols), x (num_tokens, cols), quantised or float -> (num_tokens, rows)."""
    if weights.values is not None:
        dense = weights.dense()
        acc = np.zeros((x.shape[0], dense.shape[0]), np.float32)
        for c in range(dense.shape[1]):
            acc = acc + dense[:, c] * x[:, c, np.newaxis]
        return acc
    assert weights.quants is not None and weights.scale is not None
    rows, cols = weights.quants.shape
    quants = weights.quants.reshape(rows, -1, BLOCK_COLS)
    scale = weights.scale.astype(np.float32)
    acc = np.zeros((x.shape[0], rows), np.float32)
    for b in range(cols // BLOCK_COLS):
        acts = x[:, b]
        isum = acts["quants"].astype(np.int32) @ quants[:, b].T
        term = isum.astype(np.float32) * scale[:, b]
        if weights.minimum is not None:
            sums = acts["sum"].astype(np.float32)[:, np.newaxis]
            term = term + weights.minimum[:, b].astype(np.float32) * sums
        acc = acc + term * acts["scale"][:, np.newaxis]
    return acc


def pack_tiles_from_rows(
    storage_type: StorageType, rows: npt.NDArray[np.uint8], cols: int
) -> npt.NDArray[np.uint8]:
    """rows (num_rows, row_bytes) -> tiles as bytes; missing rows are zero."""
    tiles = -(-len(rows) // TILE_ROWS)
    padded = np.zeros((tiles * TILE_ROWS, rows.shape[1]), np.uint8)
    padded[: len(rows)] = rows
    by_tile = padded.reshape(tiles, TILE_ROWS, -1)
    if not storage_type.is_quantised:
        values = by_tile.reshape(tiles, TILE_ROWS, cols, -1)
        return values.transpose(0, 2, 1, 3).reshape(-1)
    num_blocks = cols // BLOCK_COLS
    quant_bytes = num_blocks * (32 if storage_type == StorageType.Q8 else 16)
    words = by_tile[..., :quant_bytes].reshape(tiles, TILE_ROWS, num_blocks, -1, 4)
    halves = by_tile[..., quant_bytes:].reshape(tiles, TILE_ROWS, -1, num_blocks, 2)
    parts = (halves.transpose(0, 3, 2, 1, 4), words.transpose(0, 2, 3, 1, 4))
    return np.concatenate([p.reshape(tiles, num_blocks, -1) for p in parts], axis=2).reshape(-1)


def axpy_rows(out: F32, weights: Weights, coef: F32, row_ids: npt.NDArray[np.uint32]) -> F32:
    """out (cols) + coef[i] * row(row_ids[i]), i ascending."""
    dense = weights.dense()
    for factor, row in zip(coef, row_ids, strict=True):
        out = out + dense[row] * factor
    return out


def exp(x: F32) -> F32:
    """The polynomial of the kernels: 0 below -87, infinity above FLT_MAX."""
    with np.errstate(over="ignore", invalid="ignore"):
        clamped = np.clip(x, EXP_MIN, EXP_MAX)
        n = np.rint(clamped * LOG2E)
        r = clamped - n * LN2_HI
        r = r - n * LN2_LO
        p = np.full_like(r, EXP_COEFFICIENTS[0])
        for coefficient in EXP_COEFFICIENTS[1:]:
            p = p * r + coefficient
        p = p * (r * r) + r
        p = p + np.float32(1.0)
        exponent = np.nan_to_num(n).astype(np.int32)
        first = np.ldexp(np.float32(1.0), exponent >> 1)
        second = np.ldexp(np.float32(1.0), exponent - (exponent >> 1))
        out: F32 = np.where(x < EXP_MIN, np.float32(0.0), p * first * second)
    return out


def rmsnorm(x: F32, w: F32, eps: float) -> F32:
    """x / sqrt(mean(x^2) + eps) * w."""
    mean = lane_sum(x * x) / np.float32(x.size)
    inverse = np.float32(1.0) / np.sqrt(mean + np.float32(eps))
    scaled: F32 = x * inverse * w
    return scaled


def layernorm(x: F32, w: F32, b: F32, eps: float) -> F32:
    """(x - mean) / sqrt(mean((x - mean)^2) + eps) * w + b."""
    centred = x - lane_sum(x) / np.float32(x.size)
    variance = lane_sum(centred * centred) / np.float32(x.size)
    inverse = np.float32(1.0) / np.sqrt(variance + np.float32(eps))
    scaled: F32 = centred * inverse * w + b
    return scaled


def tanh(x: F32) -> F32:
    """An odd polynomial for small magnitudes, else 1 - 2 / (exp(2 x) + 1) with x's sign."""
    with np.errstate(over="ignore", invalid="ignore"):
        size, square = np.where(x < 0, -x, x), x * x
        small = x + x * square * _polynomial(TANH_COEFFICIENTS, square)
        large = np.float32(1.0) - np.float32(2.0) / (exp(size + size) + np.float32(1.0))
        signed = np.where(x < 0, -large, large)
    out: F32 = np.where(size < TANH_SMALL, small, signed)
    return out


def softcap(x: F32, cap: float) -> F32:
    """cap * tanh(x / cap)."""
    return np.float32(cap) * tanh(x / np.float32(cap))


def gelu_tanh(x: F32) -> F32:
    """GELU by its tanh formula."""
    with np.errstate(over="ignore", invalid="ignore"):
        y = GELU_TWICE_ROOT * (x + GELU_CUBE * (x * x * x))
        out: F32 = x / (np.float32(1.0) + exp(-y))
    return out


def gelu(x: F32) -> F32:
    """x times the normal distribution up to x."""
    with np.errstate(over="ignore", invalid="ignore"):
        t = np.float32(1.0) / (np.float32(1.0) + TAIL_P * np.where(x < 0, -x, x))
        tail = exp(np.float32(-0.5) * (x * x)) * (_polynomial(TAIL_COEFFICIENTS, t) * t)
        out: F32 = x * np.where(x < 0, tail, np.float32(1.0) - tail)
    return out


def _polynomial(coefficients: tuple[np.float32, ...], x: F32) -> F32:
    """By Horner's rule, the highest power's coefficient first."""
    p = np.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        p = p * x + coefficient
    return p


def relu(x: F32) -> F32:
    """A negative value becomes 0, a NaN stays."""
    return np.where(x < 0, np.float32(0.0), x)


def feed_forward_act(kind: FeedForwardKind, gate: F32, up: F32) -> F32:
    """act(gate) * up."""
    if kind == FeedForwardKind.SILU:
        return gate / (np.float32(1.0) + exp(-gate)) * up
    if kind == FeedForwardKind.REGLU:
        return relu(gate) * up
    if kind == FeedForwardKind.DRELU:
        return relu(gate) * relu(up)
    if kind == FeedForwardKind.GEGLU:
        return gelu_tanh(gate) * up
    return gelu(up) if kind == FeedForwardKind.GELU else relu(up)


def rope_head(layout: RopeLayout, x: F32, cos_row: F32, sin_row: F32) -> F32:
    """x (head_dim) with its first 2 * len(cos_row) elements rotated."""
    out, pairs = x.copy(), cos_row.size
    if layout == RopeLayout.INTERLEAVED:
        first, second = slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)
    else:
        first, second = slice(0, pairs), slice(pairs, 2 * pairs)
    out[first] = x[first] * cos_row - x[second] * sin_row
    out[second] = x[first] * sin_row + x[second] * cos_row
    return out


def softmax(x: F32) -> F32:
    """exp(x - max) over their sum."""
    powers = exp(x - x.max())
    shares: F32 = powers / lane_sum(powers)
    return shares


def top_k(x: F32, k: int) -> tuple[npt.NDArray[np.uint32], F32]:
    """The k largest, descending, lowest index first among equals; a NaN ranks as -infinity."""
    ranked = np.where(np.isnan(x), np.float32(-np.inf), x)
    ids = np.lexsort((np.arange(x.size), -ranked))[:k]
    return ids.astype(np.uint32), ranked[ids]


def attention_heads(
    q: F32,
    keys: F32,
    values: F32,
    scale: float,
    first: int = 0,
    cap: float = 0.0,
    storage_type: StorageType = StorageType.F16,
) -> F32:
    """q (num_queries, head_dim), keys and values (num_positions, head_dim) -> out as q.

    keys and values are rounded first, as the KV cache stores them; positions before `first`
    are not seen, scores are soft-capped where `cap` is above 0.
    """
    keys, values = stored_keys(keys, storage_type), stored_keys(values, storage_type)
    scores = np.zeros((q.shape[0], keys.shape[0]), np.float32)
    for d in range(q.shape[1]):
        scores = scores + q[:, d, np.newaxis] * keys[:, d]
    scores = scores * np.float32(scale)
    scores = softcap(scores, cap) if cap > 0 else scores
    scores[:, :first] = -np.inf
    out = np.empty_like(q)
    for head, row in enumerate(scores):
        powers = exp(row - row.max())
        acc = np.zeros(q.shape[1], np.float32)
        for power, value in zip(powers[first:], values[first:], strict=True):
            acc = acc + power * value
        out[head] = acc / lane_sum(powers)
    return out


def random_rows(
    key: int, row_ids: npt.NDArray[np.uint32], row_words: int
) -> npt.NDArray[np.uint64]:
    """Rows (num_rows, row_words) of the stream `key`: SplitMix64 of each word's number."""
    first = row_ids.astype(np.uint64)[:, np.newaxis] * np.uint64(row_words)
    word = np.add(first, np.arange(row_words), dtype=np.uint64, casting="unsafe")
    z = word * GOLDEN_GAMMA + np.array(key, np.uint64)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: npt.NDArray[np.uint64] = z ^ (z >> np.uint64(31))
    return mixed
