"""A wrong array is a ValueError that names the argument."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from polyneuron.kernels import gemv, quant
from polyneuron.kernels.quant import StorageType
from tests.kernels.builders import normal, random_weights, rows_of, tiles_of

TILES = tiles_of(random_weights(1, StorageType.Q4, 32, 64))
ROWS = rows_of(random_weights(1, StorageType.F32, 4, 8))
ACTS = quant.quantize_acts(normal(1, 2, 64))
X = normal(2, 8)
READ_ONLY = normal(3, 8)
READ_ONLY.flags.writeable = False
QUANTS = np.zeros((1, 32), np.uint8)
KV = np.zeros((2, quant.kv_block_bytes(8)), np.uint8)
TABLE = np.array([1, 0], np.int32)

WRONG_CALLS: list[tuple[str, Callable[[], Any]]] = [
    ("x: dtype is float64", lambda: gemv.exp(X.astype(np.float64))),
    ("x: dtype is list", lambda: gemv.exp([1.0])),  # type: ignore[arg-type]
    ("x: is not C-contiguous", lambda: gemv.exp(normal(1, 4, 4)[:, 1])),
    ("x: is read-only", lambda: gemv.softmax(READ_ONLY)),
    ("w: shape is", lambda: gemv.rmsnorm(X, X[:4], 1e-5)),
    ("x: shape is", lambda: gemv.add(X.copy(), X[:4])),
    ("gate: shape is", lambda: gemv.feed_forward_act(gemv.FeedForwardKind.SILU, X[:3], X)),
    ("x: 8 elements", lambda: gemv.rope_head(gemv.RopeLayout.HALVES, X.copy(), X, X)),
    ("k: 9 is outside of 1..8", lambda: gemv.top_k(X, 9)),
    ("x: last axis is 0", lambda: gemv.argmax(X[:0])),
    ("x: last axis is 8", lambda: quant.quantize_acts(X)),
    ("w: 1152 bytes", lambda: gemv.matmul_tiles(StorageType.Q8, TILES, 64, ACTS)),
    ("x: shape is", lambda: gemv.matmul_tiles(StorageType.Q4, TILES, 64, ACTS[:, :1].copy())),
    ("x: has 1 axes", lambda: gemv.matmul_tiles(StorageType.Q4, TILES, 64, ACTS[0])),
    ("cols: 65 with q4", lambda: gemv.matmul_tiles(StorageType.Q4, TILES, 65, ACTS)),
    ("row: 32 is outside", lambda: gemv.gather_row(StorageType.Q4, TILES, 64, 32)),
    (
        "row_ids: 4 is outside",
        lambda: gemv.dot_rows(StorageType.F32, ROWS, 8, X, np.array([4], np.uint32)),
    ),
    ("coef: shape is", lambda: gemv.axpy_rows(StorageType.F32, X.copy(), ROWS, X)),
    ("slot: 32 is outside", lambda: gemv.kv_write(KV[0], 32, X, X)),
    ("kv: shape is", lambda: gemv.attention_heads(X[np.newaxis, :4], KV, TABLE, 5, 1.0)),
    ("q, kv: have 2", lambda: gemv.attention_block(X[np.newaxis], KV, TABLE, 1, 1.0)),
    (
        "num_positions: 0",
        lambda: gemv.attention_block(X[np.newaxis, np.newaxis], KV, TABLE, 0, 1.0),
    ),
    ("num_positions: 65", lambda: gemv.attention_heads(X[np.newaxis], KV, TABLE, 65, 1.0)),
    ("block_table: names", lambda: gemv.attention_heads(X[np.newaxis], KV, TABLE + 1, 5, 1.0)),
    (
        "src: 4 bytes",
        lambda: quant.pack_tiles(StorageType.Q4, quant.GgmlType.Q4_0, TILES[:4], 1, 32),
    ),
    ("rows: needs a uint8", lambda: quant.pack_tiles_from_rows(StorageType.F32, ROWS, 8)),
    (
        "rows: shape is .4, 32., strides are .32, 1.; a row has 36",
        lambda: quant.pack_tiles_from_rows(StorageType.F32, ROWS.reshape(4, 32), 9),
    ),
    (
        "rows: shape is .4, 16., strides are .32, 2.",
        lambda: quant.pack_tiles_from_rows(StorageType.F32, ROWS.reshape(4, 32)[:, ::2], 4),
    ),
    ("src: has 1 axes", lambda: quant.pack_tiles_from_f32(StorageType.Q8, X)),
    ("out: shape is", lambda: quant.pack_tiles_from_f32(StorageType.F32, X[np.newaxis], TILES)),
    (
        "scale: dtype is float32",
        lambda: quant.pack_tiles_q1(normal(4, 1, 32), X),  # type: ignore[arg-type]
    ),
    ("scale: shape is", lambda: quant.pack_tiles_q1(normal(4, 1, 32), X.astype(np.float16))),
    ("storage_type: q1 is stored in tiles only", lambda: quant.row_bytes(StorageType.Q1, 32)),
    (
        "storage_type: q1 is stored in tiles only",
        lambda: quant.pack_rows_from_f32(StorageType.Q1, normal(4, 1, 32)),
    ),
    (
        "storage_type: q1 is stored in tiles only",
        lambda: gemv.axpy_rows(StorageType.Q1, normal(4, 32), ROWS, X),
    ),
    (
        "scale: dtype is float32",
        lambda: quant.pack_tiles_q4m_parts(QUANTS, X, X),  # type: ignore[arg-type]
    ),
]


@pytest.mark.parametrize(
    ("message", "call"), WRONG_CALLS, ids=[f"{i}-{m}" for i, (m, _) in enumerate(WRONG_CALLS)]
)
def test_wrong_arguments_are_named(message: str, call: Callable[[], Any]) -> None:
    with pytest.raises(ValueError, match="^" + message):
        call()


def test_misaligned_weights_are_refused() -> None:
    shifted = np.concatenate([np.zeros(1, np.uint8), TILES])[1:]
    with pytest.raises(ValueError, match="w: begins at an address"):
        gemv.matmul_tiles(StorageType.Q4, shifted, 64, ACTS)
