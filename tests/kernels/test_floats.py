"""Norms, activations, rotation, softmax and the choice of the largest, on every instruction set."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from polyneuron.kernels import gemv, reference
from polyneuron.kernels import isa as isa_module
from polyneuron.kernels.buffers import F32
from polyneuron.kernels.gemv import FeedForwardKind, RopeLayout
from tests.kernels.builders import assert_same_bits, normal, off_boundary

LENGTHS = [1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 100, 256, 257, 576]

EXP_ULP_BOUND = 2.0
SOFTMAX_ERROR_BOUND = 5e-6  # relative; x - max of up to 70 is itself rounded by up to 2^-18
RMSNORM_ERROR_BOUND = 5e-7  # relative, against float64


@pytest.mark.parametrize("n", LENGTHS)
def test_rmsnorm(isa: str, n: int) -> None:
    x, w = off_boundary(normal(n, n)), normal(n + 1, n)
    out = gemv.rmsnorm(x, w, 1e-5)
    assert_same_bits(out, reference.rmsnorm(x, w, 1e-5))
    wide = x.astype(np.float64)
    exact = wide / np.sqrt((wide * wide).mean() + np.float32(1e-5)) * w
    assert (np.abs(out - exact) / np.abs(exact)).max() < RMSNORM_ERROR_BOUND


@pytest.mark.parametrize("n", LENGTHS)
def test_add(isa: str, n: int) -> None:
    out, x = off_boundary(normal(1, n)), normal(2, n)
    expected = out + x
    gemv.add(out, x)
    assert_same_bits(out, expected)


@pytest.mark.parametrize("kind", FeedForwardKind)
@pytest.mark.parametrize("n", LENGTHS)
def test_feed_forward_act(isa: str, kind: FeedForwardKind, n: int) -> None:
    gate, up = off_boundary(normal(3, n) * np.float32(20)), normal(4, n)
    out = gemv.feed_forward_act(kind, gate, up)
    assert_same_bits(out, reference.feed_forward_act(kind, gate, up))


@pytest.mark.parametrize("layout", RopeLayout)
@pytest.mark.parametrize(("head_dim", "pairs"), [(2, 1), (64, 32), (80, 20), (128, 64), (66, 33)])
def test_rope_head(isa: str, layout: RopeLayout, head_dim: int, pairs: int) -> None:
    x = off_boundary(normal(5, head_dim))
    angles = normal(6, pairs)
    cosines, sines = np.cos(angles), np.sin(angles)
    expected = reference.rope_head(layout, x, cosines, sines)
    gemv.rope_head(layout, x, cosines, sines)
    assert_same_bits(x, expected)


def test_exp_within_bound_over_its_range(isa: str) -> None:
    x = np.linspace(-87.0, 88.7, 200_003, dtype=np.float32)
    out = gemv.exp(x)
    assert_same_bits(out, reference.exp(x))
    exact = np.exp(x.astype(np.float64))
    ulp = np.spacing(exact.astype(np.float32)).astype(np.float64)
    assert (np.abs(out - exact) / ulp).max() < EXP_ULP_BOUND


def test_exp_at_its_ends(isa: str) -> None:
    x = np.array([-np.inf, -1e30, -87.001, -87.0, -0.0, 0.0, 88.72, 88.73, 1e30, np.inf, np.nan])
    out = gemv.exp(x.astype(np.float32))
    assert_same_bits(out, reference.exp(x.astype(np.float32)))
    assert not out[:3].any() and out[3] > 0
    assert out[4] == out[5] == 1.0
    assert np.isfinite(out[6]) and np.isinf(out[7:10]).all() and np.isnan(out[10])


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("spread", [1.0, 60.0])
def test_softmax(isa: str, n: int, spread: float) -> None:
    x = off_boundary(normal(7, n) * np.float32(spread))
    expected = reference.softmax(x)
    wide = np.exp(x.astype(np.float64) - x.max())
    gemv.softmax(x)
    assert_same_bits(x, expected)
    shares = wide / wide.sum()
    is_large = shares > 1e-30
    error = np.abs(x[is_large] - shares[is_large]) / shares[is_large]
    assert error.max() < SOFTMAX_ERROR_BOUND


@pytest.mark.parametrize("n", [*LENGTHS, 1000, 49152])
def test_argmax_takes_the_first_of_equals(isa: str, n: int) -> None:
    x = np.floor(normal(8, n) * np.float32(4))
    assert gemv.argmax(x) == int(np.argmax(x))
    for index in {0, n // 2, n - 1}:
        x[index] = 99.0
        assert gemv.argmax(x) == int(np.argmax(x))


@pytest.mark.parametrize("n", [1, 17, 300])
def test_argmax_ranks_nan_lowest(isa: str, n: int) -> None:
    x = np.full(n, np.nan, np.float32)
    assert gemv.argmax(x) == 0
    x[n // 2] = -5.0
    assert gemv.argmax(x) == n // 2


@pytest.mark.parametrize("n", [1, 2, 16, 100, 257])
def test_top_k(isa: str, n: int) -> None:
    x = np.floor(normal(9, n) * np.float32(3))
    x[n // 3] = np.nan
    for k in {1, 2 if n > 1 else 1, n // 2 + 1, n}:
        ids, values = gemv.top_k(x, k)
        expected_ids, expected_values = reference.top_k(x, k)
        assert np.array_equal(ids, expected_ids)
        assert np.array_equal(values, expected_values)


any_float = st.floats(width=32, allow_nan=True, allow_infinity=True)


@given(arrays(np.float32, st.integers(1, 40), elements=any_float))
@settings(max_examples=100)
def test_any_values_agree_on_every_instruction_set(x: F32) -> None:
    before = isa_module.active()
    results = []
    with np.errstate(all="ignore"):
        for name in isa_module.supported():
            isa_module.select(name)
            soft = x.copy()
            gemv.softmax(soft)
            silu = gemv.feed_forward_act(FeedForwardKind.SILU, x, x)
            relu = gemv.feed_forward_act(FeedForwardKind.DRELU, x, x)
            floats = [gemv.exp(x), soft, silu, relu, gemv.rmsnorm(x, x, 1e-6)]
            ids, _ = gemv.top_k(x, x.size)
            results.append((floats, gemv.argmax(x), ids))
            assert gemv.argmax(x) == ids[0]
    isa_module.select(before)
    for floats, index, ids in results:
        assert index == results[0][1]
        assert np.array_equal(ids, results[0][2])
        for actual, expected in zip(floats, results[0][0], strict=True):
            assert_same_bits(actual, expected)
