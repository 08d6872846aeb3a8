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


@pytest.mark.parametrize("head_dim", [1, 24, 63, 64, 80, 128, 256])
@pytest.mark.parametrize(("first", "num_tokens"), [(1, 1), (1, 70), (31, 3), (32, 2), (60, 37)])
def test_a_block_of_tokens_equals_them_one_by_one(
    isa: str, head_dim: int, first: int, num_tokens: int
) -> None:
    last = first + num_tokens - 1
    keys, values = normal(1, last, head_dim), normal(2, last, head_dim)
    kv, table = kv_cache(keys, values, 4)
    for num_queries in (1, 2, 3, 4, 5):
        q = normal(num_queries, num_tokens, num_queries, head_dim)
        out = gemv.attention_block(q, kv, table, first, 0.125)
        for t in range(num_tokens):
            seen = first + t
            alone = gemv.attention_heads(q[t], kv, table, seen, 0.125)
            assert_same_bits(out[t], alone)
        assert_same_bits(out[-1], reference.attention_heads(q[-1], keys, values, 0.125))


@pytest.mark.parametrize("window", [1, 2, 7, 31, 32, 33, 64])
@pytest.mark.parametrize("cap", [0.0, 0.4])
def test_a_block_of_tokens_with_a_window(isa: str, window: int, cap: float) -> None:
    """Windows that begin in several blocks of keys, and in the middle of a group of queries."""
    keys, values = normal(1, 100, 80), normal(2, 100, 80)
    kv, table = kv_cache(keys, values, 4)
    for num_queries in (1, 3, 4):
        q = normal(num_queries, 70, num_queries, 80)
        out = gemv.attention_block(q, kv, table, 31, 0.125, window, cap)
        for t in range(70):
            hidden = max(0, 31 + t - window)
            at = hidden // 32
            seen = 31 + t - 32 * at
            alone = gemv.attention_heads(q[t], kv, table[at:], seen, 0.125, hidden % 32, cap)
            assert_same_bits(out[t], alone)


def test_a_window_hides_infinities(isa: str) -> None:
    keys, values = normal(12, 80, 64), normal(13, 80, 64)
    values[40] = 1e6  # infinite as f16
    kv, table = kv_cache(keys, values, 3)
    out = gemv.attention_block(normal(14, 8, 1, 64), kv, table, 60, 0.125, 22)
    assert np.isinf(out[:3]).all()  # 60 positions less 22: from the one of number 38 on
    assert np.isfinite(out[3:]).all()


def test_a_block_of_tokens_in_a_long_context(isa: str) -> None:
    keys, values = normal(9, 2048, 64), normal(10, 2048, 64)
    kv, table = kv_cache(keys, values, 64)
    q = normal(11, 13, 3, 64)
    out = gemv.attention_block(q, kv, table, 2036, 0.125)
    for t in (0, 7, 12):
        alone = reference.attention_heads(q[t], keys[: 2036 + t], values[: 2036 + t], 0.125)
        assert_same_bits(out[t], alone)


def test_an_infinite_value_reaches_only_who_sees_it(isa: str) -> None:
    keys, values = normal(12, 40, 64), normal(13, 40, 64)
    values[35] = 1e6  # infinite as f16
    kv, table = kv_cache(keys, values, 2)
    out = gemv.attention_block(normal(14, 8, 1, 64), kv, table, 33, 0.125)
    assert np.isfinite(out[:3]).all()
    assert np.isinf(out[3:]).all()


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
