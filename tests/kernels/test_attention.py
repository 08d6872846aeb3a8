"""The KV cache and attention over it, on every instruction set."""

import numpy as np
import numpy.typing as npt
import pytest

from polyneuron.kernels import gemv, quant, reference
from polyneuron.kernels.buffers import F32
from tests.kernels.builders import assert_same_bits, normal

# Relative to the largest value: exp and sums in float32, K and V as rounded to f16.
ATTENTION_ERROR_BOUND = 3e-6


def kv_cache(
    keys: F32, values: F32, num_blocks: int
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int32]]:
    """Write keys and values into blocks taken from the end; all other bytes are NaN."""
    num_positions, head_dim = keys.shape
    kv = np.full((num_blocks, quant.kv_block_bytes(head_dim)), 0xFF, np.uint8)
    used = -(-num_positions // quant.KV_BLOCK_TOKENS)
    table = np.arange(num_blocks - 1, num_blocks - 1 - used, -1, dtype=np.int32)
    for p in range(num_positions):
        block = kv[table[p // quant.KV_BLOCK_TOKENS]]
        gemv.kv_write(block, p % quant.KV_BLOCK_TOKENS, keys[p], values[p])
    return kv, table


@pytest.mark.parametrize("head_dim", [1, 16, 24, 63, 64, 80, 128, 256])
@pytest.mark.parametrize("num_positions", [1, 31, 32, 33, 70])
def test_attention_equals_reference(isa: str, head_dim: int, num_positions: int) -> None:
    keys, values = normal(1, num_positions, head_dim), normal(2, num_positions, head_dim)
    kv, table = kv_cache(keys, values, 4)
    for num_queries in (1, 2, 3, 4, 5, 9):
        q = normal(num_queries, num_queries, head_dim)
        out = gemv.attention_heads(q, kv, table, num_positions, 0.125)
        assert_same_bits(out, reference.attention_heads(q, keys, values, 0.125))


@pytest.mark.parametrize("first", [0, 1, 15, 31])
@pytest.mark.parametrize("cap", [0.0, 0.4])
@pytest.mark.parametrize("head_dim", [16, 63, 64, 128])
def test_window_and_cap_equal_reference(isa: str, first: int, cap: float, head_dim: int) -> None:
    """What lies before the window is not read: there are infinities in it."""
    keys, values = normal(1, 70, head_dim), normal(2, 70, head_dim)
    values[:first] = np.inf
    kv, table = kv_cache(keys, values, 4)
    for num_queries in (1, 3, 4):
        q = normal(num_queries, num_queries, head_dim)
        out = gemv.attention_heads(q, kv, table, 70, 0.125, first, cap)
        assert_same_bits(out, reference.attention_heads(q, keys, values, 0.125, first, cap))
        assert np.isfinite(out).all()


def test_window_must_begin_in_the_first_block() -> None:
    kv, table = kv_cache(normal(1, 40, 16), normal(2, 40, 16), 2)
    with pytest.raises(ValueError, match="first: 32 is outside"):
        gemv.attention_heads(normal(3, 1, 16), kv, table, 40, 1.0, 32)


def test_attention_error_against_float64(isa: str) -> None:
    keys, values, q = normal(3, 500, 64), normal(4, 500, 64), normal(5, 3, 64)
    kv, table = kv_cache(keys, values, 16)
    out = gemv.attention_heads(q, kv, table, 500, 0.125)
    wide_keys, wide_values = (x.astype(np.float16).astype(np.float64) for x in (keys, values))
    scores = q.astype(np.float64) @ wide_keys.T * 0.125
    powers = np.exp(scores - scores.max(axis=1, keepdims=True))
    exact = powers / powers.sum(axis=1, keepdims=True) @ wide_values
    assert np.abs(out - exact).max() / np.abs(exact).max() < ATTENTION_ERROR_BOUND


def test_heads_do_not_depend_on_their_group(isa: str) -> None:
    keys, values, q = normal(6, 45, 64), normal(7, 45, 64), normal(8, 7, 64)
    kv, table = kv_cache(keys, values, 2)
    together = gemv.attention_heads(q, kv, table, 45, 0.125)
    for head in range(7):
        alone = gemv.attention_heads(q[head : head + 1], kv, table, 45, 0.125)
        assert_same_bits(together[head : head + 1], alone)


@pytest.mark.parametrize("head_dim", [1, 15, 16, 33, 64])
def test_kv_write_rounds_to_nearest_even(isa: str, head_dim: int) -> None:
    special = np.array(
        [65519.0, 65520.0, 1 + 2.0**-11, 1 + 3 * 2.0**-11, 2.0**-25, 1.5 * 2.0**-24, 6e-6, -0.0]
    )
    k = np.resize(special, head_dim).astype(np.float32)
    v = -k[::-1].copy()
    block = np.zeros(quant.kv_block_bytes(head_dim), np.uint8)
    gemv.kv_write(block, 17, k, v)
    halves = block.view(np.uint16).reshape(2, -1)
    with np.errstate(over="ignore"):
        expected_k, expected_v = (x.astype(np.float16).view(np.uint16) for x in (k, v))
    assert np.array_equal(halves[0].reshape(head_dim, 32)[:, 17], expected_k)
    assert np.array_equal(halves[1].reshape(32, head_dim)[17], expected_v)
    assert np.count_nonzero(halves) == np.count_nonzero(expected_k) + np.count_nonzero(expected_v)
