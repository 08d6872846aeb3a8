"""Fused tensors seen as their parts: names, shapes, and the very bytes."""

from pathlib import Path

import numpy as np
import pytest

from polyneuron.errors import FormatError
from polyneuron.io.gguf_file import GgufHeader, read_header
from polyneuron.model.fused import split_fused
from tests.support.random_blocks import encode
from tests.support.tiny_gguf import TinyModel, random_weights, write_tiny_gguf

PHI3 = TinyModel(family="phi3", tensor_type="Q4_0", num_heads=4, num_kv_heads=2)
SHAPES = {
    "attn_q": (64, 64),
    "attn_k": (32, 64),
    "attn_v": (32, 64),
    "ffn_gate": (96, 64),
    "ffn_up": (96, 64),
}


def raw(header: GgufHeader, name: str) -> bytes:
    """The bytes of a tensor."""
    tensor = header.tensor(name)
    return header.path.read_bytes()[tensor.offset : tensor.offset + tensor.num_bytes]


def test_parts_are_the_rows_they_were_made_of(tmp_path: Path) -> None:
    path, weights = write_tiny_gguf(tmp_path / "phi3.gguf", PHI3), random_weights(PHI3)
    header, stored = split_fused(read_header(path)), read_header(path)
    assert {"blk.1.attn_qkv.weight", "blk.1.ffn_up.weight"} <= set(stored.by_name)
    assert set(header.by_name) == set(weights)
    for role, shape in SHAPES.items():
        name = f"blk.1.{role}.weight"
        assert header.tensor(name).shape == shape
        assert raw(header, name) == encode("Q4_0", weights[name]).tobytes()


def test_header_without_fused_tensors_is_itself(tmp_path: Path) -> None:
    for family in ("llama", "opt", "gemma2"):
        header = read_header(write_tiny_gguf(tmp_path / "m.gguf", TinyModel(family=family)))
        assert split_fused(header) is header


def test_part_beside_its_fused_tensor_is_refused(tmp_path: Path) -> None:
    model = TinyModel(family="falcon", num_kv_heads=1)
    weights = random_weights(model)
    twice = {"blk.0.attn_qkv.weight": np.zeros((96, 64), np.float32)}
    path = write_tiny_gguf(
        tmp_path / "m.gguf", model, weights=weights | twice, skip_tensors=("blk.0.attn_k.weight",)
    )
    with pytest.raises(FormatError, match=r"m\.gguf: a fused tensor is there beside its parts"):
        split_fused(read_header(path))
