"""What a file says of a family's departures from Llama: windows, caps, scales."""

from dataclasses import replace
from math import sqrt

import numpy as np

from polyneuron.io.gguf_values import quoted_value
from polyneuron.model.block import BlockSpec, Residual
from polyneuron.model.families import SUPPORTED_FAMILIES, Family, Presence
from polyneuron.model.metadata import ModelKeys

WINDOW, PATTERN = "attention.sliding_window", "attention.sliding_window_pattern"
SCALE = "attention.scale"
POSITIONS = "position_embd.weight"


def read_block(keys: ModelKeys, family: Family, num_layers: int, context_length: int) -> BlockSpec:
    """The family's block with what the file says set in it; what it cannot have is refused."""
    block = _windowed(keys, family, num_layers, context_length)
    block = replace(
        block,
        residual=_residual(keys, family),
        learned_positions=0 if family.has_rope else _positions(keys, family, context_length),
    )
    d_model, num_heads = keys.count("embedding_length"), keys.count("attention.head_count")
    if family.is_embedding_scaled:
        block = replace(block, embedding_scale=sqrt(d_model))
    if num_layers == family.narrow_heads_at:  # GGUFs have no key that says so
        block = replace(block, attention_scale=sqrt(num_heads / d_model))
    if family.is_embedding_scaled and keys.get(SCALE) is not None:
        block = replace(block, attention_scale=keys.number(SCALE))
    elif not family.is_embedding_scaled:
        keys.refuse_unless(SCALE, 0.0)
    return replace(
        block,
        attention_cap=_cap(keys, family, "attn_logit_softcapping", block.attention_cap),
        logit_cap=_cap(keys, family, "final_logit_softcapping", block.logit_cap),
    )


def _residual(keys: ModelKeys, family: Family) -> Residual:
    """By the norms that layers have: converters set the key whatever the model is."""
    names = keys.header.by_name
    if family.parallel is Presence.ABSENT:
        keys.refuse_unless("use_parallel_residual", False)
        return Residual.SEQUENTIAL
    if "blk.0.attn_norm_2.weight" in names:
        return Residual.PARALLEL_NORMS
    is_parallel = family.parallel is Presence.REQUIRED or "blk.0.ffn_norm.weight" not in names
    return Residual.PARALLEL if is_parallel else Residual.SEQUENTIAL


def _positions(keys: ModelKeys, family: Family, context_length: int) -> int:
    """Rows of the table of learned positions."""
    table = keys.header.by_name.get(POSITIONS)
    rows = context_length + family.block.position_offset if table is None else table.num_rows
    if rows <= family.block.position_offset:
        keys.fail(
            f"tensor {POSITIONS} has {rows} rows, of which position 0 would be behind the end"
        )
    return rows


def _cap(keys: ModelKeys, family: Family, key: str, default: float) -> float:
    if not family.is_capped:
        keys.refuse_unless(key, 0.0)
        return default
    return 0.0 if keys.get(key) == 0.0 else keys.number(key, default)


def _windowed(keys: ModelKeys, family: Family, num_layers: int, context_length: int) -> BlockSpec:
    """The family's block with the file's window; without one all layers are global."""
    found, block = keys.get(WINDOW), family.block
    if family.window is Presence.ABSENT:
        reaches_all = isinstance(found, int) and (found == 0 or found >= context_length)
        if found is not None and not reaches_all:
            keys.unsupported(
                f"sliding-window attention ({family.name}.{WINDOW} = {quoted_value(found)}) is "
                f"not supported; supported: {SUPPORTED_FAMILIES} with full attention"
            )
        return block
    window = 0 if found == 0 else keys.count(WINDOW, block.window)
    if not window:
        return replace(block, window=0, window_period=0, local_rope_base=0.0)
    if block.local_rope_base:
        base = keys.number("rope.freq_base_swa", block.local_rope_base)
        block = replace(block, local_rope_base=base)
    block = replace(block, window=window)
    _check_pattern(keys, block, num_layers)
    return block


def _check_pattern(keys: ModelKeys, block: BlockSpec, num_layers: int) -> None:
    """A pattern is the number of layers in a period, or one flag a layer."""
    found = keys.get(PATTERN)
    if isinstance(found, np.ndarray | list):
        if [bool(flag) for flag in found] != [block.is_local(i) for i in range(num_layers)]:
            keys.unsupported(f"{keys.architecture}.{PATTERN} differs from the family's own")
    else:
        keys.refuse_unless(PATTERN, block.window_period)
