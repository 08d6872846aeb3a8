"""How often each neuron is active, and the threshold on a normal variable that makes it so."""

from __future__ import annotations

import math
from functools import lru_cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]

PEAK_RATE = 0.75
"""Of the hottest neurons."""
EXPONENT = 1.4
"""Of the power law in a neuron's rank, beyond the hottest ones."""
UP_SHARE = 0.8
"""P(up > 0 | gate > 0): PowerInfer-2 found gate, up and down to be active together in 80 %."""
MIN_SPARSITY, MAX_SPARSITY = 0.3, 0.995
NORMAL = NormalDist()


def activation_rates(num_neurons: int, sparsity: float) -> F64:
    """Rates (num_neurons), hottest first, with mean 1 - sparsity.

    Rate of relative rank u: PEAK_RATE * min(1, (u / knee) ^ -EXPONENT); the knee is found by
    bisection.
    """
    rank = (np.arange(num_neurons) + 0.5) / num_neurons
    low, high = 0.0, 1.0
    for _ in range(100):
        knee = (low + high) / 2
        mean = float((PEAK_RATE * np.minimum(1.0, (rank / knee) ** -EXPONENT)).mean())
        low, high = (knee, high) if mean < 1.0 - sparsity else (low, knee)
    rates: F64 = PEAK_RATE * np.minimum(1.0, (rank / knee) ** -EXPONENT)
    return rates


@lru_cache(maxsize=4)
def gate_thresholds(num_neurons: int, sparsity: float) -> F64:
    """theta (num_neurons), hottest first: P(z > theta) = rate / UP_SHARE of a standard normal z."""
    rates = activation_rates(num_neurons, sparsity)
    thresholds = np.array([-NORMAL.inv_cdf(rate / UP_SHARE) for rate in rates])
    thresholds.setflags(write=False)
    return thresholds


def up_shift() -> float:
    """What is added to a standard normal variable so that it is positive in UP_SHARE of cases."""
    return NORMAL.inv_cdf(UP_SHARE)


def squared_excess(threshold: float) -> float:
    """E[max(0, z - threshold)^2] of a standard normal z."""
    tail = NORMAL.cdf(-threshold)
    return (1.0 + threshold**2) * tail - threshold * NORMAL.pdf(threshold)


@lru_cache(maxsize=4)
def squared_activation(num_neurons: int, sparsity: float) -> float:
    """Sum over all neurons of E[(relu(gate) relu(up))^2], gate and up of standard deviation 1."""
    gates = math.fsum(squared_excess(float(t)) for t in gate_thresholds(num_neurons, sparsity))
    return gates * squared_excess(-up_shift())
