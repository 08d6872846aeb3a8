"""The shapes that can be written: real models' hyper-parameters, and changes to them."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from polyneuron.errors import ConfigError
from polyneuron.kernels.quant import BLOCK_COLS
from polyneuron.model.architecture import FAMILIES
from polyneuron.model.spec import ExpertSpec, ModelSpec, RopeSpec
from polyneuron.synth.vocabulary import MIN_TOKENS

MAX_COUNT = 1 << 20


def _shape(name: str, family: str, **counts: Any) -> ModelSpec:
    head_dim = counts.pop("head_dim", counts["d_model"] // counts["num_heads"])
    base = counts.pop("rope_base", 10000.0)
    rules = FAMILIES[family]
    return ModelSpec(
        family=family,
        name=f"random weights, the shape of {name}",
        head_dim=head_dim,
        rope=RopeSpec(rules.rope_layout, head_dim, base),
        feed_forward=rules.feed_forward,
        qk_norm=rules.qk_norm,
        qkv_bias=False,
        output_bias=False,
        **{"tied_head": False, "norm_eps": 1e-5, **counts},
    )


_MISTRAL = {
    "num_layers": 32, "d_model": 4096, "num_heads": 32, "num_kv_heads": 8, "d_ff": 14336,
    "vocab_size": 32000, "context_length": 32768,
}  # fmt: skip
_LLAMA_13B = {
    "num_layers": 40, "d_model": 5120, "num_heads": 40, "num_kv_heads": 40, "d_ff": 13824,
    "vocab_size": 32000, "context_length": 4096,
}  # fmt: skip
_SMOLLM2 = {
    "num_layers": 30, "d_model": 576, "num_heads": 9, "num_kv_heads": 3, "d_ff": 1536,
    "vocab_size": 49152, "context_length": 8192, "rope_base": 100000.0, "tied_head": True,
}  # fmt: skip
_MIXTRAL = {
    **_MISTRAL, "vocab_size": 57024, "rope_base": 1e6, "experts": ExpertSpec(8, 2, True),
}  # fmt: skip
_QWEN3_MOE = {
    "num_layers": 48, "d_model": 2048, "num_heads": 32, "num_kv_heads": 4, "head_dim": 128,
    "d_ff": 768, "vocab_size": 151936, "context_length": 40960, "rope_base": 1e6,
    "norm_eps": 1e-6, "experts": ExpertSpec(128, 8, True),
}  # fmt: skip

SHAPES = {
    name: _shape(name, family, **counts)
    for name, family, counts in (
        ("bamboo-7b", "bamboo", _MISTRAL),
        ("turbosparse-mistral-7b", "bamboo", _MISTRAL),
        ("mistral-7b", "llama", _MISTRAL),
        ("llama-13b", "llama", _LLAMA_13B),
        ("smollm2-135m", "llama", _SMOLLM2),
        ("turbosparse-mixtral-47b", "turbosparsemixtral", _MIXTRAL),
        ("qwen3moe-30b-a3b", "qwen3moe", _QWEN3_MOE),
    )
}

# Field of ModelSpec -> the flag that changes it.
FLAGS = {
    "num_layers": "--layers",
    "d_model": "--d-model",
    "d_ff": "--d-ff",
    "num_heads": "--heads",
    "num_kv_heads": "--kv-heads",
    "vocab_size": "--vocab",
}
assert FLAGS.keys() <= {field.name for field in fields(ModelSpec)}


def shape_spec(name: str, **changes: int | None) -> ModelSpec:
    """The model `name` with fields of FLAGS changed; ConfigError names what is wrong."""
    if name not in SHAPES:
        raise ConfigError(f"shape {name!a} is not known; known: {' '.join(SHAPES)}")
    wanted = {field: count for field, count in changes.items() if count is not None}
    for field, count in wanted.items():
        if not 1 <= count <= MAX_COUNT:
            raise ConfigError(f"{FLAGS[field]} {count}: give 1 to {MAX_COUNT}")
    spec = replace(SHAPES[name], **wanted)  # type: ignore[arg-type]
    if wanted:
        spec = replace(spec, name=f"{spec.name}, changed")
    if spec.d_model % spec.num_heads or spec.d_model // spec.num_heads % 2:
        raise ConfigError(
            f"--d-model {spec.d_model} with --heads {spec.num_heads}: does not give heads of an "
            "even width"
        )
    if wanted.keys() & {"d_model", "num_heads"}:
        head_dim = spec.d_model // spec.num_heads
        spec = replace(spec, head_dim=head_dim, rope=replace(spec.rope, rotary_dim=head_dim))
    _check(spec)
    return spec


def _check(spec: ModelSpec) -> None:
    for field in ("d_model", "d_ff"):
        count = getattr(spec, field)
        if count % BLOCK_COLS:
            raise ConfigError(f"{FLAGS[field]} {count}: give a multiple of {BLOCK_COLS}")
    if spec.d_model < 2 * BLOCK_COLS:
        raise ConfigError(f"--d-model {spec.d_model}: give {2 * BLOCK_COLS} or more")
    if spec.num_heads % spec.num_kv_heads:
        raise ConfigError(
            f"--heads {spec.num_heads} cannot share --kv-heads {spec.num_kv_heads}: give a divisor"
        )
    if spec.vocab_size < MIN_TOKENS:
        raise ConfigError(f"--vocab {spec.vocab_size}: give {MIN_TOKENS} or more")
