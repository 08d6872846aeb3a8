"""Predictors as others keep them: PowerInfer's GGUF, safetensors; written by plain code."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from polyneuron.io.gguf_tensors import GgufTensor
from polyneuron.io.gguf_writer import plan_gguf_file

F32 = NDArray[np.float32]
Pairs = list[tuple[F32, F32]]
GGML = {"F32": 0, "F16": 1}


def pairs(num_layers: int, shape: tuple[int, int], rank: int = 32, seed: int = 0) -> Pairs:
    """Random fc1 (rank, d_model) and fc2 (d_ff, rank) of each layer; shape is (d_ff, d_model)."""
    rng, (d_ff, d_model) = np.random.default_rng(seed), shape
    return [
        (
            rng.standard_normal((rank, d_model)).astype(np.float32),
            rng.standard_normal((d_ff, rank)).astype(np.float32),
        )
        for _ in range(num_layers)
    ]


def write_pwri(path: Path, layers: Pairs, threshold: float | None = 0.0, kind: str = "F32") -> Path:
    """A PowerInfer GGUF that holds predictors alone: by the product's writer, the magic changed."""
    arrays = {
        f"blk.{layer}.{role}.weight": values.astype("<f2" if kind == "F16" else "<f4")
        for layer, pair in enumerate(layers)
        for role, values in zip(("fc1", "fc2"), pair, strict=True)
    }
    metadata: dict[str, object] = {"general.architecture": "bamboo"}
    if threshold is not None:
        metadata["powerinfer.sparse_threshold"] = threshold
    plan = plan_gguf_file(
        metadata,
        [GgufTensor(name, GGML[kind], a.shape, 0, a.nbytes) for name, a in arrays.items()],
    )
    raw = bytearray(plan.file_bytes)
    raw[: len(plan.head)] = plan.head
    raw[:4] = b"PWRI"
    for tensor in plan.tensors:
        raw[tensor.offset : tensor.offset + tensor.num_bytes] = arrays[tensor.name].tobytes()
    path.write_bytes(raw)
    return path


def write_safetensors(path: Path, arrays: Mapping[str, F32], dtype: str = "F32") -> Path:
    """Arrays of one type; BF16 is cut off, not rounded."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, values in arrays.items():
        if dtype == "BF16":
            raw = (np.ascontiguousarray(values, "<f4").view("<u4") >> 16).astype("<u2").tobytes()
        else:
            raw = values.astype({"F32": "<f4", "F16": "<f2", "I32": "<i4"}[dtype]).tobytes()
        place = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": dtype, "shape": list(values.shape), "data_offsets": place}
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def checkpoint(layers: Pairs, infix: str = "mlp.") -> dict[str, F32]:
    """The matrices by the names of a checkpoint."""
    return {
        f"model.layers.{layer}.{infix}predictor.{role}.weight": values
        for layer, pair in enumerate(layers)
        for role, values in zip(("fc1", "fc2"), pair, strict=True)
    }
