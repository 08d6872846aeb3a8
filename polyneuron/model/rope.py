"""Rotary embeddings: what the file says about them, and the table of cosines and sines."""

import math

import numpy as np
from numpy.typing import NDArray

from polyneuron.io.gguf_file import read_vector
from polyneuron.io.gguf_values import quoted
from polyneuron.kernels.gemv import RopeLayout
from polyneuron.model.metadata import ModelKeys
from polyneuron.model.spec import LongRopeSpec, RopeScaling, RopeSpec, YarnSpec

ROPE_FREQS = "rope_freqs.weight"
ROPE_SHORT, ROPE_LONG = "rope_factors_short.weight", "rope_factors_long.weight"
ROPE_TENSORS = (ROPE_FREQS, ROPE_SHORT, ROPE_LONG)


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
    factors = _factors(keys, ROPE_FREQS, rotary_dim)
    if ROPE_LONG in keys.header.by_name or ROPE_SHORT in keys.header.by_name:
        return _read_long(keys, layout, rotary_dim, base)
    if kind == "yarn" and not factors:
        return _read_yarn(keys, layout, rotary_dim, base)
    if kind not in ("none", "linear"):
        keys.unsupported(
            f"{keys.architecture}.rope.scaling.type is {quoted(kind)}; supported: none linear "
            f"yarn, llama3 by a {ROPE_FREQS} tensor, and longrope by {ROPE_SHORT} and {ROPE_LONG}"
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


def _read_long(keys: ModelKeys, layout: RopeLayout, rotary_dim: int, base: float) -> RopeSpec:
    """Both tables of divisors; a type or a factor beside them would be ignored."""
    keys.refuse_unless("rope.scaling.type", "none", "longrope")
    keys.refuse_unless("rope.scaling.factor", 1.0)
    if ROPE_FREQS in keys.header.by_name:
        keys.unsupported(f"{ROPE_FREQS} together with {ROPE_LONG}")
    short, long = (_factors(keys, name, rotary_dim) for name in (ROPE_SHORT, ROPE_LONG))
    if not short or not long:
        keys.fail(f"tensors missing: {ROPE_LONG if short else ROPE_SHORT}")
    spec = LongRopeSpec(
        original_context=keys.count("rope.scaling.original_context_length"),
        short_factors=short,
        long_factors=long,
        magnitude=keys.number("rope.scaling.attn_factor", 1.0),
    )
    return RopeSpec(layout, rotary_dim, base, RopeScaling.LONGROPE, long=spec)


def _factors(keys: ModelKeys, name: str, rotary_dim: int) -> tuple[float, ...]:
    """The divisors of frequencies that a tensor holds; none where it is not there."""
    tensor = keys.header.by_name.get(name)
    if tensor is None:
        return ()
    values = read_vector(keys.header, tensor)
    if values.shape != (rotary_dim // 2,):
        keys.fail(f"tensor {name} has shape {tensor.shape}; ({rotary_dim // 2},) is expected")
    if not (np.isfinite(values).all() and (values > 0).all()):
        keys.fail(f"tensor {name} holds values that are not positive numbers")
    return tuple(float(value) for value in values)


def rope_frequencies(spec: RopeSpec, num_positions: int = 0) -> tuple[NDArray[np.float64], float]:
    """Radians per position of each pair (rotary_dim / 2), and the factor on cosine and sine.

    `num_positions` of the context choose between LongRoPE's divisors.
    """
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
        case RopeScaling.LONGROPE:
            assert spec.long is not None
            is_long = num_positions > spec.long.original_context
            factors = spec.long.long_factors if is_long else spec.long.short_factors
            return frequencies / np.array(factors, dtype=np.float64), spec.long.magnitude


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
    frequencies, magnitude = rope_frequencies(spec, num_positions)
    angles = np.arange(num_positions, dtype=np.float64)[:, None] * frequencies
    cos, sin = np.cos(angles) * magnitude, np.sin(angles) * magnitude
    return cos.astype(np.float32), sin.astype(np.float32)


def rope_rows(spec: RopeSpec, num_positions: int) -> NDArray[np.float32]:
    """Each position's cosines, then its sines (num_positions, rotary_dim), as kernels read them."""
    return np.hstack(rope_table(spec, num_positions))
