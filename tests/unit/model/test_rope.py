"""The table of rotations: values, shapes, scalings."""

import numpy as np
import pytest

from polyneuron.kernels.gemv import RopeLayout
from polyneuron.model.rope import rope_frequencies, rope_table
from polyneuron.model.spec import LongRopeSpec, RopeScaling, RopeSpec, YarnSpec

PLAIN = RopeSpec(RopeLayout.HALVES, 8, 10000.0)


def test_table_is_float32_of_float64() -> None:
    cos, sin = rope_table(PLAIN, 100_000)
    angle = 99_999.0 * 10000.0 ** (-2 / 8)
    assert cos.dtype == sin.dtype == np.float32
    assert cos.shape == sin.shape == (100_000, 4)
    assert cos[-1, 1] == np.float32(np.cos(angle))
    assert sin[-1, 1] == np.float32(np.sin(angle))


def test_linear_scaling_stretches_positions() -> None:
    stretched = RopeSpec(RopeLayout.HALVES, 8, 10000.0, RopeScaling.LINEAR, 4.0)
    assert (rope_table(stretched, 9)[0][8] == rope_table(PLAIN, 3)[0][2]).all()


def test_llama3_scaling_divides_frequencies() -> None:
    factors = (1.0, 2.0, 4.0, 8.0)
    spec = RopeSpec(RopeLayout.HALVES, 8, 10000.0, RopeScaling.LLAMA3, frequency_factors=factors)
    ratio = rope_frequencies(PLAIN)[0] / rope_frequencies(spec)[0]
    assert ratio == pytest.approx(factors)


def test_longrope_is_chosen_by_the_context() -> None:
    long = LongRopeSpec(32, (1.0, 2.0, 3.0, 4.0), (5.0, 6.0, 7.0, 8.0), 1.5)
    spec = RopeSpec(RopeLayout.HALVES, 8, 10000.0, RopeScaling.LONGROPE, long=long)
    for num_positions, factors in ((32, long.short_factors), (33, long.long_factors)):
        frequencies, magnitude = rope_frequencies(spec, num_positions)
        assert rope_frequencies(PLAIN)[0] / frequencies == pytest.approx(factors)
        assert rope_table(spec, num_positions)[0][0] == pytest.approx([1.5] * 4)
        assert magnitude == 1.5


def test_yarn_keeps_fast_and_divides_slow_pairs() -> None:
    yarn = YarnSpec(original_context=32768)
    spec = RopeSpec(RopeLayout.HALVES, 128, 1e6, RopeScaling.YARN, 4.0, yarn=yarn)
    plain = RopeSpec(RopeLayout.HALVES, 128, 1e6)
    scaled, magnitude = rope_frequencies(spec)
    ratio = rope_frequencies(plain)[0] / scaled
    assert ratio[0] == pytest.approx(1.0)
    assert ratio[-1] == pytest.approx(4.0)
    assert (np.diff(ratio) >= -1e-12).all()
    assert magnitude == pytest.approx(1.0 + 0.1 * np.log(4.0))


def test_yarn_equals_transformers_live() -> None:
    """Qwen2.5's published setting, where some pairs lie between the two bounds."""
    pytest.importorskip("torch", reason="extra `reference` is not installed")
    pytest.importorskip("transformers", reason="extra `reference` is not installed")
    from transformers import Qwen2Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}
    parameters["original_max_position_embeddings"] = 32768
    config = Qwen2Config(
        hidden_size=512,
        num_attention_heads=4,
        max_position_embeddings=131072,
        rope_parameters=parameters,
    )
    expected, magnitude = ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")
    yarn = YarnSpec(original_context=32768)
    spec = RopeSpec(RopeLayout.HALVES, 128, 1e6, RopeScaling.YARN, 4.0, yarn=yarn)
    frequencies, own_magnitude = rope_frequencies(spec)
    np.testing.assert_allclose(frequencies, expected.numpy(), rtol=1e-5)
    assert own_magnitude == pytest.approx(magnitude)
