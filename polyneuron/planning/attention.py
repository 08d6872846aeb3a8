"""How attention is cut into units, and the scratch an executor needs for one."""

from __future__ import annotations

from polyneuron.config import EngineConfig, KvType
from polyneuron.errors import ConfigError
from polyneuron.kernels.gemv import attention_block_scratch
from polyneuron.kernels.quant import BLOCK_COLS, KV_BLOCK_TOKENS, StorageType, kv_block_bytes
from polyneuron.model.spec import ModelSpec

QUERY_ROWS = 64
"""Heads of all tokens of a unit of a prompt: so many share each converted key and value."""
SCRATCH_MAX_BYTES = 1 << 20
"""In contexts so long that scores take more, executors take fewer tokens at once."""


def kv_storage(kv_type: KvType) -> StorageType:
    """The storage type of keys and values."""
    return StorageType[kv_type.name]


def check_kv_type(spec: ModelSpec, kv_type: KvType) -> None:
    """Raise ConfigError when a model's heads cannot be stored so."""
    if kv_storage(kv_type).is_quantised and spec.head_dim % BLOCK_COLS:
        raise ConfigError(
            f"--kv-type {kv_type}: this model's heads have {spec.head_dim} values, which do not "
            f"fill blocks of {BLOCK_COLS}; use --kv-type f16"
        )


def kv_layer_block_bytes(spec: ModelSpec, kv_type: KvType) -> int:
    """Bytes of the keys and values of 32 positions in one layer."""
    return spec.num_kv_heads * kv_block_bytes(spec.head_dim, kv_storage(kv_type))


def kv_position_bytes(spec: ModelSpec, kv_type: KvType) -> int:
    """Bytes of the keys and values of one position in all layers."""
    return spec.num_layers * kv_layer_block_bytes(spec, kv_type) // KV_BLOCK_TOKENS


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
