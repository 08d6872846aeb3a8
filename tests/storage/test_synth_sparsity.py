"""What docs/SYNTH.md says of planted sparsity, measured by the plain forward pass on the twin."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from polyneuron.io.gguf_file import read_header
from polyneuron.model.tokenizer import Tokenizer
from polyneuron.synth.rates import UP_SHARE
from polyneuron.synth.weights import WeightSource
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

Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Activity:
    """Which neurons were active in one layer: (tokens, d_ff)."""

    active: Bools
    gate_positive: Bools

    @property
    def rates(self) -> NDArray[np.float64]:
        """Of each neuron, hottest first."""
        return np.sort(self.active.mean(axis=0))[::-1]

    def carried_by(self, share: float) -> float:
        """The part of all activations that the hottest neurons carry."""
        rates = self.rates
        return float(rates[: int(share * len(rates))].sum() / rates.sum())

    def overlap(self, distance: int) -> float:
        """The part of a token's active neurons that was active so many tokens before."""
        both = self.active[distance:] & self.active[:-distance]
        return float(both.sum() / self.active[distance:].sum())


class RecordingModel(ReferenceModel):
    """Keeps which neurons were active."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, np.float32)
        self.seen: dict[int, Activity] = {}

    def gate_and_up(self, layer_id: int, x: NDArray[Any]) -> Any:
        """The base's, recorded."""
        gate, up = super().gate_and_up(layer_id, x)
        assert gate is not None
        self.seen[layer_id] = Activity((gate > 0) & (up > 0), gate > 0)
        return gate, up


def activity_of(path: Path, tokens: NDArray[np.integer[Any]]) -> list[Activity]:
    model = RecordingModel(path)
    model.logits(tokens)
    return [model.seen[layer_id] for layer_id in range(model.spec.num_layers)]


def random_tokens(seed: int = 0) -> NDArray[np.int64]:
    return np.random.default_rng(seed).integers(3, SHAPE["vocab_size"], NUM_TOKENS)


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sparsity")
    write_synth(folder, small_settings(**SHAPE))
    return folder / "synth.gguf"


@pytest.fixture(scope="module")
def whole(twin: Path) -> list[Activity]:
    return activity_of(twin, random_tokens())


@pytest.fixture(scope="module")
def layers(whole: list[Activity]) -> list[Activity]:
    """Without the first tokens."""
    return [Activity(a.active[NUM_FIRST:], a.gate_positive[NUM_FIRST:]) for a in whole]


def test_a_tenth_is_active_in_every_layer(layers: list[Activity]) -> None:
    for layer in layers:
        assert 0.095 < layer.active.mean() < 0.11


def test_no_token_departs_far(layers: list[Activity]) -> None:
    for layer in layers:
        by_token = layer.active.mean(axis=1)
        assert by_token.min() > 0.07 and by_token.max() < 0.13


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
        assert found == pytest.approx(1 - sparsity, rel=0.15)


@pytest.mark.parametrize("quant", ["q8", "f16"])
def test_other_types_are_as_sparse(quant: str, tmp_path: Path) -> None:
    write_synth(tmp_path, small_settings(**SHAPE, quant=quant))
    for layer in activity_of(tmp_path / "synth.gguf", random_tokens()):
        assert 0.09 < layer.active[NUM_FIRST:].mean() < 0.115
