"""Low-rank predictors: directions from the gate matrix and the text, thresholds out of sample.

Thresholds are chosen by scores of tokens that the scores' maps were not made with: the calibration
tokens are cut in two, and each half is scored by what the other one gave. The predictor itself is
made with both.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from polyneuron.io.predictor_file import LayerPredictor, PredictorInput
from polyneuron.profiling.low_rank import (
    Directions,
    earlier_inputs,
    leading_directions,
    own_inputs,
)
from polyneuron.profiling.predictors import (
    RANK_STEP,
    Fitted,
    PredictorSettings,
    contributions,
    judged,
    neuron_costs,
    num_calibration,
    predictor_bytes,
    predictor_input,
)
from polyneuron.profiling.sample import LayerSample
from polyneuron.profiling.standard_scores import (
    ACTIVITY_WEIGHTS,
    ScoreMap,
    mixed_lift,
    score_map,
)
from polyneuron.profiling.thresholds import choose_thresholds

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]

STAGES = ((16, 8), (4,), (2,))
"""Shares of the width that are tried; a later stage only where the one before ended best."""
NUM_FOLDS = 2
STEADY_SHARE = 1e-3
"""Of the mean variance of a column: below it a column counts as steady."""


@dataclass(frozen=True, slots=True, eq=False)
class Calibrated:
    """The calibration tokens of one layer."""

    x: F32
    ffn: F32
    """Inputs of predictor and feed forward, (tokens, d_model)."""
    gate: F32
    contribution: F32
    """(tokens, d_ff)"""

    def part(self, rows: slice | NDArray[np.bool_]) -> Calibrated:
        """Some of the tokens."""
        arrays = (self.x, self.ffn, self.gate, self.contribution)
        return Calibrated(*(np.ascontiguousarray(array[rows]) for array in arrays))


def calibrated(sample: LayerSample, settings: PredictorSettings) -> Calibrated:
    """The tokens that predictors are made with."""
    everything = Calibrated(
        predictor_input(sample, settings.input), sample.ffn_input, sample.gate,
        contributions(sample),
    )  # fmt: skip
    return everything.part(slice(0, num_calibration(len(sample.hidden))))


@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """A rank and what a token would cost with it, in bytes read from memory."""

    rank: int
    weight: float
    """Of what is learnt of activity."""
    threshold_u: F32
    cost: float


def rank_stages(d_model: int, rank: int) -> list[list[int]]:
    """Ranks to try, stage by stage, each ascending; only `rank` where it is given."""
    if rank:
        return [[rank]]
    stages: list[list[int]] = []
    for divisors in STAGES:
        tried = {other for stage in stages for other in stage}
        wanted = {max(RANK_STEP, d_model // d // RANK_STEP * RANK_STEP) for d in divisors}
        if wanted - tried:
            stages.append(sorted(wanted - tried))
    return stages


def fit_low_rank(sample: LayerSample, settings: PredictorSettings) -> Fitted:
    """One layer's predictor at the rank that costs least."""
    known, gate = calibrated(sample, settings), sample.weights.deciding.values()
    best = best_candidate(sample, known, gate, settings)
    found = directions_of(known, gate, best.rank, settings)
    made = map_of(known, found, best.rank, best.weight, settings)
    predictor = LayerPredictor(made.fc1, made.fc2, best.threshold_u - made.shift)
    return judged(predictor, sample, settings)


def best_candidate(
    sample: LayerSample, known: Calibrated, gate: F32, settings: PredictorSettings
) -> Candidate:
    """The rank that costs least, and its thresholds; `gate` has the sample's deciding rows."""
    cost = neuron_costs(known.contribution)
    candidates: list[Candidate] = []
    for ranks in rank_stages(gate.shape[1], settings.rank):
        candidates += _candidates(known, gate, cost, sample.weights.neuron_bytes, ranks, settings)
        best = min(candidates, key=lambda candidate: candidate.cost)
        if best.rank != ranks[-1]:
            break
    return best


def _candidates(
    known: Calibrated,
    gate: F32,
    cost: F64,
    neuron_bytes: int,
    ranks: list[int],
    settings: PredictorSettings,
) -> list[Candidate]:
    """What some ranks, ascending, would cost."""
    folds = folds_of(len(known.x))
    parts = [(known.part(~held), held) for held in folds]
    directions = [directions_of(part, gate, ranks[-1], settings) for part, _ in parts]
    candidates = []
    for rank, weight in itertools.product(ranks, ACTIVITY_WEIGHTS):
        u = np.empty(known.gate.shape, np.float32)
        for (part, held), found in zip(parts, directions, strict=True):
            scored = map_of(part, found, rank, weight, settings)
            u[held] = scored.standard(np.ascontiguousarray(known.x[held]), settings)
        least = choose_thresholds(u, known.contribution, cost, settings.kept)
        computed = float((np.mean(u >= least, axis=0) * cost).sum()) * neuron_bytes
        fixed = predictor_bytes(rank, gate.shape, settings)
        candidates.append(Candidate(rank, weight, least, fixed + computed))
    return candidates


def folds_of(num_tokens: int) -> list[NDArray[np.bool_]]:
    """Runs of tokens, each held out once."""
    fold = np.arange(num_tokens) * NUM_FOLDS // num_tokens
    return [fold == index for index in range(NUM_FOLDS)]


def directions_of(
    part: Calibrated, gate: F32, rank: int, settings: PredictorSettings
) -> Directions:
    """The leading directions of gate (d_ff, d_model) over some tokens."""
    is_own = settings.input is PredictorInput.FFN
    inputs = own_inputs(part.x) if is_own else earlier_inputs(part.x, part.ffn)
    start = part.gate - part.gate.mean(axis=0)
    found = leading_directions(gate, inputs, rank, start, np.random.default_rng(0))
    fc1 = orthogonal_to(found.fc1, inputs.mean, inputs.centred.var(axis=0))
    return Directions(fc1, found.lift)


def orthogonal_to(rows: F32, mean: F32, variance: F32) -> F32:
    """Rows (n, d_model) that see nothing of the mean input; mean and variance are (d_model).

    So hidden values are centred, and rounding them to 8 bits wastes none on a constant. What is
    taken off lies where the input has a mean and varies little: a bias that the model keeps in a
    few columns goes away without touching what the rows tell of the others.
    """
    steady = steady_direction(mean, variance)
    square = float(mean @ steady)
    if square == 0.0:
        return rows
    blind: F32 = rows - (rows @ mean / np.float32(square))[:, None] * steady
    return blind


def steady_direction(mean: F32, variance: F32) -> F32:
    """Where inputs of this mean and variance (d_model) have a mean and hardly vary: (d_model)."""
    floor = np.float32(STEADY_SHARE) * variance.mean() + np.float32(1e-30)
    steady: F32 = mean / (variance + floor)
    return steady


def map_of(
    part: Calibrated, found: Directions, rank: int, weight: float, settings: PredictorSettings
) -> ScoreMap:
    """The predictor of a rank without its thresholds."""
    fc1, lift = found.fc1[:rank], found.lift[:, :rank]
    if len(fc1) < rank:  # fewer neurons or columns than directions wanted
        fc1 = np.pad(fc1, ((0, rank - len(fc1)), (0, 0)))
        lift = np.pad(lift, ((0, 0), (0, rank - lift.shape[1])))
    hidden = (part.x - part.x.mean(axis=0)) @ fc1.T
    fc2 = mixed_lift(lift, hidden, part.contribution, weight)
    return score_map(fc1, fc2, part.x, part.gate, settings)
