"""One tiny model of every family and variant; their logits are in tests/data/families."""

from dataclasses import replace
from pathlib import Path

from polyneuron.model.block import Residual
from polyneuron.model.spec import RopeScaling
from tests.support.tiny_gguf import TinyModel

DATA = Path(__file__).resolve().parents[1] / "data" / "families"

_SMALL = TinyModel(
    d_model=32,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    d_ff=64,
    tensor_type="F16",
    embedding_type="F16",
)
_QWEN2 = replace(_SMALL, family="qwen2", seed=6)
_MIXTURE = replace(_SMALL, num_experts=4, d_ff=32, tied_head=False)

FAMILY_CASES: dict[str, TinyModel] = {
    "llama_tied": replace(_SMALL, seed=1),
    "llama_untied": replace(_SMALL, seed=2, tied_head=False),
    "llama_biases": replace(_SMALL, seed=3, qkv_bias=True, output_bias=True),
    "llama3_scaling": replace(_SMALL, seed=4, rope_scaling=RopeScaling.LLAMA3),
    "llama_linear_scaling": replace(_SMALL, seed=5, rope_scaling=RopeScaling.LINEAR),
    "mistral": replace(_SMALL, family="mistral", seed=7, tied_head=False, window=0),
    "qwen2": _QWEN2,
    "qwen2_yarn": replace(_QWEN2, seed=8, rope_scaling=RopeScaling.YARN),
    "qwen3": replace(_SMALL, family="qwen3", seed=9, head_dim=16),
    "bamboo": replace(_SMALL, family="bamboo", seed=10, tied_head=False),
    "llama_reglu": replace(_SMALL, seed=11, activation="relu"),
    "mixtral": replace(_MIXTURE, seed=13),
    "qwen3moe": replace(_MIXTURE, family="qwen3moe", seed=14, num_used=3, head_dim=16),
    "olmoe": replace(_MIXTURE, family="olmoe", seed=15),
    "qwen2moe": replace(_MIXTURE, family="qwen2moe", seed=16, shared_d_ff=64),
    "turbosparsemixtral": replace(_MIXTURE, family="turbosparsemixtral", seed=17),
    "gemma": replace(_SMALL, family="gemma", seed=18, head_dim=16),
    "gemma2": replace(
        _SMALL, family="gemma2", seed=19, num_layers=3, attention_cap=2.0, logit_cap=6.0
    ),
    "gemma3": replace(_SMALL, family="gemma3", seed=20, num_layers=7, rope_base=1e6),
    "gemma3_scaling": replace(
        _SMALL, family="gemma3", seed=21, num_layers=7, rope_scaling=RopeScaling.LINEAR
    ),
    "mistral_window": replace(_SMALL, family="mistral", seed=22, window=9),
    "phi3": replace(_SMALL, family="phi3", seed=23, rotary_dim=6, window=11, tied_head=False),
    "phi3_long": replace(
        _SMALL, family="phi3", seed=29, rotary_dim=6, window=0, rope_scaling=RopeScaling.LONGROPE
    ),
    "phi3_short": replace(
        _SMALL,
        family="phi3",
        seed=30,
        window=0,
        rope_scaling=RopeScaling.LONGROPE,
        original_context=256,
    ),
    "stablelm": replace(
        _SMALL, family="stablelm", seed=24, rotary_dim=2, qkv_bias=True, tied_head=False
    ),
    "stablelm_parallel": replace(
        _SMALL, family="stablelm", seed=25, rotary_dim=2, residual=Residual.PARALLEL
    ),
    "falcon": replace(_SMALL, family="falcon", seed=26, num_kv_heads=1, tied_head=False),
    "falcon_two_norms": replace(_SMALL, family="falcon", seed=27, residual=Residual.PARALLEL_NORMS),
    "opt": replace(_SMALL, family="opt", seed=28, num_kv_heads=4, output_bias=True),
    "llama_relu_no_gate": replace(_SMALL, seed=12, activation="relu", has_gate=False),
}
DENSE_CASES = (
    "gemma", "gemma2", "gemma3", "mistral_window", "phi3", "phi3_long", "stablelm",
    "stablelm_parallel", "falcon", "falcon_two_norms", "opt",
)  # fmt: skip
"""Families of other blocks than Llama's, without experts."""
NUM_TOKENS = 40  # more than one KV block of 32


def gguf_path(case: str) -> Path:
    """The stored weights of a case."""
    return DATA / f"{case}.gguf"


def golden_path(case: str) -> Path:
    """Token ids (NUM_TOKENS) and logits (NUM_TOKENS, vocab_size) of a case."""
    return DATA / f"{case}.npz"
