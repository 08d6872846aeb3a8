"""Families whose checkpoints name tensors or settings otherwise than Llama's, by plain code."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyneuron.kernels.gemv import FeedForwardKind
from polyneuron.model.block import Residual
from polyneuron.model.spec import LayerTensors, ModelSpec, RopeScaling, TensorMap, tensor_map

Weights = dict[str, NDArray[Any]]


def rope_parameters(spec: ModelSpec) -> dict[str, Any]:
    """The rotary embedding as config.json has it."""
    found: dict[str, Any] = {"rope_type": "default", "rope_theta": spec.rope.base}
    original = {"original_max_position_embeddings": 64}
    match spec.rope.scaling:
        case RopeScaling.LINEAR:
            found |= {"rope_type": "linear", "factor": spec.rope.factor}
        case RopeScaling.YARN:
            found |= {"rope_type": "yarn", "factor": spec.rope.factor, **original}
        case RopeScaling.LLAMA3:
            found |= {"rope_type": "llama3", "factor": 8.0, **original}
            found |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    if long := spec.rope.long:
        found |= {
            "rope_type": "longrope",
            "short_factor": list(long.short_factors),
            "long_factor": list(long.long_factors),
            "attention_factor": long.magnitude,
            "original_max_position_embeddings": long.original_context,
        }
    if spec.rope.rotary_dim not in (0, spec.head_dim):
        found["partial_rotary_factor"] = spec.rope.rotary_dim / spec.head_dim
    return found


def hf_departures(spec: ModelSpec) -> dict[str, Any]:
    """Keys of config.json that are not as Llama's; those that others lack or have otherwise."""
    block = spec.block
    match spec.family:
        case "gemma" | "gemma2" | "gemma3":
            return _gemma(spec)
        case "phi3":
            ids: dict[str, Any] = dict.fromkeys(("pad_token_id", "bos_token_id"), 0)
            long = spec.rope.long
            return ids | (
                {"original_max_position_embeddings": long.original_context} if long else {}
            )
        case "stablelm":
            return {
                "layer_norm_eps": 1e-5,
                "use_qkv_bias": spec.qkv_bias,
                "use_parallel_residual": block.residual is Residual.PARALLEL,
            }
        case "falcon":
            is_new = block.residual is Residual.PARALLEL_NORMS
            return {
                "num_kv_heads": spec.num_kv_heads,
                "ffn_hidden_size": spec.d_ff,
                "layer_norm_epsilon": 1e-5,
                "new_decoder_architecture": is_new,
                "multi_query": not is_new,
                "activation": "relu" if spec.feed_forward is FeedForwardKind.RELU else "gelu",
            }
        case "opt":
            return {"ffn_dim": spec.d_ff, "activation_function": "relu"}
    return {}


def _gemma(spec: ModelSpec) -> dict[str, Any]:
    block = spec.block
    tanh = "gelu_pytorch_tanh"
    config: dict[str, Any] = {"hidden_act": tanh, "hidden_activation": tanh}
    if not block.has_post_norms:
        return config
    kinds = {True: "sliding_attention", False: "full_attention"}
    if spec.local_rope:
        config["rope_parameters"] = {
            "full_attention": rope_parameters(spec),
            "sliding_attention": {"rope_type": "default", "rope_theta": spec.local_rope.base},
        }
    return config | {
        "query_pre_attn_scalar": round(spec.attention_scale**-2),
        "layer_types": [kinds[block.is_local(i)] for i in range(spec.num_layers)],
        "attn_logit_softcapping": block.attention_cap or None,
        "final_logit_softcapping": block.logit_cap or None,
    }


def other_state(spec: ModelSpec, weights: Weights) -> Weights:
    """The weights by the names that a checkpoint of one of OTHER_STATES has for them."""
    return OTHER_STATES[spec.family](spec, tensor_map(spec), weights)


def _named(prefix: str, weights: Weights, roles: dict[str, str | None]) -> Weights:
    return {f"{prefix}{role}": weights[name] for role, name in roles.items() if name is not None}


def _as_llama(names: TensorMap, weights: Weights) -> Weights:
    roles = {
        "model.embed_tokens.weight": names.token_embd,
        "model.norm.weight": names.output_norm,
        "model.norm.bias": names.output_norm_bias,
        "lm_head.weight": names.output,
    }
    return _named("", weights, roles)


def _phi3(spec: ModelSpec, names: TensorMap, weights: Weights) -> Weights:
    state = _as_llama(names, weights)
    for i, layer in enumerate(names.layers):
        prefix = f"model.layers.{i}."
        assert layer.ffn_gate is not None
        qkv = [weights[name] for name in (layer.attn_q, layer.attn_k, layer.attn_v)]
        halves = [weights[layer.ffn_gate], weights[layer.ffn_up]]
        state[f"{prefix}self_attn.qkv_proj.weight"] = np.concatenate(qkv)
        state[f"{prefix}mlp.gate_up_proj.weight"] = np.concatenate(halves)
        roles: dict[str, str | None] = {
            "self_attn.o_proj.weight": layer.attn_output,
            "mlp.down_proj.weight": layer.ffn_down,
            "input_layernorm.weight": layer.attn_norm,
            "post_attention_layernorm.weight": layer.ffn_norm,
        }
        state |= _named(prefix, weights, roles)
    return state


def _stablelm(spec: ModelSpec, names: TensorMap, weights: Weights) -> Weights:
    state = _as_llama(names, weights)
    for i, layer in enumerate(names.layers):
        roles: dict[str, str | None] = {
            **_projections("self_attn.", "o_proj", layer),
            "mlp.gate_proj.weight": layer.ffn_gate,
            "mlp.up_proj.weight": layer.ffn_up,
            "mlp.down_proj.weight": layer.ffn_down,
            "input_layernorm.weight": layer.attn_norm,
            "input_layernorm.bias": layer.attn_norm_bias,
            "post_attention_layernorm.weight": layer.ffn_norm,
            "post_attention_layernorm.bias": layer.ffn_norm_bias,
        }
        state |= _named(f"model.layers.{i}.", weights, roles)
    return state


def _projections(prefix: str, output: str, layer: LayerTensors) -> dict[str, str | None]:
    return {
        f"{prefix}q_proj.weight": layer.attn_q,
        f"{prefix}k_proj.weight": layer.attn_k,
        f"{prefix}v_proj.weight": layer.attn_v,
        f"{prefix}{output}.weight": layer.attn_output,
        f"{prefix}q_proj.bias": layer.attn_q_bias,
        f"{prefix}k_proj.bias": layer.attn_k_bias,
        f"{prefix}v_proj.bias": layer.attn_v_bias,
        f"{prefix}{output}.bias": layer.attn_output_bias,
    }


def _falcon(spec: ModelSpec, names: TensorMap, weights: Weights) -> Weights:
    roles: dict[str, str | None] = {
        "transformer.word_embeddings.weight": names.token_embd,
        "transformer.ln_f.weight": names.output_norm,
        "transformer.ln_f.bias": names.output_norm_bias,
        "lm_head.weight": names.output,
    }
    state = _named("", weights, roles)
    for i, layer in enumerate(names.layers):
        attn_norm, ffn_norm = "input_layernorm", ""
        if layer.ffn_norm is not None:
            attn_norm, ffn_norm = "ln_attn", "ln_mlp"
        roles = {
            "self_attention.dense.weight": layer.attn_output,
            "mlp.dense_h_to_4h.weight": layer.ffn_up,
            "mlp.dense_4h_to_h.weight": layer.ffn_down,
            f"{attn_norm}.weight": layer.attn_norm,
            f"{attn_norm}.bias": layer.attn_norm_bias,
            f"{ffn_norm}.weight": layer.ffn_norm,
            f"{ffn_norm}.bias": layer.ffn_norm_bias,
        }
        prefix = f"transformer.h.{i}."
        state |= _named(prefix, weights, roles)
        parts = [weights[name] for name in (layer.attn_q, layer.attn_k, layer.attn_v)]
        state[f"{prefix}self_attention.query_key_value.weight"] = _by_groups(spec, parts)
    return state


def _by_groups(spec: ModelSpec, parts: list[NDArray[Any]]) -> NDArray[Any]:
    """Rows as Falcon has them: the query heads of a KV head, its key, its value, group by group."""
    groups = [part.reshape(spec.num_kv_heads, -1, spec.d_model) for part in parts]
    return np.concatenate(groups, axis=1).reshape(-1, spec.d_model)


def _opt(spec: ModelSpec, names: TensorMap, weights: Weights) -> Weights:
    roles: dict[str, str | None] = {
        "model.decoder.embed_tokens.weight": names.token_embd,
        "model.decoder.embed_positions.weight": names.positions,
        "model.decoder.final_layer_norm.weight": names.output_norm,
        "model.decoder.final_layer_norm.bias": names.output_norm_bias,
        "lm_head.weight": names.output,
    }
    state = _named("", weights, roles)
    for i, layer in enumerate(names.layers):
        roles = {
            **_projections("self_attn.", "out_proj", layer),
            "fc1.weight": layer.ffn_up,
            "fc1.bias": layer.ffn_up_bias,
            "fc2.weight": layer.ffn_down,
            "fc2.bias": layer.ffn_down_bias,
            "self_attn_layer_norm.weight": layer.attn_norm,
            "self_attn_layer_norm.bias": layer.attn_norm_bias,
            "final_layer_norm.weight": layer.ffn_norm,
            "final_layer_norm.bias": layer.ffn_norm_bias,
        }
        state |= _named(f"model.decoder.layers.{i}.", weights, roles)
    return state


OTHER_STATES: dict[str, Callable[[ModelSpec, TensorMap, Weights], Weights]] = {
    "phi3": _phi3,
    "stablelm": _stablelm,
    "falcon": _falcon,
    "opt": _opt,
}
"""Family -> its weights by a checkpoint's names."""
