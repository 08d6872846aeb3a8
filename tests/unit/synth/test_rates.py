"""The power law of activation rates and the thresholds that give them."""

import math

import numpy as np
import pytest

from polyneuron.synth.rates import (
    EXPONENT,
    MAX_SPARSITY,
    MIN_SPARSITY,
    NORMAL,
    PEAK_RATE,
    UP_SHARE,
    activation_rates,
    gate_thresholds,
    squared_activation,
    squared_excess,
    up_shift,
)

NUM_NEURONS = 2048


@pytest.mark.parametrize("sparsity", [MIN_SPARSITY, 0.5, 0.9, 0.97, MAX_SPARSITY])
def test_rates_have_the_mean_asked_for(sparsity: float) -> None:
    rates = activation_rates(NUM_NEURONS, sparsity)
    assert rates.mean() == pytest.approx(1 - sparsity, rel=1e-6)
    assert np.all(np.diff(rates) <= 0)
    assert rates[-1] > 0 and rates[0] <= PEAK_RATE


def test_cold_rates_follow_the_power_law() -> None:
    rates = activation_rates(NUM_NEURONS, 0.9)
    rank = np.arange(NUM_NEURONS) + 0.5
    cold = slice(NUM_NEURONS // 4, None)
    slopes = np.diff(np.log(rates[cold])) / np.diff(np.log(rank[cold]))
    assert slopes == pytest.approx(-EXPONENT)


def test_hottest_fifth_carries_three_quarters() -> None:
    rates = activation_rates(NUM_NEURONS, 0.9)
    assert 0.72 < rates[: NUM_NEURONS // 5].sum() / rates.sum() < 0.78


def test_thresholds_give_the_rates() -> None:
    thresholds = gate_thresholds(256, 0.9)
    found = [(1 - NORMAL.cdf(float(t))) * UP_SHARE for t in thresholds]
    assert found == pytest.approx(activation_rates(256, 0.9), rel=1e-9)
    assert 1 - NORMAL.cdf(-up_shift()) == pytest.approx(UP_SHARE)


@pytest.mark.parametrize("threshold", [-1.5, 0.0, 2.5])
def test_squared_excess_is_the_integral(threshold: float) -> None:
    z = np.linspace(threshold, 9.0, 200_001)
    density = np.exp(-z * z / 2) / math.sqrt(2 * math.pi)
    integral = float((np.square(z - threshold) * density).sum() * (z[1] - z[0]))
    assert squared_excess(threshold) == pytest.approx(integral, rel=1e-4)


def test_squared_activation_adds_all_neurons() -> None:
    normal = np.random.default_rng(0).standard_normal((2, 4000, 64))
    gates = np.maximum(0, normal[0] - gate_thresholds(64, 0.8))
    ups = np.maximum(0, normal[1] + up_shift())
    sampled = float(np.square(gates * ups).mean(axis=0).sum())
    assert squared_activation(64, 0.8) == pytest.approx(sampled, rel=0.05)
