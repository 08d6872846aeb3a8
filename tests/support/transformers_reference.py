"""The same tiny models run by `transformers`; needs torch and transformers."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import (
    FalconConfig,
    FalconForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GemmaConfig,
    GemmaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    StableLmConfig,
    StableLmForCausalLM,
)

from polyneuron.kernels.gemv import FeedForwardKind, RopeLayout
from polyneuron.model.spec import LayerTensors, ModelSpec, tensor_map
from tests.support.hf_others import OTHER_STATES, hf_departures, other_state, rope_parameters

Weights = dict[str, NDArray[Any]]

_CLASSES: dict[str, tuple[Any, Any]] = {
    "falcon": (FalconConfig, FalconForCausalLM),
    "opt": (OPTConfig, OPTForCausalLM),
    "phi3": (Phi3Config, Phi3ForCausalLM),
    "stablelm": (StableLmConfig, StableLmForCausalLM),
    "gemma": (GemmaConfig, GemmaForCausalLM),
    "gemma2": (Gemma2Config, Gemma2ForCausalLM),
    "gemma3": (Gemma3TextConfig, Gemma3ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
    "bamboo": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "olmoe": (OlmoeConfig, OlmoeForCausalLM),
    "qwen2moe": (Qwen2MoeConfig, Qwen2MoeForCausalLM),
    "qwen3moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
    "turbosparsemixtral": (MixtralConfig, MixtralForCausalLM),
}
RELU_KINDS = (FeedForwardKind.DRELU, FeedForwardKind.RELU)
_MIXTRAL = (MixtralConfig, MixtralForCausalLM)


class _DreluExperts(torch.nn.Module):
    """Mixtral's experts with ReLU on both products, which `transformers` has not."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        assert spec.experts is not None
        count, width = spec.experts.num_experts, spec.d_ff
        self.gate_up_proj = torch.nn.Parameter(torch.empty(count, 2 * width, spec.d_model))
        self.down_proj = torch.nn.Parameter(torch.empty(count, spec.d_model, width))

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> Any:
        out = torch.zeros_like(x)
        for token, (experts, shares) in enumerate(zip(chosen, weights, strict=True)):
            for expert, share in zip(experts, shares, strict=True):
                both = torch.relu(self.gate_up_proj[expert] @ x[token])
                gate, up = both.chunk(2)
                out[token] += share * (self.down_proj[expert] @ (gate * up))
        return out


class _ReluFeedForward(torch.nn.Module):
    """dReLU with a gate, plain ReLU without: `transformers` itself has neither for this family."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.up_proj = torch.nn.Linear(spec.d_model, spec.d_ff, bias=False)
        self.down_proj = torch.nn.Linear(spec.d_ff, spec.d_model, bias=False)
        if spec.has_gate:
            self.gate_proj = torch.nn.Linear(spec.d_model, spec.d_ff, bias=False)

    def forward(self, x: torch.Tensor) -> Any:
        hidden = torch.relu(self.up_proj(x))
        if hasattr(self, "gate_proj"):
            hidden = hidden * torch.relu(self.gate_proj(x))
        return self.down_proj(hidden)


def transformers_logits(
    spec: ModelSpec, weights: Weights, token_ids: NDArray[Any], dtype: torch.dtype
) -> NDArray[np.float64]:
    """Logits (n, vocab_size) of GGUF `weights` by the matching class of `transformers`."""
    is_mixtral = spec.family == "llama" and spec.experts is not None
    config_class, model_class = _MIXTRAL if is_mixtral else _CLASSES[spec.family]
    model = model_class(config_class(**_config(spec)))
    if spec.experts and spec.feed_forward is FeedForwardKind.DRELU:
        for layer in model.model.layers:
            layer.mlp.experts = _DreluExperts(spec)
    elif spec.feed_forward in RELU_KINDS and spec.family not in OTHER_STATES:
        for layer in model.model.layers:
            layer.mlp = _ReluFeedForward(spec)
    model.load_state_dict(_state(spec, weights), strict=True)
    model.to(dtype).eval()
    with torch.no_grad():
        logits = model(torch.tensor(token_ids, dtype=torch.long)[None]).logits[0]
    result: NDArray[np.float64] = logits.to(torch.float64).numpy()
    return result


def _config(spec: ModelSpec) -> dict[str, Any]:
    relu = spec.feed_forward is not FeedForwardKind.SILU  # what else there is, families set
    config: dict[str, Any] = {
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.d_model,
        "intermediate_size": spec.d_ff,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "rms_norm_eps": spec.norm_eps,
        "max_position_embeddings": spec.context_length,
        "rope_parameters": rope_parameters(spec),
        "hidden_act": "relu" if relu else "silu",
        "tie_word_embeddings": spec.tied_head,
        "attn_implementation": "eager",
    }
    if spec.experts:
        config |= {
            "experts_implementation": "eager",
            "num_local_experts": spec.experts.num_experts,
            "num_experts": spec.experts.num_experts,
            "num_experts_per_tok": spec.experts.num_used,
            "norm_topk_prob": spec.experts.is_normalised,
            "moe_intermediate_size": spec.d_ff,
            "shared_expert_intermediate_size": spec.experts.shared_d_ff,
        }
    if spec.family in ("llama", "bamboo") and not spec.experts:
        config["attention_bias"] = spec.qkv_bias
    config |= {"sliding_window": spec.block.window or None} | hf_departures(spec)
    if spec.family == "falcon":
        del config["head_dim"]  # there it follows from the others
    return config


def _state(spec: ModelSpec, weights: Weights) -> dict[str, torch.Tensor]:
    if spec.family in OTHER_STATES:
        return _tensors(other_state(spec, weights))
    names = tensor_map(spec)
    state = {
        "model.embed_tokens.weight": weights[names.token_embd],
        "model.norm.weight": weights[names.output_norm],
        "lm_head.weight": weights[names.output],
    }
    for layer_id, layer in enumerate(names.layers):
        for role, name in _layer_names(spec, layer).items():
            if name is None:
                continue
            values = weights[name]
            if role.endswith("shared_expert_gate.weight"):
                values = values[None]
            if role.startswith(("self_attn.q_proj", "self_attn.k_proj")):
                heads = spec.num_heads if "q_proj" in role else spec.num_kv_heads
                values = _to_halves(spec, values, heads)
            state[f"model.layers.{layer_id}.{role}"] = values
        if layer.ffn_gate is not None and spec.experts:
            halves = [weights[layer.ffn_gate], weights[layer.ffn_up]]
            experts = f"model.layers.{layer_id}.mlp.experts."
            state[experts + "gate_up_proj"] = np.concatenate(halves, axis=1)
            state[experts + "down_proj"] = weights[layer.ffn_down]
    if spec.family.startswith("gemma"):  # there a norm's weight is one less
        state |= {key: value - 1.0 for key, value in state.items() if "norm" in key}
    return _tensors(state)


def _tensors(state: Weights) -> dict[str, torch.Tensor]:
    return {key: torch.tensor(np.ascontiguousarray(value)) for key, value in state.items()}


def _layer_names(spec: ModelSpec, layer: LayerTensors) -> dict[str, str | None]:
    is_dense = layer.router is None
    norms = {"post_attention_layernorm.weight": layer.ffn_norm}
    if spec.block.has_post_norms:
        norms = {
            "post_attention_layernorm.weight": layer.post_attn_norm,
            "pre_feedforward_layernorm.weight": layer.ffn_norm,
            "post_feedforward_layernorm.weight": layer.post_ffn_norm,
        }
    feed_forward = {
        "mlp.gate_proj.weight": layer.ffn_gate,
        "mlp.up_proj.weight": layer.ffn_up,
        "mlp.down_proj.weight": layer.ffn_down,
    }
    experts = {
        "mlp.gate.weight": layer.router,
        "mlp.shared_expert.gate_proj.weight": layer.shared_ffn_gate,
        "mlp.shared_expert.up_proj.weight": layer.shared_ffn_up,
        "mlp.shared_expert.down_proj.weight": layer.shared_ffn_down,
        "mlp.shared_expert_gate.weight": layer.shared_gate,
    }
    return (
        (feed_forward if is_dense else experts)
        | norms
        | {
            "input_layernorm.weight": layer.attn_norm,
            "self_attn.q_proj.weight": layer.attn_q,
            "self_attn.k_proj.weight": layer.attn_k,
            "self_attn.v_proj.weight": layer.attn_v,
            "self_attn.o_proj.weight": layer.attn_output,
            "self_attn.q_proj.bias": layer.attn_q_bias,
            "self_attn.k_proj.bias": layer.attn_k_bias,
            "self_attn.v_proj.bias": layer.attn_v_bias,
            "self_attn.o_proj.bias": layer.attn_output_bias,
            "self_attn.q_norm.weight": layer.attn_q_norm,
            "self_attn.k_norm.weight": layer.attn_k_norm,
        }
    )


def _to_halves(spec: ModelSpec, values: NDArray[Any], num_heads: int) -> NDArray[Any]:
    """Undo the row order that llama-family GGUFs have for interleaved rope."""
    if spec.rope.layout is RopeLayout.HALVES:
        return values
    pairs = values.reshape(num_heads, spec.head_dim // 2, 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)
