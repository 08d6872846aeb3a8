"""What docs/SYNTH.md says of planted sparsity, measured by the plain forward pass on the twin."""

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from polyneuron.io.gguf_file import read_header
from polyneuron.kernels.quant import BLOCK_COLS
from polyneuron.model.tokenizer import Tokenizer
from polyneuron.synth.planting import ATTENTION_VARIANCE, FEED_FORWARD_VARIANCE
from polyneuron.synth.rates import UP_SHARE
from polyneuron.synth.spectrum import block_variances
from polyneuron.synth.weights import WeightSource
from tests.support.activity import (
    Activity,
    LayerRecord,
    RecordingModel,
    activity_of,
    block_covariance,
    fit_gates,
    judge,
)
from tests.support.reference_model import ReferenceModel
from tests.support.synthetic import small_settings, write_synth

TEXT = Path(__file__).resolve().parents[1] / "data" / "text" / "genesis_1_12.txt"
SHAPE = {
    "num_layers": 4, "d_model": 384, "d_ff": 1024, "num_heads": 6, "num_kv_heads": 2,
    "vocab_size": 1024,
}  # fmt: skip
NUM_TOKENS = 400
NUM_FIRST = 16
"""Tokens before attention has a whole window; they are looked at apart."""


def random_tokens(seed: int = 0) -> NDArray[np.int64]:
    return np.random.default_rng(seed).integers(3, SHAPE["vocab_size"], NUM_TOKENS)


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sparsity")
    write_synth(folder, small_settings(**SHAPE))
    return folder / "synth.gguf"


@pytest.fixture(scope="module")
def records(twin: Path) -> list[LayerRecord]:
    model = RecordingModel(twin)
    model.logits(random_tokens())
    return model.seen


@pytest.fixture(scope="module")
def whole(records: list[LayerRecord]) -> list[Activity]:
    return [record.activity[0] for record in records]


@pytest.fixture(scope="module")
def layers(whole: list[Activity]) -> list[Activity]:
    """Without the first tokens."""
    return [activity.after(NUM_FIRST) for activity in whole]


def test_a_tenth_is_active_in_every_layer(layers: list[Activity]) -> None:
    for layer in layers:
        assert 0.095 < layer.active.mean() < 0.11


def test_no_token_departs_far(layers: list[Activity]) -> None:
    for layer in layers:
        by_token = layer.active.mean(axis=1)
        assert by_token.min() > 0.06 and by_token.max() < 0.15


def test_first_tokens_are_near_that(whole: list[Activity]) -> None:
    for layer in whole:
        assert 0.07 < layer.active[:NUM_FIRST].mean() < 0.14


def test_up_is_positive_with_gate(layers: list[Activity]) -> None:
    for layer in layers:
        share = layer.active.sum() / layer.gate_positive.sum()
        assert share == pytest.approx(UP_SHARE, abs=0.03)


def test_hot_neurons_carry_most(layers: list[Activity]) -> None:
    for layer in layers:
        assert 0.70 < layer.carried_by(0.2) < 0.80
        assert 0.90 < layer.carried_by(0.5) < 0.96


def test_consecutive_tokens_share_neurons(layers: list[Activity]) -> None:
    for layer in layers:
        assert 0.38 < layer.overlap(1) < 0.55


def test_near_tokens_share_more_than_distant_ones(layers: list[Activity]) -> None:
    """A little in the first layer, more in the last, as in a real dReLU model."""
    gains = [layer.overlap(1) - layer.overlap(64) for layer in layers]
    assert gains[-1] > gains[0]
    assert 0.01 < gains[-1] < 0.10


def test_hot_neurons_are_those_the_file_names(twin: Path, layers: list[Activity]) -> None:
    """The order that --hot-first writes is the order of measured rates."""
    settings = small_settings(**SHAPE)
    source = WeightSource(settings.spec, settings.quant, settings.chosen_sparsity, settings.seed)
    assert source.planting is not None
    for layer_id, layer in enumerate(layers):
        rates = layer.active.mean(axis=0)[source.planting.hottest_first(layer_id)]
        fifth = len(rates) // 5
        assert rates[:fifth].sum() / rates.sum() > 0.65
        assert rates[:fifth].mean() > 4 * rates[fifth:].mean()


def test_layers_differ_in_their_hot_neurons(layers: list[Activity]) -> None:
    hot = [set(np.argsort(-layer.active.mean(axis=0))[:100].tolist()) for layer in layers]
    assert len(hot[0] & hot[1]) < 30  # 10 of 100 by chance


def test_stream_has_the_spectrum(records: list[LayerRecord]) -> None:
    """And the variance that thresholds suppose, in units of the constant."""
    spectrum = block_variances(SHAPE["d_model"] // BLOCK_COLS - 1)
    for layer_id, record in enumerate(records):
        inputs = record.inputs[0][NUM_FIRST:]
        constant = inputs[:, :BLOCK_COLS]
        assert np.ptp(constant, axis=1) == pytest.approx(0.0)
        stream = inputs / constant[:, :1]
        squares = np.square(stream).mean(axis=0).reshape(-1, BLOCK_COLS).mean(axis=1)[1:]
        num_layers = len(records)
        expected = 1 + (ATTENTION_VARIANCE * (layer_id + 1)) / num_layers
        expected += FEED_FORWARD_VARIANCE * layer_id / num_layers
        assert squares.mean() == pytest.approx(expected, rel=0.2)
        assert squares / squares.mean() == pytest.approx(spectrum, rel=0.25)


def test_a_quarter_of_the_rank_predicts_gates(twin: Path, records: list[LayerRecord]) -> None:
    """By predictors that know no more of the inputs than how much each block of columns varies."""
    model = ReferenceModel(twin, np.float32)
    for layer_id, record in enumerate(records):
        inputs = record.inputs[0][NUM_FIRST:]
        mean, covariance = inputs.mean(axis=0), block_covariance(inputs)
        weights = model.weights[f"blk.{layer_id}.ffn_gate.weight"]
        fit, gates, means = fit_gates(weights, covariance), inputs @ weights.T, weights @ mean
        found = {
            part: judge(fit.predict(inputs - mean, SHAPE["d_model"] // part) + means, gates, means)
            for part in (8, 4, 1)
        }
        assert 0.87 < found[8].variance_share < 0.94
        assert 0.955 < found[4].variance_share < 0.985
        assert found[1].variance_share > 0.9999
        assert found[4].recall > 0.9 and found[4].precision > 0.9


def test_text_is_as_sparse(twin: Path) -> None:
    tokenizer = Tokenizer.from_metadata(read_header(twin).metadata)
    tokens = np.array(tokenizer.encode(TEXT.read_text()[:600]))
    for layer in activity_of(twin, tokens):
        assert 0.07 < layer.active[NUM_FIRST:].mean() < 0.13


@pytest.mark.parametrize("sparsity", [0.5, 0.8, 0.97])
def test_other_sparsities_hold(sparsity: float, tmp_path: Path) -> None:
    write_synth(tmp_path, small_settings(**SHAPE, sparsity=sparsity))
    for layer in activity_of(tmp_path / "synth.gguf", random_tokens()):
        found = layer.active[NUM_FIRST:].mean()
        assert found == pytest.approx(1 - sparsity, rel=0.2)


@pytest.mark.parametrize("quant", ["q8", "f16"])
def test_other_types_are_as_sparse(quant: str, tmp_path: Path) -> None:
    write_synth(tmp_path, small_settings(**SHAPE, quant=quant))
    for layer in activity_of(tmp_path / "synth.gguf", random_tokens()):
        assert 0.09 < layer.active[NUM_FIRST:].mean() < 0.115
