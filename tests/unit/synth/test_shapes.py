"""The shapes by name, and what is wrong with others."""

import math

import pytest

from polyneuron.errors import ConfigError
from polyneuron.io.ncf_format import Layout
from polyneuron.kernels.gemv import FeedForwardKind
from polyneuron.model.spec import tensor_shapes
from polyneuron.synth.shapes import SHAPES, shape_spec
from polyneuron.synth.write import SynthSettings
from tests.support.synthetic import small_settings

# What the models' own cards and other engines count.
NUM_WEIGHTS = {
    "bamboo-7b": 7_241_732_096,
    "turbosparse-mistral-7b": 7_241_732_096,
    "mistral-7b": 7_241_732_096,
    "llama-13b": 13_015_864_320,
    "smollm2-135m": 134_515_008,
    "turbosparse-mixtral-47b": 46_907_789_312,
    "qwen3moe-30b-a3b": 30_532_122_624,
}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_have_the_models_weights(name: str) -> None:
    shapes = tensor_shapes(shape_spec(name))
    assert sum(math.prod(shape) for shape in shapes.values()) == NUM_WEIGHTS[name]


@pytest.mark.parametrize("name", SHAPES)
def test_layout_follows_the_activation(name: str) -> None:
    settings = SynthSettings(shape_spec(name))
    is_sparse = settings.spec.feed_forward is FeedForwardKind.DRELU
    has_experts = settings.spec.experts is not None
    is_in_bundles = is_sparse or has_experts
    assert settings.chosen_layout is (Layout.BUNDLES if is_in_bundles else Layout.TILES)
    assert settings.chosen_sparsity == ((0.85 if has_experts else 0.9) if is_sparse else None)


def test_changes_carry_over_to_heads() -> None:
    spec = shape_spec("bamboo-7b", d_model=256, num_heads=8, num_kv_heads=2, d_ff=512)
    assert (spec.head_dim, spec.rope.rotary_dim, spec.num_layers) == (32, 32, 32)
    assert spec.name.endswith("bamboo-7b, changed")


def test_heads_wider_than_the_model_keep_their_width() -> None:
    assert shape_spec("qwen3moe-30b-a3b", num_layers=12).head_dim == 128
    assert shape_spec("qwen3moe-30b-a3b", num_heads=16).head_dim == 128  # 2048 / 16
    assert shape_spec("qwen3moe-30b-a3b", d_model=1024).head_dim == 32


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"d_model": 100, "num_heads": 2, "num_kv_heads": 1}, "--d-model 100: give a multiple of"),
        ({"d_model": 32, "num_heads": 1, "num_kv_heads": 1}, "--d-model 32: give 64 or more"),
        ({"d_model": 96}, "--d-model 96 with --heads 32"),
        ({"d_ff": 100}, "--d-ff 100: give a multiple of 32"),
        ({"num_kv_heads": 5}, "--heads 32 cannot share --kv-heads 5"),
        ({"vocab_size": 259}, "--vocab 259: give 260 or more"),
        ({"num_layers": 0}, "--layers 0: give 1 to"),
        ({"num_heads": -1}, "--heads -1: give 1 to"),
        ({"d_ff": 1 << 30}, "--d-ff 1073741824: give 1 to"),
    ],
)
def test_impossible_shapes_are_named(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        shape_spec("bamboo-7b", **changes)


@pytest.mark.parametrize(
    ("shape", "changes", "message"),
    [
        ("bamboo-7b", {"sparsity": 0.2}, "--sparsity 0.2: give 0.3 to"),
        ("bamboo-7b", {"sparsity": 1.0}, "--sparsity 1.0: give 0.3 to"),
        ("bamboo-7b", {"sparsity": float("nan")}, "--sparsity nan"),
        ("mistral-7b", {"sparsity": 0.9}, "never exactly zero; give a shape with ReLU"),
        ("mistral-7b", {"layout": Layout.BUNDLES}, "--layout bundles: silu activations"),
        ("mistral-7b", {"is_hot_first": True}, "--hot-first: only bundles have an order"),
        ("qwen3moe-30b-a3b", {"is_hot_first": True}, "--hot-first: no neuron of .* is hotter"),
        ("qwen3moe-30b-a3b", {"sparsity": 0.9}, "never exactly zero"),
        ("turbosparse-mixtral-47b", {"layout": Layout.TILES}, "--layout tiles: experts are read"),
        ("bamboo-7b", {"is_hot_first": True, "layout": Layout.TILES}, "--hot-first: only"),
        ("bamboo-7b", {"seed": -1}, "--seed -1: give 0 to"),
        ("bamboo-7b", {"quant": "q5"}, "--quant q5: give q4, q8, f16"),
    ],
)
def test_impossible_settings_are_named(
    shape: str, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        small_settings(shape, **changes)
