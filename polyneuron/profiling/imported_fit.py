"""Predictors that come with a model, put in the form and the order the model file needs."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from polyneuron.errors import UnsupportedError
from polyneuron.io.predictor_file import LayerPredictor
from polyneuron.io.predictor_import import PredictorImport
from polyneuron.profiling.predictors import (
    RANK_STEP,
    Fitted,
    PredictorSettings,
    contributions,
    judged,
    neuron_costs,
    num_calibration,
    scores,
)
from polyneuron.profiling.sample import LayerSample
from polyneuron.profiling.standard_scores import score_map
from polyneuron.profiling.thresholds import choose_thresholds

F32 = NDArray[np.float32]


def fit_imported(
    sample: LayerSample, settings: PredictorSettings, found: PredictorImport
) -> Fitted:
    """One layer's predictor, with its own threshold or one from the text."""
    weights = sample.weights
    shape = (sample.hidden.shape[1], sample.ffn_input.shape[1])
    fc1, fc2 = found.pair(sample.layer_id, shape)
    if weights.neuron_ids is not None:
        fc2 = fc2[weights.neuron_ids]
    if found.is_before_norm:
        fc1 = behind_norm(found, sample.layer_id, fc1, weights.ffn_norm)
    predictor = LayerPredictor(*padded(fc1, fc2), np.full(len(fc2), found.threshold, np.float32))
    if not settings.keeps_threshold:
        predictor = recalibrated(predictor, sample, settings)
    return judged(predictor, sample, settings)


def check_threshold(found: PredictorImport) -> None:
    """UnsupportedError for a threshold that would mean something else in front of each token.

    The stream's length differs by token and is gone behind the norm: a score above zero stays above
    zero whatever it was, one above another number does not.
    """
    if found.is_before_norm and found.threshold != 0.0:
        raise UnsupportedError(
            f"--import {found.path}: its threshold is {found.threshold:g}, and only 0 means the "
            "same behind the norm; give --recall, and thresholds come from the text"
        )


def behind_norm(found: PredictorImport, layer: int, fc1: F32, ffn_norm: F32) -> F32:
    """fc1 (rank, d_model) for the norm's output, where it reads the stream before it.

    stream = rms * normed / weight; the factor rms is positive and passes through ReLU and fc2.
    """
    if not np.all(ffn_norm):
        found.fail(
            f"reads the stream before the norm, and in layer {layer} ffn_norm has weights of zero, "
            "behind which it is lost"
        )
    moved: F32 = fc1 / ffn_norm
    return moved


def padded(fc1: F32, fc2: F32) -> tuple[F32, F32]:
    """The same with a rank that the kernels take: rows and columns of zeros behind."""
    more = -len(fc1) % RANK_STEP
    return np.pad(fc1, ((0, more), (0, 0))), np.pad(fc2, ((0, 0), (0, more)))


def recalibrated(
    predictor: LayerPredictor, sample: LayerSample, settings: PredictorSettings
) -> LayerPredictor:
    """Thresholds that keep the share asked for, each row of fc2 in its score's deviations."""
    known = slice(0, num_calibration(len(sample.hidden)))
    x = np.ascontiguousarray(sample.ffn_input[known])
    raw = scores(predictor.fc1, predictor.fc2, x, settings)
    fc2 = predictor.fc2 / np.maximum(raw.std(axis=0), np.float32(1e-12))[:, None]
    made = score_map(predictor.fc1, fc2, x, sample.gate[known], settings)
    contribution = contributions(sample)[known]
    least = choose_thresholds(
        made.standard(x, settings), contribution, neuron_costs(contribution), settings.kept
    )
    return LayerPredictor(predictor.fc1, fc2, least - made.shift)
