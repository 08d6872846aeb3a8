"""Trained predictors, fc2(relu(fc1 x)): each layer's rank is found from its sparsity (PAPER §1.9).

Training begins at the low-rank map of the same rank, made to pass the ReLU: each hidden value is
raised by its own deviation along the input's steady direction, so that most of it stays above zero.
When to stop, and the thresholds, are judged by tokens held out: the calibration tokens are cut in
two, each half is trained on and judges the other.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from polyneuron.errors import EngineError
from polyneuron.io.predictor_file import LayerPredictor
from polyneuron.profiling.low_rank_fit import (
    Calibrated,
    calibrated,
    directions_of,
    folds_of,
    map_of,
    steady_direction,
)
from polyneuron.profiling.mlp_training import (
    Mlp,
    Tokens,
    check_trainable,
    loss_of,
    mean_active,
    train,
)
from polyneuron.profiling.predictors import (
    RANK_STEP,
    Fitted,
    PredictorSettings,
    judged,
    neuron_costs,
    predictor_bytes,
    scores,
)
from polyneuron.profiling.sample import LayerSample
from polyneuron.profiling.statistics import carried_by
from polyneuron.profiling.thresholds import LEAST_U, MOST_U, NEVER, choose_thresholds

__all__ = ["check_trainable", "climbed", "first_rank", "fit_mlp"]

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]

MAX_PASSES, PATIENCE = 24, 3
"""Over the tokens: at most, and how many that make nothing better end it."""
RAISED = 1.0
"""What hidden values are raised by at the start, in their deviations."""
GAIN = 1.5
"""Of a start's logits to the low-rank map's scores, which have a deviation of about 1."""
LEARNT = 1.0
"""Weight of what the low-rank map learns of activity."""
BEYOND = 0.0005
"""Share of the logits below, and of those above, the range of thresholds."""
HOTTEST = 0.2
"""Of the neurons: what they carry of all activations tells how skewed a layer is."""


@dataclass(frozen=True, slots=True, eq=False)
class Tried:
    """A rank: thresholds of logits out of sample, the passes that did best, a token's cost."""

    rank: int
    least: F32
    passes: int
    cost: float


def fit_mlp(sample: LayerSample, settings: PredictorSettings) -> Fitted:
    """One layer's predictor at the rank that costs least."""
    known = calibrated(sample, settings)
    gate = sample.weights.deciding.values()

    def attempt(rank: int) -> Tried:
        return _try_rank(known, gate, sample.weights.neuron_bytes, rank, settings)

    if settings.rank:
        best = attempt(settings.rank)
    else:
        first = first_rank(known.contribution > 0, gate.shape[1])
        best = climbed(first, gate.shape[1] // 2, attempt)
    states = train(start_of(known, gate, best.rank, settings), _tokens(known), settings.seed)
    made = next(itertools.islice(states, best.passes, None))
    predictor = LayerPredictor(made.fc1, made.fc2, best.least - made.bias)
    return judged(predictor, sample, settings)


def first_rank(active: NDArray[np.bool_], d_model: int) -> int:
    """Where the search begins: more directions for a denser layer, fewer for a more skewed one.

    `active` is (tokens, d_ff). With half of all activations in the hottest fifth of the neurons the
    rank is the share of active neurons times the width.
    """
    skew = carried_by(np.sort(active.mean(axis=0))[::-1], HOTTEST)
    wanted = 2 * d_model * float(active.mean()) * (1 - skew)
    return _allowed(wanted, d_model // 2)


def _allowed(rank: float, most: int) -> int:
    """The nearest multiple of 32 in 32..most."""
    return min(max(round(rank / RANK_STEP), 1), max(most // RANK_STEP, 1)) * RANK_STEP


def climbed(first: int, most: int, attempt: Callable[[int], Tried]) -> Tried:
    """Double the rank while a token costs less; where that never helps, halve it.

    The share asked for is kept at every rank: what changes is how many neurons that takes.
    """
    best = start = attempt(first)
    for factor in (2.0, 0.5):
        while (rank := _allowed(best.rank * factor, most)) != best.rank:
            tried = attempt(rank)
            if tried.cost >= best.cost:
                break
            best = tried
        if best is not start:
            break
    return best


def _try_rank(
    known: Calibrated, gate: F32, neuron_bytes: int, rank: int, settings: PredictorSettings
) -> Tried:
    """Train on each fold until the tokens held out are told no better."""
    held = [known.part(fold) for fold in folds_of(len(known.x))]
    parts = [known.part(~fold) for fold in folds_of(len(known.x))]
    runs = [train(start_of(p, gate, rank, settings), _tokens(p), settings.seed) for p in parts]
    mean = mean_active(known.contribution)
    best, best_loss, best_passes = None, np.inf, 0
    for passes, states in enumerate(zip(*runs, strict=True)):
        loss = sum(
            loss_of(state.logits(part.x), part.contribution, mean)
            for state, part in zip(states, held, strict=True)
        )
        if loss < best_loss:
            best, best_loss, best_passes = states, loss, passes
        if passes == MAX_PASSES or passes - best_passes == PATIENCE:
            break
    if best is None:
        raise EngineError(f"--predictor mlp: the loss at rank {rank} is no number")
    logits = [
        scores(state.fc1, state.fc2, part.x, settings) + state.bias
        for state, part in zip(best, held, strict=True)
    ]
    return _priced(known, np.concatenate(logits), rank, best_passes, neuron_bytes, settings)


def _priced(
    known: Calibrated,
    logits: F32,
    rank: int,
    passes: int,
    neuron_bytes: int,
    settings: PredictorSettings,
) -> Tried:
    cost = neuron_costs(known.contribution)
    least = logit_thresholds(logits, known.contribution, cost, settings.kept)
    computed = float((np.mean(logits >= least, axis=0) * cost).sum()) * neuron_bytes
    shape = (logits.shape[1], known.x.shape[1])
    return Tried(rank, least, passes, predictor_bytes(rank, shape, settings) + computed)


def logit_thresholds(logits: F32, contribution: F32, cost: F64, kept: float) -> F32:
    """The least logit (d_ff) at which each neuron is named.

    Logits (tokens, d_ff) have no scale of their own: nearly all of them are spread over the range
    in which thresholds are looked for.
    """
    low, high = (np.float32(np.quantile(logits, share)) for share in (BEYOND, 1 - BEYOND))
    stretch = np.float32(MOST_U - LEAST_U) / max(high - low, np.float32(1e-12))
    least = choose_thresholds((logits - low) * stretch + LEAST_U, contribution, cost, kept)
    is_finite = np.abs(least) < NEVER  # others are named always or never
    moved = (np.where(is_finite, least, 0) - np.float32(LEAST_U)) / stretch + low
    return np.where(is_finite, moved, least).astype(np.float32)


def _tokens(part: Calibrated) -> Tokens:
    return Tokens(part.x, part.contribution)


def start_of(part: Calibrated, gate: F32, rank: int, settings: PredictorSettings) -> Mlp:
    """The low-rank map, its hidden values raised so that ReLU passes most of them."""
    linear = map_of(part, directions_of(part, gate, rank, settings), rank, LEARNT, settings)
    assert linear.fc1 is not None
    hidden = (part.x - part.x.mean(axis=0)) @ linear.fc1.T
    raised = np.float32(RAISED) * hidden.std(axis=0)
    mean = part.x.mean(axis=0)
    steady = steady_direction(mean, part.x.var(axis=0))
    square = float(mean @ steady)
    if square == 0.0:
        raised = np.zeros_like(raised)
    fc1 = linear.fc1 + raised[:, None] * (steady / np.float32(square or 1.0))
    gain = np.float32(GAIN)
    return Mlp(fc1, gain * linear.fc2, gain * (linear.shift - linear.fc2 @ raised))
