"""Layer norm, soft-capping and both GELUs, on every instruction set and against float64."""

import math

import numpy as np
import pytest

from polyneuron.kernels import gemv, reference
from polyneuron.kernels.buffers import F32
from polyneuron.kernels.gemv import FeedForwardKind
from tests.kernels.builders import assert_same_bits, normal, off_boundary

LENGTHS = [1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 100, 257, 576]
WIDE = np.concatenate(
    [np.linspace(-14.0, 14.0, 100_001), np.geomspace(1e-30, 50, 20_000)], dtype=np.float32
)
ENDS = np.array([-np.inf, -1e30, -200.0, -0.0, 0.0, 200.0, 1e30, np.inf, np.nan], np.float32)

TANH_BOUND = 2e-7  # relative
GELU_BOUND = 3e-7  # of |x|
GELU_TAIL_BOUND = 2e-5  # of the value, down to x = -12


def exact_gelu(x: F32) -> np.ndarray:
    return np.array([v * 0.5 * math.erfc(-v / math.sqrt(2.0)) for v in x.astype(np.float64)])


def exact_gelu_tanh(x: F32) -> np.ndarray:
    wide = x.astype(np.float64)
    y = math.sqrt(2.0 / math.pi) * (wide + 0.044715 * wide**3)
    return wide / (1.0 + np.exp(-2.0 * y))


@pytest.mark.parametrize("n", LENGTHS)
def test_layernorm(isa: str, n: int) -> None:
    x, w, b = off_boundary(normal(n, n) + np.float32(3)), normal(n + 1, n), normal(n + 2, n)
    out = gemv.layernorm(x, w, b, 1e-5)
    assert_same_bits(out, reference.layernorm(x, w, b, 1e-5))
    wide = x.astype(np.float64)
    exact = (wide - wide.mean()) / np.sqrt(wide.var() + np.float32(1e-5)) * w + b
    assert np.abs(out - exact).max() < (2e-5 if n > 2 else 2e-2) * np.abs(exact).max()


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("cap", [0.5, 30.0])
def test_softcap(isa: str, n: int, cap: float) -> None:
    x = off_boundary(normal(n, n) * np.float32(20))
    expected = reference.softcap(x, cap)
    gemv.softcap(x, cap)
    assert_same_bits(x, expected)
    assert np.abs(x).max() <= cap


def test_tanh_within_its_bound(isa: str) -> None:
    x = WIDE.copy()
    gemv.softcap(x, 1.0)
    assert_same_bits(x, reference.tanh(WIDE))
    exact = np.tanh(WIDE.astype(np.float64))
    is_any = exact != 0
    assert (np.abs(x - exact)[is_any] / np.abs(exact[is_any])).max() < TANH_BOUND


@pytest.mark.parametrize(
    ("kind", "exact_of"),
    [(FeedForwardKind.GELU, exact_gelu), (FeedForwardKind.GEGLU, exact_gelu_tanh)],
)
def test_gelu_within_its_bounds(isa: str, kind: FeedForwardKind, exact_of: object) -> None:
    assert callable(exact_of)
    one = np.ones_like(WIDE)
    gate, up = (WIDE, one) if kind.has_gate else (one, WIDE)
    out, exact = gemv.feed_forward_act(kind, gate, up), exact_of(WIDE)
    assert_same_bits(out, reference.feed_forward_act(kind, gate, up))
    assert (np.abs(out - exact) / np.maximum(np.abs(WIDE), 1e-30)).max() < GELU_BOUND
    is_tail = (WIDE > -12.0) & (np.abs(exact) > 1e-30)
    assert (np.abs(out - exact)[is_tail] / np.abs(exact[is_tail])).max() < GELU_TAIL_BOUND


def test_ends_are_alike(isa: str) -> None:
    for kind in (FeedForwardKind.GELU, FeedForwardKind.GEGLU):
        ones = np.ones_like(ENDS)
        gate, up = (ENDS, ones) if kind.has_gate else (ones, ENDS)
        out = gemv.feed_forward_act(kind, gate, up)
        assert_same_bits(out, reference.feed_forward_act(kind, gate, up))
    capped = ENDS.copy()
    gemv.softcap(capped, 3.0)
    assert (capped[:3] == -3.0).all() and (capped[5:8] == 3.0).all() and np.isnan(capped[8])


def test_no_cap_is_refused() -> None:
    with pytest.raises(ValueError, match="cap: is 0"):
        gemv.softcap(np.ones(3, np.float32), 0.0)
