"""How attention is cut into units, and the scratch an executor needs for one."""

from __future__ import annotations

from polyneuron.config import EngineConfig
from polyneuron.kernels.gemv import attention_block_scratch
from polyneuron.kernels.quant import KV_BLOCK_TOKENS
from polyneuron.model.spec import ModelSpec

QUERY_ROWS = 64
"""Heads of all tokens of a unit of a prompt: so many share each converted key and value."""
SCRATCH_MAX_BYTES = 1 << 20
"""In contexts so long that scores take more, executors take fewer tokens at once."""


def prompt_tokens(spec: ModelSpec) -> int:
    """Tokens of a prompt that are a unit of attention, with the heads of one KV head."""
    return max(1, QUERY_ROWS // (spec.num_heads // spec.num_kv_heads))


def scratch_bytes(spec: ModelSpec, config: EngineConfig) -> int:
    """Bytes of scratch of one executor: for scores of one token always, of a unit up to a limit."""
    group = spec.num_heads // spec.num_kv_heads
    one = 4 * group * -(-config.num_ctx // KV_BLOCK_TOKENS) * KV_BLOCK_TOKENS
    rows = group * min(prompt_tokens(spec), config.max_tokens)
    unit = 4 * attention_block_scratch(rows, spec.head_dim, config.num_ctx)
    return max(one, min(unit, SCRATCH_MAX_BYTES))
