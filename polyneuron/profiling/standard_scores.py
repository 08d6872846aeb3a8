"""Scores on one scale: a neuron's u is about its gate's estimate in standard deviations."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from polyneuron.profiling.predictors import PredictorSettings, scores

F32 = NDArray[np.float32]

RIDGE_SHARE = 0.2
"""Weight of "nothing to learn" beside the tokens, in the map from hidden values to activity."""
ACTIVITY_WEIGHTS = (0.0, 1.0)
"""How much what was learnt of activity counts beside the gate's estimate: what is tried."""


@dataclass(frozen=True, slots=True, eq=False)
class ScoreMap:
    """Two matrices (fc1 None: one) and what is added to their score to give u."""

    fc1: F32 | None
    fc2: F32
    shift: F32
    """(d_ff)"""

    def standard(self, x: F32, settings: PredictorSettings) -> F32:
        """x (tokens, d_model) -> u (tokens, d_ff), by the engine's arithmetic."""
        u: F32 = scores(self.fc1, self.fc2, x, settings) + self.shift
        return u


def score_map(
    fc1: F32 | None, fc2: F32, x: F32, gate: F32, settings: PredictorSettings
) -> ScoreMap:
    """The shift that makes the mean of u that of gate (tokens, d_ff) in its deviations."""
    spread = np.maximum(gate.std(axis=0), np.float32(1e-6))
    shift = gate.mean(axis=0) / spread - scores(fc1, fc2, x, settings).mean(axis=0)
    return ScoreMap(fc1, fc2, shift)


def activity_map(hidden: F32, contribution: F32) -> F32:
    """(d_ff, rank): what hidden values (tokens, rank), centred, tell of contributions.

    Ridge regression of the square roots of contributions (tokens, d_ff), in their deviations: a
    neuron's gate may be open and its up row closed, and that has directions of its own.
    """
    size = np.maximum(hidden.std(axis=0), np.float32(1e-12))
    inputs = hidden / size
    wanted = np.sqrt(contribution)
    wanted -= wanted.mean(axis=0)
    wanted /= np.maximum(wanted.std(axis=0), np.float32(1e-6))
    gram = inputs.T @ inputs
    gram[np.diag_indices_from(gram)] += np.float32(RIDGE_SHARE * len(hidden))
    learnt: F32 = (np.linalg.solve(gram, inputs.T @ wanted) / size[:, None]).T
    return learnt


def mixed_lift(lift: F32, hidden: F32, contribution: F32, weight: float) -> F32:
    """fc2 (d_ff, rank): the gate's estimate in its deviations, and what was learnt of activity."""
    estimate = hidden @ lift.T
    spread = np.maximum(estimate.std(axis=0), np.float32(1e-12))
    estimated: F32 = lift / spread[:, None]
    if weight == 0.0:
        return estimated
    return estimated + np.float32(weight) * activity_map(hidden, contribution)
