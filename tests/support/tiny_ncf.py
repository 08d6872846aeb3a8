"""Tiny neuron-cluster files, and their tensors read back without the product's reader."""

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from polyneuron.io import ncf_pieces, staged_file
from polyneuron.io.gguf_file import read_header
from polyneuron.io.ncf_reader import NcfFile
from polyneuron.io.pack import pack_rows_into, packed_bytes, storage_type, vector_values
from tests.support.tiny_gguf import TinyModel, write_tiny_gguf

SPARSE = TinyModel(
    family="bamboo", num_layers=2, d_model=64, d_ff=160, num_heads=4, num_kv_heads=2, head_dim=16,
    tensor_type="Q4_0",
)  # fmt: skip
SMALLEST = TinyModel(
    family="bamboo", num_layers=1, d_model=32, d_ff=32, num_heads=2, num_kv_heads=1, head_dim=16,
    tensor_type="Q4_0",
)  # fmt: skip


def write_source(folder: Path, model: TinyModel = SPARSE) -> Path:
    """A tiny GGUF."""
    return write_tiny_gguf(folder / "tiny.gguf", model)


def cut_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many pieces and many writes, so that faults have many places to happen."""
    monkeypatch.setattr(ncf_pieces, "READ_BYTES", 4096)
    monkeypatch.setattr(staged_file, "STAGE_BYTES", 8192)


def stored(ncf: NcfFile, name: str) -> NDArray[np.uint8]:
    """A tensor's bytes: tiles or vector (num_bytes), or rows of bundles (rows, row_bytes)."""
    tensor = ncf.tensor(name)
    raw = np.fromfile(ncf.path, np.uint8)
    start = ncf.file_offset(tensor)
    if not tensor.row_stride:
        return raw[start : start + tensor.num_bytes]
    row_bytes = tensor.num_bytes // tensor.rows
    index = start + tensor.row_stride * np.arange(tensor.rows)[:, None] + np.arange(row_bytes)
    rows: NDArray[np.uint8] = raw[index]
    return rows


def packed(source: Path, name: str) -> NDArray[np.uint8]:
    """A tensor of a GGUF as it lies in memory: packed whole, at once."""
    tensor = read_header(source).tensor(name)
    raw = source.read_bytes()[tensor.offset : tensor.offset + tensor.num_bytes]
    if len(tensor.shape) == 1:
        values = vector_values(tensor, raw)
        padded = np.zeros(-(-len(values) // 32) * 32, np.float32)
        padded[: len(values)] = values
        return padded.view(np.uint8)
    storage = storage_type(tensor)
    tiles = np.empty(packed_bytes(tensor, storage), np.uint8)
    pack_rows_into(tensor, storage, raw, tiles)
    return tiles
