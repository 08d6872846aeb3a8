"""Predictors of planted layers."""

from typing import Any

import numpy as np
import pytest

from polyneuron.errors import ConfigError
from polyneuron.io.predictor_file import PredictorInput
from polyneuron.kernels.quant import StorageType
from polyneuron.profiling.low_rank import leading_directions, own_inputs
from polyneuron.profiling.low_rank_fit import fit_low_rank, orthogonal_to, rank_stages
from polyneuron.profiling.oracle_fit import oracle
from polyneuron.profiling.predictors import (
    Fitted,
    PredictorSettings,
    judged,
)
from polyneuron.profiling.sample import LayerSample
from tests.support.planted_layer import D_FF, D_MODEL, planted

ATTENTION, FFN = PredictorInput.ATTENTION, PredictorInput.FFN


def low_rank(sample: LayerSample, at: PredictorInput = FFN, rank: int = 32) -> Fitted:
    return fit_low_rank(sample, PredictorSettings(input=at, kept=0.97, rank=rank))


@pytest.mark.parametrize("at", [FFN, ATTENTION])
def test_low_rank_finds_planted_directions(at: PredictorInput) -> None:
    sample = planted()
    report = low_rank(sample, at).report
    assert report.kept > 0.94
    assert report.recall > 0.85
    assert report.predicted < 1.6 * report.active
    assert report.rank == 32


def test_low_rank_names_less_than_chance() -> None:
    sample = planted()
    report = low_rank(sample).report
    assert report.precision > 1.5 * report.active


def test_directions_are_those_of_the_values() -> None:
    sample = planted(noise=0.0)
    gate, inputs = sample.weights.deciding.values(), own_inputs(sample.ffn_input)
    centred = sample.gate - sample.gate.mean(axis=0)
    found = leading_directions(gate, inputs, 32, centred, np.random.default_rng(0))
    estimate = (inputs.centred @ found.fc1.T) @ found.lift.T
    assert np.square(estimate - centred).sum() < 1e-3 * np.square(centred).sum()


def test_hidden_values_are_centred() -> None:
    sample = planted()
    fc1 = low_rank(sample).predictor.fc1
    assert fc1 is not None
    mean = sample.ffn_input[:360].mean(axis=0)
    assert np.abs(fc1 @ mean).max() < 1e-3 * np.abs(sample.ffn_input @ fc1.T).max()


def test_orthogonal_to_nothing_changes_nothing() -> None:
    rows, ones = np.ones((4, 32), np.float32), np.ones(32, np.float32)
    assert (orthogonal_to(rows, np.zeros(32, np.float32), ones) == rows).all()


def test_the_mean_is_taken_out_where_the_input_is_steady() -> None:
    rng = np.random.default_rng(3)
    rows = rng.standard_normal((8, 64)).astype(np.float32)
    mean, variance = np.zeros(64, np.float32), np.ones(64, np.float32)
    mean[:4], variance[:4] = 1.0, 0.0  # a constant in four columns
    mean[4:] = 0.03 * rng.standard_normal(60)  # what a short text leaves in the others
    blind = orthogonal_to(rows, mean, variance)
    assert np.abs(blind @ mean).max() < 1e-4
    assert np.abs((blind - rows)[:, 4:]).max() < 0.01  # what they tell of the others stays


def test_rank_is_chosen_from_the_ladder() -> None:
    sample = planted()
    assert low_rank(sample, rank=0).report.rank in (32, 64)
    assert rank_stages(4096, 0) == [[256, 512], [1024], [2048]]
    assert rank_stages(576, 0) == [[32, 64], [128], [288]]
    assert rank_stages(64, 0) == [[32]]
    assert rank_stages(4096, 96) == [[96]]


def test_same_tokens_same_predictor() -> None:
    first, second = low_rank(planted()).predictor, low_rank(planted()).predictor
    assert (first.fc2 == second.fc2).all() and (first.threshold == second.threshold).all()


def test_reports_are_of_held_out_tokens() -> None:
    sample = planted()
    all_named = oracle(sample.weights.deciding.values())
    all_named.threshold[:] = -1e9
    settings = PredictorSettings(input=FFN, fc2_type=StorageType.Q8)
    fitted = judged(all_named, sample, settings)
    report = fitted.report
    assert (fitted.named == 1.0).all()
    assert report.predicted == report.recall == report.kept == 1.0
    active = (sample.hidden[360:] > 0).mean()
    assert report.precision == pytest.approx(active) == report.active
    assert report.multiply_adds == D_FF * D_MODEL
    assert report.num_bytes == D_FF * (D_MODEL + D_MODEL // 16 + 4)


@pytest.mark.parametrize(
    "fields",
    [{"alpha": 0.01}, {"alpha": 11.0}, {"kept": 0.0}, {"kept": 1.0}, {"rank": 33}, {"rank": -32}],
)
def test_settings_out_of_range_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="give"):
        PredictorSettings(**fields)
