"""Hugging Face folders of tiny models, written by plain code from weights under a GGUF's names."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from polyneuron.kernels.gemv import FeedForwardKind, RopeLayout
from polyneuron.model.spec import LayerTensors, ModelSpec, tensor_map
from tests.support.hf_others import OTHER_STATES, hf_departures, other_state, rope_parameters
from tests.support.predictor_sources import write_safetensors
from tests.support.tiny_tokenizer import CHAT_TEMPLATE, TinyVocabulary, bpe_vocabulary

F32 = NDArray[np.float32]
Weights = Mapping[str, NDArray[Any]]

MODEL_TYPES = {"qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe", "gemma3": "gemma3_text"}


def model_type(spec: ModelSpec) -> str:
    """What config.json calls the family."""
    if spec.family == "llama" and spec.experts:
        return "mixtral"
    return MODEL_TYPES.get(spec.family, spec.family)


def write_hf_folder(
    folder: Path,
    spec: ModelSpec,
    weights: Weights,
    *,
    dtype: str = "F32",
    num_shards: int = 3,
    config: Mapping[str, Any] | None = None,
    vocabulary: TinyVocabulary | None = None,
) -> Path:
    """A checkpoint; `config` changes keys of config.json, None takes one out."""
    folder.mkdir(parents=True, exist_ok=True)
    changed = hf_config(spec) | dict(config or {})
    kept = {key: value for key, value in changed.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept))
    write_shards(folder, dict(hf_weights(spec, weights)), dtype, num_shards)
    write_tokenizer(folder, vocabulary or bpe_vocabulary())
    return folder


def write_shards(folder: Path, arrays: Mapping[str, F32], dtype: str, num_shards: int) -> None:
    """The tensors dealt out to shards in turn, so that experts lie apart."""
    if num_shards == 1:
        write_safetensors(folder / "model.safetensors", arrays, dtype)
        return
    index: dict[str, str] = {}
    for number in range(num_shards):
        name = f"model-{number + 1:05}-of-{num_shards:05}.safetensors"
        inside = dict(list(arrays.items())[number::num_shards])
        write_safetensors(folder / name, inside, dtype)
        index |= dict.fromkeys(inside, name)
    text = json.dumps({"metadata": {"total_size": 0}, "weight_map": index})
    (folder / "model.safetensors.index.json").write_text(text)


def hf_config(spec: ModelSpec) -> dict[str, Any]:
    """config.json as `transformers` writes it."""
    rectifies = spec.feed_forward is not FeedForwardKind.SILU
    config: dict[str, Any] = {
        "architectures": ["TinyForCausalLM"],
        "model_type": model_type(spec),
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.d_model,
        "intermediate_size": spec.d_ff,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": spec.context_length,
        "rope_parameters": rope_parameters(spec),
        "hidden_act": "relu" if rectifies else "silu",
        "tie_word_embeddings": spec.tied_head,
        "attention_bias": spec.qkv_bias,
        "sliding_window": spec.block.window or None,
        "eos_token_id": 2,
    }
    config |= hf_departures(spec)
    if spec.family == "falcon":
        del config["head_dim"]  # there it follows from the others
    if spec.experts:
        config |= {
            "num_local_experts": spec.experts.num_experts,
            "num_experts_per_tok": spec.experts.num_used,
        }
        if spec.family in ("qwen2moe", "qwen3moe", "olmoe"):
            config |= {
                "num_experts": config.pop("num_local_experts"),
                "norm_topk_prob": spec.experts.is_normalised,
            }
        if spec.family.startswith("qwen"):
            config |= {"moe_intermediate_size": spec.d_ff, "intermediate_size": 3 * spec.d_ff}
        if spec.experts.shared_d_ff:
            config["shared_expert_intermediate_size"] = spec.experts.shared_d_ff
    return config


def hf_weights(spec: ModelSpec, weights: Weights) -> Iterator[tuple[str, F32]]:
    """Names and values as a checkpoint has them: experts apart, heads half after half."""
    if spec.family in OTHER_STATES:
        yield from other_state(spec, dict(weights)).items()
        return
    is_gemma = spec.family.startswith("gemma")
    for name, values in _as_llama(spec, weights):
        yield name, values - np.float32(1.0) if is_gemma and "norm" in name else values


def _as_llama(spec: ModelSpec, weights: Weights) -> Iterator[tuple[str, F32]]:
    names = tensor_map(spec)
    yield "model.embed_tokens.weight", weights[names.token_embd]
    for index, layer in enumerate(names.layers):
        place = f"model.layers.{index}."
        for role, name in (
            ("input_layernorm.weight", layer.attn_norm),
            ("self_attn.q_proj.weight", layer.attn_q),
            ("self_attn.k_proj.weight", layer.attn_k),
            ("self_attn.v_proj.weight", layer.attn_v),
            ("self_attn.q_proj.bias", layer.attn_q_bias),
            ("self_attn.k_proj.bias", layer.attn_k_bias),
            ("self_attn.v_proj.bias", layer.attn_v_bias),
            ("self_attn.o_proj.weight", layer.attn_output),
            ("self_attn.o_proj.bias", layer.attn_output_bias),
            ("self_attn.q_norm.weight", layer.attn_q_norm),
            ("self_attn.k_norm.weight", layer.attn_k_norm),
            *_after_attention(spec, layer),
        ):
            if name is not None:
                is_turned = role.startswith(("self_attn.q_proj", "self_attn.k_proj"))
                values = weights[name]
                yield place + role, _to_halves(spec, values) if is_turned else values
        fed = (layer.ffn_gate, layer.ffn_up, layer.ffn_down)
        if spec.experts is None:
            for role, name in zip(("gate_proj", "up_proj", "down_proj"), fed, strict=True):
                if name is not None:
                    yield f"{place}mlp.{role}.weight", weights[name]
            continue
        yield from _expert_weights(spec, place, weights, layer.router or "", fed)
        if layer.shared_gate is not None:
            yield f"{place}mlp.shared_expert_gate.weight", weights[layer.shared_gate][None]
            shared = (layer.shared_ffn_gate, layer.shared_ffn_up, layer.shared_ffn_down)
            for role, name in zip(("gate_proj", "up_proj", "down_proj"), shared, strict=True):
                yield f"{place}mlp.shared_expert.{role}.weight", weights[name or ""]
    yield "model.norm.weight", weights[names.output_norm]
    if not spec.tied_head:
        yield "lm_head.weight", weights[names.output]


def _after_attention(spec: ModelSpec, layer: LayerTensors) -> tuple[tuple[str, str | None], ...]:
    if not spec.block.has_post_norms:
        return (("post_attention_layernorm.weight", layer.ffn_norm),)
    return (
        ("post_attention_layernorm.weight", layer.post_attn_norm),
        ("pre_feedforward_layernorm.weight", layer.ffn_norm),
        ("post_feedforward_layernorm.weight", layer.post_ffn_norm),
    )


def _expert_weights(
    spec: ModelSpec, place: str, weights: Weights, router: str, fed: tuple[str | None, ...]
) -> Iterator[tuple[str, F32]]:
    is_mixtral = spec.family in ("llama", "turbosparsemixtral")
    block = "block_sparse_moe" if is_mixtral else "mlp"
    roles = ("w1", "w3", "w2") if is_mixtral else ("gate_proj", "up_proj", "down_proj")
    yield f"{place}{block}.gate.weight", weights[router]
    for role, name in zip(roles, fed, strict=True):
        for expert, values in enumerate(weights[name or ""]):
            yield f"{place}{block}.experts.{expert}.{role}.weight", values


def _to_halves(spec: ModelSpec, values: F32) -> F32:
    """Undo the row order that llama-family GGUFs have for interleaved rope."""
    if spec.rope.layout is RopeLayout.HALVES:
        return values
    pairs = values.reshape(-1, spec.head_dim // 2, 2, *values.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)


def write_tokenizer(folder: Path, vocabulary: TinyVocabulary) -> None:
    """tokenizer.json of a byte-level vocabulary that cuts digits apart, and what lies beside it."""
    ids = {text: index for index, text in enumerate(vocabulary.tokens)}
    pairs = [tuple(merge.split(" ")) for merge in vocabulary.merges]
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text) for text in vocabulary.tokens[:3]])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "bos_token": vocabulary.tokens[vocabulary.bos_id],
        "eos_token": {"content": vocabulary.tokens[vocabulary.eos_id], "special": True},
        "add_bos_token": vocabulary.add_bos,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    ends = {"eos_token_id": [vocabulary.eos_id, 0]}
    (folder / "generation_config.json").write_text(json.dumps(ends))
