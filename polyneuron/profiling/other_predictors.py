"""Predictors without fitted matrices: sign bits, a given pair of matrices, the gate itself.

Sign bits (SparseInfer, arXiv 2411.12692): a row of the gate matrix is its signs times one size for
32 columns, one bit a weight. Thresholds come from the text as for any predictor, in the place of
that paper's one factor of conservativeness.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from polyneuron.errors import UnsupportedError
from polyneuron.io.predictor_file import LayerPredictor, PredictorInput
from polyneuron.kernels.quant import BLOCK_COLS
from polyneuron.profiling.calibration import LayerSample
from polyneuron.profiling.low_rank import earlier_inputs
from polyneuron.profiling.predictors import (
    Fitted,
    PredictorSettings,
    contributions,
    evaluate,
    neuron_costs,
    num_calibration,
    predictor_input,
)
from polyneuron.profiling.standard_scores import score_map
from polyneuron.profiling.thresholds import choose_thresholds

F32 = NDArray[np.float32]


def sign_rows(gate: F32) -> F32:
    """gate (d_ff, d_model) as its signs times the mean size of 32 columns; 0 counts as positive."""
    blocks = gate.reshape(len(gate), -1, BLOCK_COLS)
    size = np.mean(np.abs(blocks), axis=2, keepdims=True)
    rows: F32 = np.where(blocks >= 0, size, -size).reshape(gate.shape).astype(np.float32)
    return rows


def fit_sign(sample: LayerSample, settings: PredictorSettings) -> Fitted:
    """One layer's predictor from the signs of its gate rows."""
    known = slice(0, num_calibration(len(sample.hidden)))
    x = np.ascontiguousarray(predictor_input(sample, settings.input)[known])
    gate = sample.weights.deciding.values()
    if settings.input is PredictorInput.ATTENTION:
        gate = gate * earlier_inputs(x, sample.ffn_input[known]).scale
    signs = sign_rows(gate)
    spread = np.maximum((x @ signs.T).std(axis=0), np.float32(1e-12))
    fc2 = signs / spread[:, None]
    found = score_map(None, fc2, x, sample.gate[known], settings)
    contribution = contributions(sample)[known]
    least = choose_thresholds(
        found.standard(x, settings), contribution, neuron_costs(contribution), settings.kept
    )
    predictor = LayerPredictor(None, fc2, least - found.shift)
    return Fitted(predictor, evaluate(predictor, sample, settings))


def oracle(gate: F32) -> LayerPredictor:
    """The gate matrix (d_ff, d_model) itself, input `ffn`: names what exact mode computes."""
    return LayerPredictor(None, gate, np.zeros(len(gate), np.float32))


def imported(fc1: F32, fc2: F32, ffn_norm: F32, threshold: float = 0.0) -> LayerPredictor:
    """A pair of matrices as PowerInfer's files have them, for input `ffn` and ReLU between.

    fc1 (rank, d_model), fc2 (d_ff, rank), norm weights (d_model). There fc1 reads the stream before
    the norm, stream = rms * normed / weight. The factor rms is positive and passes through ReLU and
    fc2, so that a score above zero stays above zero: with threshold 0 the very same neurons are
    named. Another threshold would have to be divided by each token's rms and is refused with
    UnsupportedError, as is a norm with a weight of zero.
    """
    if threshold != 0.0:
        raise UnsupportedError(
            f"powerinfer.sparse_threshold = {threshold}: only 0 means the same behind the norm; "
            "fit predictors with polyneuron profile"
        )
    if not np.all(ffn_norm):
        raise UnsupportedError(
            "ffn_norm has weights of zero, and the predictor reads what they hide; fit predictors "
            "with polyneuron profile"
        )
    return LayerPredictor(fc1 / ffn_norm, fc2, np.zeros(len(fc2), np.float32))
