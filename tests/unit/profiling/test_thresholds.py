"""Thresholds on planted contributions."""

import numpy as np
import pytest

from polyneuron.profiling.thresholds import (
    ALWAYS,
    EDGES,
    NEVER,
    bins_of,
    choose_thresholds,
    fit_contributions,
    non_decreasing,
)

NUM_TOKENS, NUM_NEURONS = 600, 48


def planted(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Scores and contributions: a neuron contributes where a noisy score is above its bar."""
    rng = np.random.default_rng(seed)
    u = rng.standard_normal((NUM_TOKENS, NUM_NEURONS)).astype(np.float32)
    bar = np.linspace(-0.5, 1.5, NUM_NEURONS)
    gate = u + 0.3 * rng.standard_normal(u.shape) - bar
    size = np.linspace(0.5, 2.0, NUM_NEURONS)
    return (u - bar).astype(np.float32), (size * np.maximum(gate, 0)).astype(np.float32)


@pytest.mark.parametrize("target", [0.5, 0.9, 0.99])
def test_thresholds_keep_the_target(target: float) -> None:
    u, contribution = planted()
    least = choose_thresholds(u, contribution, np.ones(NUM_NEURONS), target)
    kept = contribution[u >= least].sum() / contribution.sum()
    assert target - 0.002 <= kept <= target + 0.02


def test_thresholds_hold_for_other_tokens() -> None:
    u, contribution = planted()
    least = choose_thresholds(u, contribution, np.ones(NUM_NEURONS), 0.95)
    u, contribution = planted(1)
    assert abs(contribution[u >= least].sum() / contribution.sum() - 0.95) < 0.02


def test_dear_neurons_are_named_less() -> None:
    u, contribution = planted()
    cost = np.where(np.arange(NUM_NEURONS) % 2, 10.0, 1.0)
    plain = (u >= choose_thresholds(u, contribution, np.ones(NUM_NEURONS), 0.9)).mean(axis=0)
    named = (u >= choose_thresholds(u, contribution, cost, 0.9)).mean(axis=0)
    assert named[1::2].mean() < plain[1::2].mean()
    assert named[::2].mean() > plain[::2].mean()
    assert (named * cost).sum() < (plain * cost).sum()


def test_neurons_that_never_contribute_are_not_named() -> None:
    u, contribution = planted()
    contribution[:, :8] = 0
    least = choose_thresholds(u, contribution, np.ones(NUM_NEURONS), 0.9)
    assert (u >= least)[:, :8].mean() < 0.2 * (u >= least)[:, 8:].mean()


def test_nothing_contributes_nothing_is_named() -> None:
    u, contribution = planted()
    least = choose_thresholds(u, 0 * contribution, np.ones(NUM_NEURONS), 0.9)
    assert not (u >= least).any()


def test_scales_and_curve_tell_contributions() -> None:
    u, contribution = planted()
    bins = bins_of(u)
    model = fit_contributions(bins, contribution)
    assert (np.diff(model.curve) >= 0).all()
    expected = model.scale * model.curve[bins]
    assert expected.sum() == pytest.approx(contribution.sum(), rel=0.06)
    assert model.scale[-1] > 2 * model.scale[0]


def test_prices_out_of_range_name_all_or_none() -> None:
    u, contribution = planted()
    model = fit_contributions(bins_of(u), contribution + np.float32(0.1))
    assert (model.thresholds(np.ones(NUM_NEURONS), 0.0) == ALWAYS).all()
    assert (model.thresholds(np.ones(NUM_NEURONS), 1e9) == NEVER).all()


def test_bins_hold_the_ends() -> None:
    bins = bins_of(np.array([-99.0, EDGES[0], 0.01, 99.0], np.float32))
    assert bins[0] == bins[1] == 0 and bins[3] == len(EDGES) - 2
    assert EDGES[bins[2]] <= 0.01 < EDGES[bins[2] + 1]


def test_non_decreasing_is_the_nearest() -> None:
    values = np.array([1.0, 3.0, 2.0, 2.0, 5.0])
    got = non_decreasing(values, np.array([1.0, 1.0, 1.0, 2.0, 1.0]))
    assert got.tolist() == [1.0, 2.25, 2.25, 2.25, 5.0]
