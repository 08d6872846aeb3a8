"""How checkpoints of Hugging Face name what a GGUF has: one row for each `model_type`.

A family of `architecture.FAMILIES` becomes readable from such folders by a row here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

GROUPED_QKV = "attn_qkv_groups"
"""Rows of q, k and v by groups: a KV head's query heads, its key, its value."""
ATTENTION = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
}
DENSE = ATTENTION | {
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
EXPERTS = ATTENTION | {
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.*.gate_proj": "ffn_gate_exps",
    "mlp.experts.*.up_proj": "ffn_up_exps",
    "mlp.experts.*.down_proj": "ffn_down_exps",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
}
MIXTRAL = ATTENTION | {
    "block_sparse_moe.gate": "ffn_gate_inp",
    "block_sparse_moe.experts.*.w1": "ffn_gate_exps",
    "block_sparse_moe.experts.*.w3": "ffn_up_exps",
    "block_sparse_moe.experts.*.w2": "ffn_down_exps",
}
POST_NORMED = DENSE | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
FUSED = ATTENTION | {
    "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OPT = {
    "self_attn_layer_norm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.out_proj": "attn_output",
    "final_layer_norm": "ffn_norm",
    "fc1": "ffn_up",
    "fc2": "ffn_down",
}
FALCON = {
    "input_layernorm": "attn_norm",
    "ln_attn": "attn_norm_2",
    "ln_mlp": "attn_norm",
    "self_attention.query_key_value": GROUPED_QKV,
    "self_attention.dense": "attn_output",
    "mlp.dense_h_to_4h": "ffn_up",
    "mlp.dense_4h_to_h": "ffn_down",
}
OUTSIDE = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
FALCON_OUTSIDE = {
    "transformer.word_embeddings": "token_embd",
    "transformer.ln_f": "output_norm",
    "lm_head": "output",
}
OPT_OUTSIDE = {
    "decoder.embed_tokens": "token_embd",
    "decoder.embed_positions": "position_embd",
    "decoder.final_layer_norm": "output_norm",
    "lm_head": "output",
}
OPT_OUTSIDE |= {f"model.{name}": role for name, role in OPT_OUTSIDE.items() if name != "lm_head"}
OF_NO_USE = ("rotary_emb.inv_freq", "predictor.fc1", "predictor.fc2")
"""Ends of names: computed anew, or taken with `profile --import`."""

COUNTS = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "max_position_embeddings": "context_length",
}
OPT_COUNTS = {
    **{key: name for key, name in COUNTS.items() if key != "intermediate_size"},
    "ffn_dim": "feed_forward_length",
}
RMS_NORM = {"rms_norm_eps": "attention.layer_norm_rms_epsilon"}
MIXTURE = {"num_experts_per_tok": "expert_used_count"}
LOCAL_EXPERTS = {"num_local_experts": "expert_count"}
OPTIONAL = {
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "vocab_size": "vocab_size",
}
OWN_EXPERTS = {
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "norm_topk_prob": "expert_weights_norm",
    "num_experts": "expert_count",
    "num_local_experts": "expert_count",
}
SILU = {"silu": None, "swish": None}
Values = Mapping[str, Any]
GELU = {"gelu_pytorch_tanh": None, "gelu": None}  # Gemma's first files say gelu and mean the other
NORMS = ("attn_norm", "ffn_norm", "output_norm")
POST_NORMS = ("post_attention_norm", "post_ffw_norm")
QK_NORMS = ("attn_q_norm", "attn_k_norm")


@dataclass(frozen=True, slots=True)
class HfFamily:
    """One `model_type` of config.json."""

    model_type: str
    family: str
    """Its `general.architecture`."""
    layer: Mapping[str, str] = field(default_factory=lambda: DENSE)
    """Names behind `model.layers.N.`; `*` is an expert's number, of which a stack is made."""
    outside: Mapping[str, str] = field(default_factory=lambda: OUTSIDE)
    required: Mapping[str, str] = field(default_factory=lambda: COUNTS | RMS_NORM)
    """Keys of config.json, and what they are called behind the architecture in a GGUF."""
    optional: Mapping[str, str] = field(default_factory=lambda: OPTIONAL)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Of keys that config.json leaves out."""
    activations: Mapping[str, str | None] = field(default_factory=lambda: SILU | {"relu": "relu"})
    """`hidden_act`, and the value of `feed_forward_activation`; None: the family's own."""
    interleaved: tuple[str, ...] = ()
    """Roles whose heads' rows lie half after half here, and in turn in a GGUF."""
    adds_one: tuple[str, ...] = ()
    """Vectors that a GGUF has one larger."""
    rope_base: float = 10000.0
    """When config.json leaves it out."""
    constants: Mapping[str, Any] = field(default_factory=dict)
    """Metadata keys behind the architecture that are the same for all."""
    normalise: Callable[[Values], Values] | None = None
    """config.json with the keys that other families' files have."""
    settled: tuple[tuple[str, tuple[object, ...]], ...] = ()
    """More keys of config.json with the values that this family is run with."""


LLAMA_ROPE = ("attn_q", "attn_k")


def _falcon(values: Values) -> Values:
    """Sizes that its config.json leaves to follow from others."""
    heads, hidden = values.get("num_attention_heads"), values.get("hidden_size")
    kv_heads = values.get("num_kv_heads") or heads
    if not values.get("new_decoder_architecture"):
        kv_heads = 1 if values.get("multi_query", True) else heads
    width = values.get("ffn_hidden_size")
    if width is None and isinstance(hidden, int):
        width = 4 * hidden
    return {
        **values,
        "intermediate_size": width,
        "num_key_value_heads": kv_heads,
        "hidden_act": values.get("activation", "gelu"),
    }


HF_FAMILIES = {
    row.model_type: row
    for row in (
        HfFamily("llama", "llama", interleaved=LLAMA_ROPE),
        HfFamily("mistral", "mistral", interleaved=LLAMA_ROPE),
        HfFamily(
            "mixtral",
            "llama",
            MIXTRAL,
            required=COUNTS | RMS_NORM | MIXTURE | LOCAL_EXPERTS,
            interleaved=LLAMA_ROPE,
            rope_base=1e6,
            activations=SILU,
        ),
        HfFamily("qwen2", "qwen2"),
        HfFamily("qwen3", "qwen3"),
        HfFamily(
            "qwen2_moe",
            "qwen2moe",
            EXPERTS,
            required=COUNTS | RMS_NORM | MIXTURE,
            optional=OPTIONAL | OWN_EXPERTS,
            defaults={"norm_topk_prob": False},
            activations=SILU,
        ),
        HfFamily(
            "qwen3_moe",
            "qwen3moe",
            EXPERTS,
            required=COUNTS | RMS_NORM | MIXTURE,
            optional=OPTIONAL | OWN_EXPERTS,
            defaults={"norm_topk_prob": False},
            activations=SILU,
        ),
        HfFamily(
            "olmoe",
            "olmoe",
            EXPERTS,
            required=COUNTS | RMS_NORM | MIXTURE,
            optional=OPTIONAL
            | {"num_experts": "expert_count", "norm_topk_prob": "expert_weights_norm"},
            defaults={"norm_topk_prob": False},
            activations=SILU,
        ),
        HfFamily("gemma", "gemma", activations=GELU, adds_one=NORMS),
        HfFamily("gemma2", "gemma2", POST_NORMED, activations=GELU, adds_one=NORMS + POST_NORMS),
        HfFamily(
            "gemma3_text",
            "gemma3",
            POST_NORMED,
            activations=GELU,
            adds_one=NORMS + POST_NORMS + QK_NORMS,
            rope_base=1e6,
        ),
        HfFamily("phi3", "phi3", FUSED, activations=SILU),
        HfFamily(
            "stablelm",
            "stablelm",
            required=COUNTS | {"layer_norm_eps": "attention.layer_norm_epsilon"},
            defaults={"partial_rotary_factor": 0.25, "layer_norm_eps": 1e-5},
            activations=SILU,
        ),
        HfFamily(
            "falcon",
            "falcon",
            FALCON,
            FALCON_OUTSIDE,
            required=COUNTS | {"layer_norm_epsilon": "attention.layer_norm_epsilon"},
            defaults={"max_position_embeddings": 2048, "layer_norm_epsilon": 1e-5},
            activations={"gelu": None, "relu": "relu"},
            normalise=_falcon,
            settled=(
                ("alibi", (None, False)),
                ("bias", (None, False)),
                ("parallel_attn", (None, True)),
                ("apply_residual_connection_post_layernorm", (None, False)),
            ),
        ),
        HfFamily(
            "opt",
            "opt",
            OPT,
            OPT_OUTSIDE,
            required=OPT_COUNTS,
            activations={"relu": None},
            constants={"attention.layer_norm_epsilon": 1e-5},
            settled=(
                ("do_layer_norm_before", (None, True)),
                ("_remove_final_layer_norm", (None, False)),
                ("enable_bias", (None, True)),
                ("layer_norm_elementwise_affine", (None, True)),
            ),
        ),
        HfFamily(
            "bamboo", "bamboo", interleaved=LLAMA_ROPE, activations={"relu": None, "drelu": None}
        ),
        HfFamily(
            "turbosparsemixtral",
            "turbosparsemixtral",
            MIXTRAL,
            required=COUNTS | RMS_NORM | MIXTURE | LOCAL_EXPERTS,
            interleaved=LLAMA_ROPE,
            rope_base=1e6,
            activations={"relu": None, "drelu": None},
        ),
    )
}
HF_TYPES = " ".join(HF_FAMILIES)

# Keys of config.json that would change the arithmetic, with the values that do not.
NEUTRAL: tuple[tuple[str, tuple[object, ...]], ...] = (
    ("mlp_bias", (None, False)),
    ("clip_qkv", (None,)),
    ("decoder_sparse_step", (None, 1)),
    ("mlp_only_layers", (None, [])),
    ("is_encoder_decoder", (None, False)),
)
