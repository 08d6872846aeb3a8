"""Tensors that files keep as one and the model knows as several: cut into ranges of rows.

Rows follow each other in a GGUF, so a part is the same file's bytes from another offset on.
"""

import re
from collections.abc import Iterator
from dataclasses import replace

from polyneuron.errors import FormatError
from polyneuron.io.gguf_file import GgufHeader, GgufTensor
from polyneuron.model.families import FAMILIES
from polyneuron.model.metadata import ModelKeys

_FUSED = re.compile(r"(blk\.\d+\.)(attn_qkv|ffn_up)(\.weight|\.bias)")
Part = tuple[str, int]
"""A role and its rows."""


def split_fused(header: GgufHeader) -> GgufHeader:
    """The header with q, k and v, and gate and up, apart; itself where they are."""
    parts = _parts(header)
    tensors = tuple(piece for tensor in header.tensors for piece in _cut(header, tensor, parts))
    if len(tensors) == len(header.tensors):
        return header
    by_name = {tensor.name: tensor for tensor in tensors}
    if len(by_name) < len(tensors):
        raise FormatError(f"{header.path}: a fused tensor is there beside its parts; damaged")
    return replace(header, tensors=tensors, by_name=by_name)


def _parts(header: GgufHeader) -> dict[str, list[Part]]:
    """What a fused tensor holds; nothing where keys are missing, which is told elsewhere."""
    architecture = header.metadata.get("general.architecture")
    if architecture not in FAMILIES:
        return {}
    keys = ModelKeys(header, architecture)
    num_heads, d_model = keys.count("attention.head_count"), keys.count("embedding_length")
    head_dim = keys.count("attention.key_length", max(d_model // num_heads, 1))
    kv_dim = keys.count("attention.head_count_kv", num_heads) * head_dim
    d_ff = keys.count("feed_forward_length")
    if keys.missing:
        return {}
    qkv = [("attn_q", num_heads * head_dim), ("attn_k", kv_dim), ("attn_v", kv_dim)]
    return {"attn_qkv": qkv, "ffn_up": [("ffn_gate", d_ff), ("ffn_up", d_ff)]}


def _cut(
    header: GgufHeader, tensor: GgufTensor, parts: dict[str, list[Part]]
) -> Iterator[GgufTensor]:
    """The parts of a tensor, or itself; `ffn_up` is fused where it has gate's rows, too."""
    found = _FUSED.fullmatch(tensor.name)
    pieces = parts.get(found[2], []) if found else []
    if not found or tensor.shape[0] != sum(rows for _, rows in pieces):
        yield tensor
        return
    first, row_bytes = 0, tensor.num_bytes // tensor.shape[0]
    for role, rows in pieces:
        yield replace(
            tensor,
            name=f"{found[1]}{role}{found[3]}",
            shape=(rows, *tensor.shape[1:]),
            offset=tensor.offset + first * row_bytes,
            num_bytes=rows * row_bytes,
        )
        first += rows
