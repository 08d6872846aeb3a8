"""Low-rank predictors of experts, which share fc1: all of them read the same rows.

fc1 is the leading directions of a sample of all experts' gates, and an expert's fc2 the best map
from there to its own gates. Thresholds are chosen by scores of tokens that their maps were not made
with, as in `low_rank_fit`: each half of the tokens is scored by what the other one gave.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from polyneuron.io.predictor_file import LayerPredictor
from polyneuron.profiling.expert_sample import ExpertLayer, ExpertSample
from polyneuron.profiling.low_rank import Directions, Inputs, leading_directions, own_inputs
from polyneuron.profiling.low_rank_fit import (
    Calibrated,
    best_candidate,
    calibrated,
    map_of,
    orthogonal_to,
)
from polyneuron.profiling.predictors import (
    Fitted,
    PredictorSettings,
    judged,
    neuron_costs,
    num_calibration,
)
from polyneuron.profiling.standard_scores import ACTIVITY_WEIGHTS
from polyneuron.profiling.thresholds import choose_thresholds

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]

SAMPLED_ROWS = 8192
"""Gates of a layer, as many of each expert, that directions are looked for in."""
LEAST_HALF = 8
"""Tokens of an expert in either half that its maps can be made with."""
JITTER = 1e-6
"""Of the hidden values' mean variance, where their covariance is inverted."""


@dataclass(frozen=True, slots=True, eq=False)
class SharedDirections:
    """A layer's fc1, and how any gate row follows from what it gives."""

    fc1: F32
    """(rank, d_model)"""
    back: F32
    """(d_model, rank): a gate row's own map is row @ back."""

    @classmethod
    def over(cls, x: F32, gates: F32, rank: int) -> Self:
        """Of gates (rows, d_model) over inputs x (tokens, d_model)."""
        inputs = own_inputs(x)
        start = inputs.centred @ gates.T
        found = leading_directions(gates, inputs, rank, start, np.random.default_rng(0))
        fc1 = orthogonal_to(found.fc1, inputs.mean, inputs.centred.var(axis=0))
        if len(fc1) < rank:
            fc1 = np.pad(fc1, ((0, rank - len(fc1)), (0, 0)))
        return cls(fc1, _back(inputs, fc1))


def _back(inputs: Inputs, fc1: F32) -> F32:
    """The covariance of inputs with hidden values, by that of hidden values: (d_model, rank)."""
    cross = inputs.covariance(np.ascontiguousarray(fc1.T))
    inner = (fc1 @ cross).astype(np.float64)
    inner[np.diag_indices_from(inner)] += JITTER * np.trace(inner) / len(inner) + 1e-30
    back: F32 = np.linalg.solve(inner.T, cross.T.astype(np.float64)).T.astype(np.float32)
    return back


@dataclass(frozen=True, slots=True, eq=False)
class SharedLowRank:
    """What the experts of one layer have in common."""

    rank: int
    directions: SharedDirections
    halves: tuple[SharedDirections, SharedDirections]
    """Made with the tokens before `middle`, and with those from there on."""
    middle: int

    @classmethod
    def of(cls, layer: ExpertLayer, settings: PredictorSettings) -> Self:
        """Of the tokens that no expert's predictor is judged by."""
        rank = settings.rank or _best_rank(layer, settings)
        num_known = _num_known(layer)
        middle, x = num_known // 2, layer.ffn_input
        gates = sampled_gates(layer)
        parts = (x[:num_known], x[:middle], x[middle:num_known])
        whole, first, second = (SharedDirections.over(part, gates, rank) for part in parts)
        return cls(rank, whole, (first, second), middle)

    def fit(self, found: ExpertSample, settings: PredictorSettings) -> Fitted | None:
        """One expert's; None where too few tokens of either half chose it."""
        known = calibrated(found.sample, settings)
        is_first = found.tokens[: len(known.x)] < self.middle
        if min(np.count_nonzero(is_first), np.count_nonzero(~is_first)) < LEAST_HALF:
            return None
        gate = found.sample.weights.deciding.values()
        cost = neuron_costs(known.contribution)
        lifts = [gate @ half.back for half in self.halves]
        best, least = np.inf, (0.0, np.empty(0, np.float32))
        for weight in ACTIVITY_WEIGHTS:
            u = self._held_out(known, is_first, lifts, weight, settings)
            wanted = choose_thresholds(u, known.contribution, cost, settings.kept)
            price = float((np.mean(u >= wanted, axis=0) * cost).sum())
            if price < best:
                best, least = price, (weight, wanted)
        weight, threshold = least
        whole = Directions(self.directions.fc1, gate @ self.directions.back)
        made = map_of(known, whole, self.rank, weight, settings)
        predictor = LayerPredictor(made.fc1, made.fc2, threshold - made.shift)
        return judged(predictor, found.sample, settings)

    def _held_out(
        self,
        known: Calibrated,
        is_first: NDArray[np.bool_],
        lifts: list[F32],
        weight: float,
        settings: PredictorSettings,
    ) -> F32:
        """Standard scores (tokens, d_ff): of each half by the maps of the other."""
        u = np.empty(known.gate.shape, np.float32)
        for half, lift, mine in zip(self.halves, lifts, (is_first, ~is_first), strict=True):
            found = Directions(half.fc1, lift)
            scored = map_of(known.part(mine), found, self.rank, weight, settings)
            u[~mine] = scored.standard(np.ascontiguousarray(known.x[~mine]), settings)
        return u


def _num_known(layer: ExpertLayer) -> int:
    """Tokens before the first by which some expert's predictor is judged."""
    ends = []
    for expert in range(layer.num_experts):
        tokens = layer.tokens_of(expert)
        known = num_calibration(len(tokens))
        ends.append(int(tokens[known]) if known < len(tokens) else layer.num_tokens)
    return min(ends)


def _best_rank(layer: ExpertLayer, settings: PredictorSettings) -> int:
    """The rank that the most chosen expert is best with by itself."""
    counts = [len(layer.tokens_of(expert)) for expert in range(layer.num_experts)]
    sample = layer.expert(int(np.argmax(counts))).sample
    known, gate = calibrated(sample, settings), sample.weights.deciding.values()
    return best_candidate(sample, known, gate, settings).rank


def sampled_gates(layer: ExpertLayer) -> F32:
    """As many gate rows of each expert (rows, d_model), evenly spaced."""
    each = max(1, SAMPLED_ROWS // layer.num_experts)
    rows = [layer.gate_rows(expert, each) for expert in range(layer.num_experts)]
    return np.concatenate(rows)
