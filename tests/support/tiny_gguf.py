"""Tiny GGUF files of every family with random weights; the same arguments give the same bytes."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from gguf import (
    ExpertGatingFuncType,
    GGMLQuantizationType,
    GGUFWriter,
    RopeScalingType,
)
from numpy.typing import NDArray

from polyneuron.model.architecture import ACTIVATIONS, FAMILIES, Family, Presence
from polyneuron.model.block import BlockSpec, NormKind, Residual
from polyneuron.model.rope import ROPE_LONG, ROPE_SHORT
from polyneuron.model.spec import (
    ExpertSpec,
    LongRopeSpec,
    ModelSpec,
    RopeScaling,
    RopeSpec,
    YarnSpec,
    tensor_shapes,
)
from tests.support.random_blocks import encode
from tests.support.tiny_tokenizer import TinyVocabulary, bpe_vocabulary

F32 = NDArray[np.float32]
_QKV = {"attn_qkv": ("attn_q", "attn_k", "attn_v")}
FUSED = {"phi3": _QKV | {"ffn_up": ("ffn_gate", "ffn_up")}, "falcon": _QKV}
"""Family -> fused matrix -> its parts."""


@dataclass(frozen=True, slots=True)
class TinyModel:
    """What to build; every field has a default, so that a test states only what it is about."""

    family: str = "llama"
    num_layers: int = 2
    d_model: int = 64
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    d_ff: int = 96
    context_length: int = 256
    tied_head: bool = True
    qkv_bias: bool | None = None
    """None: as the family has it."""
    output_bias: bool = False
    activation: str | None = None
    """Value of `<family>.feed_forward_activation`; None leaves the family's own."""
    num_experts: int | None = None
    """0: no mixture of experts; else `d_ff` is the width of one. None: as the family has it."""
    num_used: int = 2
    shared_d_ff: int = 0
    is_sigmoid: bool = False
    """Of routers that stand before attention."""
    has_gate: bool = True
    """Without a gate matrix `activation` must be "relu"."""
    rope_scaling: RopeScaling = RopeScaling.NONE
    original_context: int = 32
    """Of LongRoPE."""
    rope_base: float = 10000.0
    rotary_dim: int | None = None
    window: int = 12
    """Of local layers, in families that have them."""
    residual: Residual | None = None
    """None: the family's own."""
    attention_cap: float = 0.0
    logit_cap: float = 0.0
    """0: no cap, whatever the family's files have by default."""
    tensor_type: str = "F32"
    """Of the matrices in the layers; vectors are F32 always."""
    embedding_type: str | None = None
    """Of the embedding and the head; None: the same."""
    vocabulary: TinyVocabulary = field(default_factory=bpe_vocabulary)
    seed: int = 0

    def spec(self) -> ModelSpec:
        """The description that reading the written file must give."""
        family = FAMILIES[self.family]
        feed_forward = family.feed_forward
        if self.activation is not None:
            feed_forward = ACTIVATIONS[self.activation, self.has_gate]
        bias = self.qkv_bias if self.qkv_bias is not None else family.qkv_bias is Presence.REQUIRED
        return ModelSpec(
            family=self.family,
            name="tiny",
            num_layers=self.num_layers,
            d_model=self.d_model,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            d_ff=self.d_ff,
            vocab_size=len(self.vocabulary.tokens),
            context_length=self.context_length,
            norm_eps=float(np.float32(1e-5)),
            rope=self._rope(),
            feed_forward=feed_forward,
            qk_norm=family.qk_norm,
            is_qk_norm_wide=family.is_qk_norm_wide,
            experts=self._experts(family),
            qkv_bias=bias,
            output_bias=self.output_bias,
            tied_head=self.tied_head,
            block=self._block(family),
        )

    def _block(self, family: Family) -> BlockSpec:
        has_window = family.window is not Presence.ABSENT
        scale = math.sqrt(self.d_model) if family.is_embedding_scaled else 0.0
        positions = self.context_length + family.block.position_offset
        return replace(
            family.block,
            residual=self.residual or family.block.residual,
            learned_positions=0 if family.has_rope else positions,
            window=self.window if has_window else 0,
            attention_cap=float(np.float32(self.attention_cap)),
            logit_cap=float(np.float32(self.logit_cap)),
            embedding_scale=scale,
        )

    def _experts(self, family: Family) -> ExpertSpec | None:
        is_mixture = family.experts is Presence.REQUIRED
        num_experts = 4 * is_mixture if self.num_experts is None else self.num_experts
        if not num_experts:
            return None
        sizes = (num_experts, self.num_used)
        kinds = (self.is_sigmoid, family.is_router_early)
        return ExpertSpec(*sizes, family.is_normalised, self.shared_d_ff, *kinds)

    def _rope(self) -> RopeSpec:
        if not FAMILIES[self.family].has_rope:
            return RopeSpec(FAMILIES[self.family].rope_layout, 0, 10000.0)
        rotary_dim = self.rotary_dim or self.head_dim
        stretched = self.rope_scaling in (RopeScaling.LINEAR, RopeScaling.YARN)
        return RopeSpec(
            layout=FAMILIES[self.family].rope_layout,
            rotary_dim=rotary_dim,
            base=self.rope_base,
            scaling=self.rope_scaling,
            factor=4.0 if stretched else 1.0,
            frequency_factors=llama3_factors(rotary_dim, self.rope_base)
            if self.rope_scaling is RopeScaling.LLAMA3
            else (),
            yarn=YarnSpec(64) if self.rope_scaling is RopeScaling.YARN else None,
            long=long_rope(rotary_dim, self.original_context)
            if self.rope_scaling is RopeScaling.LONGROPE
            else None,
        )


def long_rope(rotary_dim: int, original_context: int) -> LongRopeSpec:
    """Divisors that tell short from long contexts, and a magnitude."""
    pairs = rotary_dim // 2
    return LongRopeSpec(
        original_context=original_context,
        short_factors=tuple(1.0 + 0.25 * pair for pair in range(pairs)),
        long_factors=tuple(2.0 + 0.5 * pair for pair in range(pairs)),
        magnitude=1.125,
    )


def llama3_factors(rotary_dim: int, base: float) -> tuple[float, ...]:
    """Frequency divisors as Llama 3.1's converter writes them: factor 8, original context 64."""
    factor, low, high, original = 8.0, 1.0, 4.0, 64
    factors = []
    for pair in range(rotary_dim // 2):
        wavelength = 2.0 * math.pi * base ** (2.0 * pair / rotary_dim)
        if wavelength < original / high:
            factors.append(1.0)
        elif wavelength > original / low:
            factors.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            factors.append(1.0 / ((1.0 - smooth) / factor + smooth))
    return tuple(float(np.float32(value)) for value in factors)


def random_weights(model: TinyModel) -> dict[str, F32]:
    """GGUF tensor name -> float32 weights of the row-major shape, in the order of the file."""
    rng = np.random.default_rng(model.seed)
    weights: dict[str, F32] = {}
    for name, shape in tensor_shapes(model.spec()).items():
        values = rng.standard_normal(shape)
        if "norm" in name and name.endswith(".weight"):
            values = 1.0 + 0.1 * values
        elif name.endswith(".bias"):
            values = 0.3 * values
        elif not name.startswith(("token_embd", "output")):
            values = values * 1.5 / math.sqrt(shape[-1])
        weights[name] = values.astype(np.float32)
    return weights


def write_tiny_gguf(
    path: Path,
    model: TinyModel | None = None,
    *,
    weights: Mapping[str, F32] | None = None,
    metadata: Mapping[str, Any] | None = None,
    skip_tensors: tuple[str, ...] = (),
) -> Path:
    """Write the model; `metadata` adds int, float, bool and str keys; None drops one."""
    model = model or TinyModel()
    writer = GGUFWriter(path, model.family)
    _add_keys(writer, model)
    model.vocabulary.write(writer)
    for key, value in (metadata or {}).items():
        _override(writer, key, value)
    chosen = random_weights(model) if weights is None else weights
    kept = {name: values for name, values in chosen.items() if name not in skip_tensors}
    for name, values in _fused(model, kept).items():
        _add_tensor(writer, model, name, values)
    factors = model.spec().rope.frequency_factors
    if factors:
        writer.add_tensor("rope_freqs.weight", np.array(factors, dtype=np.float32))
    if long := model.spec().rope.long:
        writer.add_tensor(ROPE_SHORT, np.array(long.short_factors, dtype=np.float32))
        writer.add_tensor(ROPE_LONG, np.array(long.long_factors, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _fused(model: TinyModel, weights: Mapping[str, F32]) -> dict[str, F32]:
    """As files of the family have them: some matrices one after another in one tensor."""
    found = dict(weights)
    for fused, parts in FUSED.get(model.family, {}).items():
        for layer in range(model.num_layers):
            names = [f"blk.{layer}.{part}.weight" for part in parts]
            if all(name in found for name in names):
                pieces = [found.pop(name) for name in names]
                found[f"blk.{layer}.{fused}.weight"] = np.concatenate(pieces)
    return found


def _add_keys(writer: GGUFWriter, model: TinyModel) -> None:
    writer.add_name("tiny")
    writer.add_context_length(model.context_length)
    writer.add_embedding_length(model.d_model)
    writer.add_block_count(model.num_layers)
    writer.add_feed_forward_length(model.d_ff)
    writer.add_head_count(model.num_heads)
    writer.add_head_count_kv(model.num_kv_heads)
    _add_block_keys(writer, model)
    writer.add_key_length(model.head_dim)
    writer.add_value_length(model.head_dim)
    writer.add_rope_freq_base(model.rope_base)
    writer.add_vocab_size(len(model.vocabulary.tokens))
    if experts := model.spec().experts:
        writer.add_expert_count(experts.num_experts)
        writer.add_expert_used_count(experts.num_used)
        writer.add_expert_feed_forward_length(model.d_ff)
    if model.is_sigmoid:
        writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)
    if model.shared_d_ff:
        writer.add_expert_shared_feed_forward_length(model.shared_d_ff)
    if model.rotary_dim is not None:
        writer.add_rope_dimension_count(model.rotary_dim)
    if model.activation is not None:
        writer.add_string(f"{model.family}.feed_forward_activation", model.activation)
    if model.rope_scaling in (RopeScaling.LINEAR, RopeScaling.YARN):
        writer.add_rope_scaling_type(RopeScalingType[model.rope_scaling.name])
        writer.add_rope_scaling_factor(4.0)
    if model.rope_scaling is RopeScaling.YARN:
        writer.add_rope_scaling_orig_ctx_len(64)
    if long := model.spec().rope.long:
        writer.add_rope_scaling_orig_ctx_len(long.original_context)
        writer.add_rope_scaling_attn_factors(long.magnitude)


def _add_block_keys(writer: GGUFWriter, model: TinyModel) -> None:
    family, block = FAMILIES[model.family], model.spec().block
    if block.norm is NormKind.LAYER:
        writer.add_layer_norm_eps(1e-5)
    else:
        writer.add_layer_norm_rms_eps(1e-5)
    if family.window is not Presence.ABSENT:
        writer.add_sliding_window(block.window)
    if family.is_capped:
        writer.add_attn_logit_softcapping(block.attention_cap)
        writer.add_final_logit_softcapping(block.logit_cap)


def _override(writer: GGUFWriter, key: str, value: Any) -> None:
    writer.kv_data[0].pop(key, None)
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif value is not None:
        writer.add_array(key, value)


def _add_tensor(writer: GGUFWriter, model: TinyModel, name: str, values: F32) -> None:
    is_table = name in ("token_embd.weight", "output.weight")
    type_name = (model.embedding_type or model.tensor_type) if is_table else model.tensor_type
    if values.ndim == 1 or type_name == "F32":
        writer.add_tensor(name, values)
        return
    raw_dtype = GGMLQuantizationType[type_name]
    writer.add_tensor(name, encode(type_name, values), raw_dtype=raw_dtype)
