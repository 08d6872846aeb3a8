"""Chooses each neuron's threshold: the fewest predicted neurons that keep a share of the layer.

A neuron contributes |activation| times the length of its down row. What it is expected to
contribute, given its standardised score u, is modelled as `scale_i * f(u)`: f is one non-decreasing
function a layer, so that neurons that are seldom active borrow its shape, and only the scale is a
neuron's own. A neuron is predicted where scale_i * f(u) exceeds lambda times its cost, and lambda
is the largest one at which the target share of all contributions is kept: the Lagrangian of "least
cost, subject to the share".
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]

LEAST_U, MOST_U, BIN_U = -6.0, 10.0, 0.05
EDGES: F64 = np.arange(LEAST_U, MOST_U + BIN_U / 2, BIN_U)
NUM_BINS = len(EDGES) - 1
NUM_ROUNDS = 4
PRIOR = 0.2
"""Weight of the layer's mean in a neuron's scale, in medians of what neurons are to contribute."""
LEVELS = 1 << 14
ALWAYS, NEVER = np.float32(-3e38), np.float32(3e38)


@dataclass(frozen=True, slots=True, eq=False)
class ContributionModel:
    """E[contribution of neuron i | u] = scale[i] * curve[bin of u]."""

    scale: F64
    """(d_ff)"""
    curve: F64
    """(NUM_BINS), never decreasing."""

    def thresholds(self, cost: F64, price: float) -> F32:
        """The least u (d_ff) at which a neuron is worth `price` times its cost."""
        with np.errstate(divide="ignore"):
            level = price * cost / self.scale
        index = np.searchsorted(self.curve, level)
        least = np.concatenate([EDGES[:-1], [NEVER]])[np.minimum(index, NUM_BINS)]
        least[index == 0] = ALWAYS
        return least.astype(np.float32)


def bins_of(u: F32) -> NDArray[np.int16]:
    """The bin of each value; what lies beyond the ends goes to the outermost ones."""
    bins: NDArray[np.int16] = np.clip((u - LEAST_U) / BIN_U, 0, NUM_BINS - 1).astype(np.int16)
    return bins


def fit_contributions(bins: NDArray[np.int16], contribution: F32) -> ContributionModel:
    """Fit scale and curve to bins and contributions (tokens, d_ff), by turns."""
    totals = contribution.sum(axis=0, dtype=np.float64)
    scale = totals / max(len(bins), 1)
    scale = np.maximum(scale / max(scale.mean(), 1e-30), 1e-9)
    flat, weights = bins.reshape(-1), contribution.reshape(-1)
    sums = np.bincount(flat, weights, NUM_BINS)
    for _ in range(NUM_ROUNDS):
        expected = np.zeros(NUM_BINS)
        for row in bins:
            expected += np.bincount(row, scale, NUM_BINS)
        curve = non_decreasing(sums / np.maximum(expected, 1e-12), expected)
        seen = np.zeros(bins.shape[1])
        for row in bins:
            seen += curve[row]
        prior = PRIOR * float(np.median(seen)) + 1e-30
        scale = np.maximum((totals + prior) / (seen + prior), 1e-12)
    return ContributionModel(scale, curve)


def non_decreasing(values: F64, weights: F64) -> F64:
    """The nearest sequence that never falls, in weighted squares (pool adjacent violators)."""
    pools: list[tuple[float, float, int]] = []  # mean, weight, length
    for value, weight in zip(values, weights, strict=True):
        mean, total, length = float(value), float(weight), 1
        while pools and pools[-1][0] >= mean:
            last, last_weight, last_length = pools.pop()
            both = total + last_weight
            mean = (mean * total + last * last_weight) / both if both > 0 else last
            total, length = both, length + last_length
        pools.append((mean, total, length))
    return np.repeat([pool[0] for pool in pools], [pool[2] for pool in pools])


def choose_price(
    model: ContributionModel,
    bins: NDArray[np.int16],
    contribution: F32,
    cost: F64,
    target: float,
) -> float:
    """The largest price at which the kept share of contributions (tokens, d_ff) is `target`."""
    worth = np.log2(np.maximum(model.curve, 1e-30))
    offset = np.log2(model.scale / cost)
    least, most = worth[0] + offset.min(), worth[-1] + offset.max()
    step = max(most - least, 1e-9) / (LEVELS - 1)
    kept = np.zeros(LEVELS)
    for row, given in zip(bins, contribution, strict=True):
        level = ((worth[row] + offset - least) / step).astype(np.int64)
        kept += np.bincount(level, given, LEVELS)
    total = kept.sum()
    if total <= 0:
        return float("inf")
    from_above = np.cumsum(kept[::-1])[::-1]
    index = int(np.searchsorted(-from_above, -target * total, side="right")) - 1
    return float(2.0 ** (least + max(index, 0) * step))


def choose_thresholds(u: F32, contribution: F32, cost: F64, target: float) -> F32:
    """The least u (d_ff) at which each neuron is predicted.

    u and contribution are (tokens, d_ff), cost is (d_ff); `target` is the share of all
    contributions to keep, 0 to 1.
    """
    bins = bins_of(u)
    model = fit_contributions(bins, contribution)
    price = choose_price(model, bins, contribution, cost, target)
    return model.thresholds(cost, price)
