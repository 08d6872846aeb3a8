"""A vocabulary that any text can be written in, of any size, and the keys that go with it."""

from __future__ import annotations

from typing import Any

import numpy as np

from polyneuron.model.spec import ModelSpec
from polyneuron.model.vocabulary import TokenType

CONTROL = (("<unk>", TokenType.UNKNOWN), ("<s>", TokenType.CONTROL), ("</s>", TokenType.CONTROL))
BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))
SPACE = "\u2581"
MIN_TOKENS = len(CONTROL) + len(BYTES) + 1
QUANTIZATION_VERSION = 2


def vocabulary_keys(num_tokens: int) -> dict[str, Any]:
    """`tokenizer.*` of an SPM vocabulary: all bytes, the space, and pieces that no text holds."""
    tokens = [*(text for text, _ in CONTROL), *BYTES, SPACE]
    tokens += [f"{SPACE}piece{number}" for number in range(num_tokens - len(tokens))]
    types = [*(kind for _, kind in CONTROL), *[TokenType.BYTE] * len(BYTES)]
    types += [TokenType.NORMAL] * (num_tokens - len(types))
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": -np.arange(num_tokens, dtype=np.float32),
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def file_keys(spec: ModelSpec) -> dict[str, Any]:
    """`general.*` and `tokenizer.*`, as both files have them."""
    return {
        "general.architecture": spec.family,
        "general.name": spec.name,
        "general.quantization_version": QUANTIZATION_VERSION,
        **vocabulary_keys(spec.vocab_size),
    }


def hyper_parameter_keys(spec: ModelSpec) -> dict[str, Any]:
    """The keys of the architecture, as a GGUF has them."""
    values = {
        "context_length": spec.context_length,
        "embedding_length": spec.d_model,
        "block_count": spec.num_layers,
        "feed_forward_length": spec.d_ff,
        "attention.head_count": spec.num_heads,
        "attention.head_count_kv": spec.num_kv_heads,
        "attention.key_length": spec.head_dim,
        "attention.value_length": spec.head_dim,
        "attention.layer_norm_rms_epsilon": spec.norm_eps,
        "rope.dimension_count": spec.rope.rotary_dim,
        "rope.freq_base": spec.rope.base,
        "vocab_size": spec.vocab_size,
    }
    if spec.experts is not None:
        values |= {
            "expert_count": spec.experts.num_experts,
            "expert_used_count": spec.experts.num_used,
            "expert_feed_forward_length": spec.d_ff,
        }
    return {f"{spec.family}.{key}": value for key, value in values.items()}
