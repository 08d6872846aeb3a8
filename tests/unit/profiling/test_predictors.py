"""Predictors of planted layers."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from polyneuron.errors import ConfigError, UnsupportedError
from polyneuron.io.predictor_file import PredictorInput
from polyneuron.kernels.quant import StorageType
from polyneuron.profiling.calibration import LayerSample
from polyneuron.profiling.low_rank import leading_directions, own_inputs
from polyneuron.profiling.low_rank_fit import fit_low_rank, orthogonal_to, rank_stages
from polyneuron.profiling.other_predictors import fit_sign, imported, oracle, sign_rows
from polyneuron.profiling.predictors import (
    Fitted,
    PredictorSettings,
    evaluate,
    scores,
    storage_types,
)

D_MODEL, D_FF, NUM_TOKENS, RANK = 128, 256, 480, 24
ATTENTION, FFN = PredictorInput.ATTENTION, PredictorInput.FFN


def planted(seed: int = 0, noise: float = 0.05) -> LayerSample:
    """A dReLU-like layer whose inputs vary in few directions around a mean that is not zero."""
    rng = np.random.default_rng(seed)
    latent = rng.standard_normal((NUM_TOKENS, RANK))
    mixing = rng.standard_normal((RANK, D_MODEL)) / np.sqrt(RANK)
    mean = 0.5 * rng.standard_normal(D_MODEL)
    ffn = latent @ mixing + mean + noise * rng.standard_normal((NUM_TOKENS, D_MODEL))
    stretch = rng.uniform(0.5, 2.0, D_MODEL)
    attention = ffn / stretch + noise * rng.standard_normal(ffn.shape)
    gate_rows = rng.standard_normal((D_FF, D_MODEL)) / np.sqrt(D_MODEL)
    gate = ffn @ gate_rows.T - np.linspace(0.0, 1.2, D_FF)
    up = np.abs(rng.standard_normal(gate.shape))
    matrix = SimpleNamespace(values=lambda: gate_rows.astype(np.float32))
    down = np.ones(D_FF, np.float32)
    weights: Any = SimpleNamespace(deciding=matrix, down_norm=down, neuron_bytes=2048)
    arrays = [a.astype(np.float32) for a in (attention, ffn, gate, np.maximum(gate, 0) * up)]
    return LayerSample(0, arrays[0], arrays[1], arrays[2], arrays[3], (0,), weights)


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


@pytest.mark.parametrize("at", [FFN, ATTENTION])
def test_signs_keep_what_was_asked(at: PredictorInput) -> None:
    fc1_type, fc2_type = storage_types("sign")
    settings = PredictorSettings("sign", at, 0.95, 0, fc1_type, fc2_type)
    fitted = fit_sign(planted(), settings)
    assert fitted.predictor.fc1 is None
    assert fitted.report.kept > 0.9
    assert fitted.report.predicted < 0.9


def test_sign_rows_keep_signs_and_size() -> None:
    gate = np.random.default_rng(0).standard_normal((3, 64)).astype(np.float32)
    rows = sign_rows(gate)
    assert (np.sign(rows) == np.sign(gate)).all()
    assert np.allclose(np.abs(rows[:, :32]), np.abs(gate[:, :32]).mean(axis=1, keepdims=True))


def test_oracle_names_open_gates() -> None:
    sample = planted()
    settings = PredictorSettings("oracle", FFN, fc2_type=StorageType.F32)
    gate = sample.weights.deciding.values()
    found = oracle(gate)
    x = np.ascontiguousarray(sample.ffn_input)
    assert ((scores(None, gate, x, settings) > found.threshold) == (x @ gate.T > 0)).mean() > 0.9999


class TestImported:
    def test_names_the_same_neurons_behind_the_norm(self) -> None:
        rng = np.random.default_rng(3)
        fc1, fc2 = rng.standard_normal((32, D_MODEL)), rng.standard_normal((D_FF, 32))
        norm = rng.uniform(0.5, 2.0, D_MODEL)
        stream = 7.0 * rng.standard_normal((50, D_MODEL))
        normed = stream / np.sqrt(np.mean(np.square(stream), axis=1, keepdims=True)) * norm
        found = imported(fc1, fc2, norm)
        assert found.fc1 is not None
        original = np.maximum(stream @ fc1.T, 0) @ fc2.T > 0
        ours = np.maximum(normed @ found.fc1.T, 0) @ found.fc2.T > found.threshold
        assert (original == ours).all()

    @pytest.mark.parametrize(("threshold", "weight"), [(0.5, 1.0), (0.0, 0.0)])
    def test_what_is_not_the_same_is_refused(self, threshold: float, weight: float) -> None:
        ones = np.ones((32, 32), np.float32)
        with pytest.raises(UnsupportedError, match="fit predictors with polyneuron profile"):
            imported(ones, ones, np.full(32, weight, np.float32), threshold)


def test_evaluation_counts_held_out_tokens() -> None:
    sample = planted()
    all_named = oracle(sample.weights.deciding.values())
    all_named.threshold[:] = -1e9
    report = evaluate(all_named, sample, PredictorSettings(input=FFN, fc2_type=StorageType.Q8))
    assert report.predicted == report.recall == report.kept == 1.0
    active = (sample.hidden[360:] > 0).mean()
    assert report.precision == pytest.approx(active) == report.active
    assert report.multiply_adds == D_FF * D_MODEL
    assert report.num_bytes == D_FF * (D_MODEL + D_MODEL // 16 + 4)


@pytest.mark.parametrize("fields", [{"kept": 0.0}, {"kept": 1.0}, {"rank": 33}, {"rank": -32}])
def test_settings_out_of_range_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="give"):
        PredictorSettings(**fields)
