"""The model a neuron-cluster file holds, as the same `ModelSpec` that a GGUF gives."""

import math
from dataclasses import asdict
from enum import Enum
from typing import Any

from polyneuron.errors import FormatError
from polyneuron.io.gguf_values import quoted
from polyneuron.io.ncf_fields import Fields
from polyneuron.io.ncf_format import Layout, NcfTensor, SectionKind
from polyneuron.io.ncf_reader import NcfFile
from polyneuron.io.predictor_file import SOURCE_FORMAT as PREDICTORS
from polyneuron.kernels.arena import MAX_EXPERTS
from polyneuron.kernels.gemv import FeedForwardKind, RopeLayout
from polyneuron.kernels.quant import TILE_ROWS
from polyneuron.model.block import LLAMA, BlockSpec, NormKind, Residual
from polyneuron.model.spec import (
    ExpertSpec,
    LongRopeSpec,
    ModelSpec,
    RopeScaling,
    RopeSpec,
    YarnSpec,
    tensor_shapes,
)

MAX_DIM = 1 << 24
FIXED = "fixed"


def plain_spec(spec: ModelSpec) -> dict[str, Any]:
    """The description as msgpack can hold it: enumerations by their names in small letters.

    What does not depart from Llama is left out, so that its files stay as they were.
    """
    plain = _plain(asdict(spec))
    if spec.block == LLAMA:
        del plain["block"]
    else:
        _drop_unset(plain["block"], "is_first_global", "is_global_unrotated")
    if spec.experts is not None:
        _drop_unset(plain["experts"], "is_sigmoid", "is_early")
    if spec.rope.long is None:
        del plain["rope"]["long"]
    return plain


def _drop_unset(plain: dict[str, Any], *flags: str) -> None:
    """Leave out flags that are not set."""
    for flag in flags:
        if not plain[flag]:
            del plain[flag]


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            plain[key] = _plain(value)
        elif isinstance(value, Enum):
            plain[key] = value.name.lower()
        else:
            plain[key] = list(value) if isinstance(value, tuple) else value
    return plain


def spec_of(ncf: NcfFile) -> ModelSpec:
    """The description in a file, checked against the file's tensors."""
    if ncf.manifest.source.format == PREDICTORS:
        raise FormatError(
            f"{ncf.path}: a model's predictors, not a model; give the .ncf file they lie beside"
        )
    spec = _spec(Fields(str(ncf.path), "the manifest's spec", dict(ncf.manifest.spec)), ncf)
    expected = tensor_shapes(spec)
    missing = [name for name in expected if name not in ncf.by_name]
    unknown = [tensor.name for tensor in ncf.tensors if tensor.name not in expected]
    for what, names in (("missing", missing), ("of no use to the model", unknown)):
        if names:
            raise FormatError(f"{ncf.path}: tensor {quoted(names[0])} is {what}; convert it again")
    for tensor in ncf.tensors:
        _check_tensor(ncf, tensor, expected[tensor.name])
    return spec


def _spec(fields: Fields, ncf: NcfFile) -> ModelSpec:
    spec = ModelSpec(
        family=fields.text("family"),
        name=fields.text("name"),
        num_layers=fields.count("num_layers", len(ncf.tensors), 1),
        d_model=fields.count("d_model", MAX_DIM, 1),
        num_heads=fields.count("num_heads", MAX_DIM, 1),
        num_kv_heads=fields.count("num_kv_heads", MAX_DIM, 1),
        head_dim=fields.count("head_dim", MAX_DIM, 1),
        d_ff=fields.count("d_ff", MAX_DIM, 1),
        vocab_size=fields.count("vocab_size", MAX_DIM, 1),
        context_length=fields.count("context_length", 1 << 31, 1),
        norm_eps=fields.number("norm_eps"),
        rope=_rope(fields.part("rope")),
        feed_forward=fields.choice("feed_forward", FeedForwardKind),
        qk_norm=fields.flag("qk_norm"),
        qkv_bias=fields.flag("qkv_bias"),
        output_bias=fields.flag("output_bias"),
        tied_head=fields.flag("tied_head"),
        experts=_experts(fields.part("experts")) if fields.has("experts") else None,
        is_qk_norm_wide=fields.optional_flag("is_qk_norm_wide"),
        block=_block(fields.part("block")) if fields.has("block") else LLAMA,
    )
    if spec.num_heads % spec.num_kv_heads:
        fields.fail(f"has {spec.num_heads} heads that cannot share {spec.num_kv_heads}")
    if spec.experts and (spec.d_ff % TILE_ROWS or ncf.manifest.layout is not Layout.BUNDLES):
        fields.fail(f"has experts of {spec.d_ff} neurons that lie in no bundles of whole tiles")
    _check_block(fields, spec, ncf.manifest.layout)
    if spec.rope.rotary_dim > spec.head_dim or spec.rope.rotary_dim % 2:
        fields.fail(f"rotates {spec.rope.rotary_dim} of {spec.head_dim} values of a head")
    _check_factors(fields, spec.rope)
    return spec


def _experts(fields: Fields) -> ExpertSpec:
    num_experts = fields.count("num_experts", MAX_EXPERTS, 2)
    return ExpertSpec(
        num_experts=num_experts,
        num_used=fields.count("num_used", num_experts, 1),
        is_normalised=fields.flag("is_normalised"),
        shared_d_ff=fields.count("shared_d_ff", MAX_DIM),
        is_sigmoid=fields.optional_flag("is_sigmoid"),
        is_early=fields.optional_flag("is_early"),
    )


def _check_block(fields: Fields, spec: ModelSpec, layout: Layout) -> None:
    """That a step can compute the layers as they are said to be."""
    block = spec.block
    needed = spec.context_length + block.position_offset
    if block.learned_positions and block.learned_positions < needed:
        fields.fail(f"has {block.learned_positions} learned positions, {needed} are needed")
    if block.has_post_norms and layout is Layout.BUNDLES:
        fields.fail("norms what neurons give, which bundles cannot")
    if spec.experts and (block.has_post_norms or block.residual is not Residual.SEQUENTIAL):
        fields.fail("has experts in layers that are made otherwise than Llama's")


def _check_factors(fields: Fields, rope: RopeSpec) -> None:
    """The divisors that a scaling needs, one for each pair that is rotated."""
    pairs, long = rope.rotary_dim // 2, rope.long
    if (rope.scaling is RopeScaling.LONGROPE) != (long is not None):
        fields.fail(f"has scaling {rope.scaling.value} of rotations and not what it needs")
    needed = [rope.frequency_factors] if rope.frequency_factors else []
    needed += [long.short_factors, long.long_factors] if long else []
    for factors in needed:
        if len(factors) != pairs:
            fields.fail(f"has {len(factors)} frequency factors for {rope.rotary_dim} values")


def _block(fields: Fields) -> BlockSpec:
    return BlockSpec(
        norm=fields.choice("norm", NormKind),
        has_post_norms=fields.flag("has_post_norms"),
        residual=fields.choice("residual", Residual),
        ffn_bias=fields.flag("ffn_bias"),
        window=fields.count("window", 1 << 31),
        window_period=fields.count("window_period", MAX_DIM),
        is_first_global=fields.optional_flag("is_first_global"),
        is_global_unrotated=fields.optional_flag("is_global_unrotated"),
        local_rope_base=fields.number("local_rope_base"),
        attention_scale=fields.number("attention_scale"),
        attention_cap=fields.number("attention_cap"),
        logit_cap=fields.number("logit_cap"),
        embedding_scale=fields.number("embedding_scale"),
        learned_positions=fields.count("learned_positions", MAX_DIM),
        position_offset=fields.count("position_offset", MAX_DIM),
    )


def _rope(fields: Fields) -> RopeSpec:
    yarn = fields.part("yarn") if fields.has("yarn") else None
    long = fields.part("long") if fields.has("long") else None
    return RopeSpec(
        layout=fields.choice("layout", RopeLayout),
        rotary_dim=fields.count("rotary_dim", MAX_DIM),
        base=fields.number("base"),
        scaling=fields.choice("scaling", RopeScaling),
        factor=fields.number("factor"),
        frequency_factors=fields.numbers("frequency_factors"),
        yarn=None
        if yarn is None
        else YarnSpec(
            original_context=yarn.count("original_context", 1 << 31, 1),
            beta_fast=yarn.number("beta_fast"),
            beta_slow=yarn.number("beta_slow"),
        ),
        long=None
        if long is None
        else LongRopeSpec(
            original_context=long.count("original_context", 1 << 31, 1),
            short_factors=long.numbers("short_factors"),
            long_factors=long.numbers("long_factors"),
            magnitude=long.number("magnitude"),
        ),
    )


def _check_tensor(ncf: NcfFile, tensor: NcfTensor, shape: tuple[int, ...]) -> None:
    """The spec's shape, down transposed in bundles; feed forward in its layer's section only."""
    section = ncf.sections[tensor.section_index]
    is_vector = len(shape) == 1
    rows, cols = math.prod(shape[:-1]), shape[-1]
    if section.kind is SectionKind.BUNDLES and tensor.role == "ffn_down":
        rows, cols = math.prod(shape) // shape[-2], shape[-2]
    if (tensor.rows, tensor.cols) != (rows, cols) or is_vector != (tensor.storage is None):
        raise FormatError(
            f"{ncf.path}: tensor {quoted(tensor.name)} is ({tensor.rows}, {tensor.cols}), the "
            f"model asks for ({rows}, {cols}); convert it again"
        )
    if tensor.storage is not None and not tensor.storage.is_for_weights:
        raise FormatError(
            f"{ncf.path}: tensor {quoted(tensor.name)} is stored as "
            f"{tensor.storage.name.lower()}, which is for predictors; convert it again"
        )
    is_fed = tensor.role in ("ffn_gate", "ffn_up", "ffn_down")
    if section.name != (f"layer.{tensor.layer_id}" if is_fed else FIXED):
        raise FormatError(
            f"{ncf.path}: tensor {quoted(tensor.name)} lies in section {quoted(section.name)}; "
            "convert it again"
        )
