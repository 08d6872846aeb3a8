"""Sign bits (SparseInfer, arXiv 2411.12692): the signs of a layer's rows, and no training.

A row is its signs times one size for 32 columns, one bit a weight: each column votes for the neuron
or against it, with the input's size. Where the product of two ReLUs decides (dReLU), up's signs
vote too, in a matrix of their own. Thresholds come from the text as for any predictor, or from that
paper's one factor of conservativeness, alpha: a neuron is named where alpha times all votes for it
exceed those against it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from polyneuron.io.predictor_file import LayerPredictor, PredictorInput
from polyneuron.kernels.quant import BLOCK_COLS
from polyneuron.profiling.low_rank import earlier_inputs
from polyneuron.profiling.predictors import (
    Fitted,
    PredictorSettings,
    contributions,
    judged,
    neuron_costs,
    num_calibration,
    predictor_input,
    scores,
)
from polyneuron.profiling.sample import LayerSample
from polyneuron.profiling.thresholds import choose_thresholds

F32 = NDArray[np.float32]

UP_WEIGHTS = (0.5, 1.0)
"""What a vote of up counts beside one of gate, both in deviations of their sums: what is tried."""
MOST_RATIO = 0.9
"""Of a threshold to all votes, where alpha is told: neurons named always or never have none."""


@dataclass(frozen=True, slots=True, eq=False)
class Signs:
    """One matrix's signs."""

    rows: F32
    """(d_ff, d_model), such that their products with the text's inputs have a deviation of 1."""
    level: F32
    """(d_ff): the mean of the matrix's own products, in their deviations."""


@dataclass(frozen=True, slots=True, eq=False)
class Votes:
    """A predictor, and what it comes to over the text."""

    predictor: LayerPredictor
    cost: float
    """A token's, of the neurons named: 1 in memory, more where they are read."""
    total: F32
    """(d_ff): the mean of all votes' sizes, for and against."""


def sign_rows(gate: F32) -> F32:
    """gate (d_ff, d_model) as its signs times the mean size of 32 columns; 0 counts as positive."""
    blocks = gate.reshape(len(gate), -1, BLOCK_COLS)
    size = np.mean(np.abs(blocks), axis=2, keepdims=True)
    rows: F32 = np.where(blocks >= 0, size, -size).reshape(gate.shape).astype(np.float32)
    return rows


def fit_sign(sample: LayerSample, settings: PredictorSettings) -> Fitted:
    """One layer's predictor from the signs of its gate rows, and of its up rows where asked."""
    known = slice(0, num_calibration(len(sample.hidden)))
    x = np.ascontiguousarray(predictor_input(sample, settings.input)[known])
    ffn = sample.ffn_input[known]
    scale = np.ones(x.shape[1], np.float32)
    if settings.input is PredictorInput.ATTENTION:
        scale = earlier_inputs(x, ffn).scale
    gate = signs_of(sample.weights.deciding.values() * scale, x, sample.gate[known])
    contribution = contributions(sample)[known]
    if settings.has_up:
        rows = sample.weights.up_values()
        up = signs_of(rows * scale, x, ffn @ rows.T)
        tried = [_votes(gate, up, weight, x, contribution, settings) for weight in UP_WEIGHTS]
    else:
        tried = [_votes(gate, None, 0.0, x, contribution, settings)]
    found = min(tried, key=lambda votes: votes.cost)
    fitted = judged(found.predictor, sample, settings)
    return replace(fitted, report=replace(fitted.report, alpha=alpha_of(found)))


def signs_of(rows: F32, x: F32, values: F32) -> Signs:
    """Of a matrix (d_ff, d_model); `values` (tokens, d_ff) are its true products, x the inputs."""
    signs = sign_rows(rows)
    spread = np.maximum((x @ signs.T).std(axis=0), np.float32(1e-12))
    level = values.mean(axis=0) / np.maximum(values.std(axis=0), np.float32(1e-6))
    return Signs(signs / spread[:, None], level)


def _votes(
    gate: Signs,
    up: Signs | None,
    weight: float,
    x: F32,
    contribution: F32,
    settings: PredictorSettings,
) -> Votes:
    """With thresholds by `alpha` where it is given, else such that the share asked for is kept."""
    size = np.abs(x).mean(axis=0)
    total, level, more = np.abs(gate.rows) @ size, gate.level, None
    if up is not None:
        more = np.float32(weight) * up.rows
        total, level = total + np.abs(more) @ size, level + np.float32(weight) * up.level
    sums = scores(None, gate.rows, x, settings, more)
    cost = neuron_costs(contribution)
    if settings.alpha:
        threshold = np.float32((1 - settings.alpha) / (1 + settings.alpha)) * total
    else:
        shift = level - sums.mean(axis=0)
        threshold = choose_thresholds(sums + shift, contribution, cost, settings.kept) - shift
    named = float((np.mean(sums > threshold, axis=0) * cost).sum())
    return Votes(LayerPredictor(None, gate.rows, threshold, more), named, total)


def alpha_of(votes: Votes) -> float:
    """The alpha that thresholds come to, in the middle of the layer.

    With P and N the votes for and against, alpha * P > N is P - N > (1 - alpha) / (1 + alpha) *
    (P + N); P + N is nearly the same for all tokens, whose inputs are normed.
    """
    ratio = np.clip(
        votes.predictor.threshold / np.maximum(votes.total, 1e-30), -MOST_RATIO, MOST_RATIO
    )
    middle = float(np.median(ratio))
    return (1 - middle) / (1 + middle)
