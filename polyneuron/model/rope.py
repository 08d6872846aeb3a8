"""Rotary embeddings: what the file says about them, and the table of cosines and sines."""

import math

import numpy as np
from numpy.typing import NDArray

from polyneuron.io.gguf_file import read_vector
from polyneuron.io.gguf_values import quoted
from polyneuron.kernels.gemv import RopeLayout
from polyneuron.model.metadata import ModelKeys
from polyneuron.model.spec import RopeScaling, RopeSpec, YarnSpec

ROPE_FREQS = "rope_freqs.weight"


def read_rope(keys: ModelKeys, layout: RopeLayout, head_dim: int) -> RopeSpec:
    """The rotary embedding that the file's keys, and its rope_freqs tensor, describe."""
    rotary_dim = keys.count("rope.dimension_count", head_dim)
    base = keys.number("rope.freq_base", 10000.0)
    if rotary_dim % 2 or rotary_dim > head_dim:
        keys.fail(
            f"{keys.architecture}.rope.dimension_count is {rotary_dim}; an even number up to the "
            f"head size {head_dim} is expected"
        )
    kind = keys.text("rope.scaling.type") or "linear"  # a bare factor means linear
    factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 1.0))
    factors = _frequency_factors(keys, rotary_dim)
    if kind == "yarn" and not factors:
        return _read_yarn(keys, layout, rotary_dim, base)
    if kind not in ("none", "linear"):
        keys.unsupported(
            f"{keys.architecture}.rope.scaling.type is {quoted(kind)}; supported: none linear "
            f"yarn, and llama3 by a {ROPE_FREQS} tensor"
        )
    is_stretched = kind == "linear" and factor != 1.0
    if factors and is_stretched:
        keys.unsupported(f"{ROPE_FREQS} together with {keys.architecture}.rope.scaling.factor")
    if factors:
        return RopeSpec(layout, rotary_dim, base, RopeScaling.LLAMA3, frequency_factors=factors)
    if is_stretched:
        return RopeSpec(layout, rotary_dim, base, RopeScaling.LINEAR, factor)
    return RopeSpec(layout, rotary_dim, base)


def _read_yarn(keys: ModelKeys, layout: RopeLayout, rotary_dim: int, base: float) -> RopeSpec:
    keys.refuse_unless("rope.scaling.attn_factor", 1.0)
    keys.refuse_unless("rope.scaling.yarn_attn_factor", 1.0)
    keys.refuse_unless("rope.scaling.yarn_ext_factor", 1.0, -1.0)
    keys.refuse_unless("rope.scaling.yarn_log_multiplier", 0.0)
    if base <= 1.0:
        keys.fail(f"{keys.architecture}.rope.freq_base is {base}; more than 1 is expected for yarn")
    yarn = YarnSpec(
        original_context=keys.count("rope.scaling.original_context_length"),
        beta_fast=keys.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=keys.number("rope.scaling.yarn_beta_slow", 1.0),
    )
    factor = keys.number("rope.scaling.factor")
    return RopeSpec(layout, rotary_dim, base, RopeScaling.YARN, factor, yarn=yarn)


def _frequency_factors(keys: ModelKeys, rotary_dim: int) -> tuple[float, ...]:
    tensor = keys.header.by_name.get(ROPE_FREQS)
    if tensor is None:
        return ()
    values = read_vector(keys.header, tensor)
    if values.shape != (rotary_dim // 2,):
        keys.fail(f"tensor {ROPE_FREQS} has shape {tensor.shape}; ({rotary_dim // 2},) is expected")
    if not (np.isfinite(values).all() and (values > 0).all()):
        keys.fail(f"tensor {ROPE_FREQS} holds values that are not positive numbers")
    return tuple(float(value) for value in values)


def rope_frequencies(spec: RopeSpec) -> tuple[NDArray[np.float64], float]:
    """Radians per position of each pair (rotary_dim / 2), and the factor on cosine and sine."""
    exponents = np.arange(0, spec.rotary_dim, 2, dtype=np.float64) / spec.rotary_dim
    frequencies = spec.base**-exponents
    match spec.scaling:
        case RopeScaling.NONE:
            return frequencies, 1.0
        case RopeScaling.LINEAR:
            return frequencies / spec.factor, 1.0
        case RopeScaling.LLAMA3:
            return frequencies / np.array(spec.frequency_factors, dtype=np.float64), 1.0
        case RopeScaling.YARN:
            kept = _yarn_kept_share(spec)
            scaled = frequencies / spec.factor * (1.0 - kept) + frequencies * kept
            return scaled, 1.0 + 0.1 * math.log(spec.factor) if spec.factor > 1.0 else 1.0


def _yarn_kept_share(spec: RopeSpec) -> NDArray[np.float64]:
    """Per pair: 1 where the frequency stays as trained, 0 where it is divided by the factor."""
    assert spec.yarn is not None

    def pair_turning(num_turns: float) -> float:
        """Index of the pair that turns `num_turns` times over the original context."""
        assert spec.yarn is not None
        ratio = spec.yarn.original_context / (num_turns * 2.0 * math.pi)
        return spec.rotary_dim * math.log(ratio) / (2.0 * math.log(spec.base))

    low = max(0.0, math.floor(pair_turning(spec.yarn.beta_fast)))
    high = min(spec.rotary_dim - 1.0, math.ceil(pair_turning(spec.yarn.beta_slow)))
    pairs = np.arange(spec.rotary_dim // 2, dtype=np.float64)
    ramp = np.clip((pairs - low) / max(high - low, 0.001), 0.0, 1.0)
    return 1.0 - ramp


def rope_table(
    spec: RopeSpec, num_positions: int
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Cosines and sines (num_positions, rotary_dim / 2), computed in float64."""
    frequencies, magnitude = rope_frequencies(spec)
    angles = np.arange(num_positions, dtype=np.float64)[:, None] * frequencies
    cos, sin = np.cos(angles) * magnitude, np.sin(angles) * magnitude
    return cos.astype(np.float32), sin.astype(np.float32)


def rope_rows(spec: RopeSpec, num_positions: int) -> NDArray[np.float32]:
    """Each position's cosines, then its sines (num_positions, rotary_dim), as kernels read them."""
    return np.hstack(rope_table(spec, num_positions))
