"""PowerInfer's GGUFs of tiny models: down turned, predictors beside it, the magic changed."""

from pathlib import Path

from polyneuron.io.gguf_file import read_header
from polyneuron.io.gguf_tensors import GgufTensor
from polyneuron.io.gguf_writer import plan_gguf_file
from tests.support.predictor_sources import pairs
from tests.support.random_blocks import encode
from tests.support.tiny_gguf import TinyModel, random_weights, write_tiny_gguf

TYPE_IDS = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 8}


def write_pwri_model(
    path: Path,
    model: TinyModel,
    *,
    threshold: float | None = 0.0,
    architecture: str | None = None,
    rank: int = 32,
) -> Path:
    """By the product's writer; keys are those of a plain GGUF of the model, which is not kept."""
    plain = path.with_suffix(".plain")
    metadata = dict(read_header(write_tiny_gguf(plain, model)).metadata)
    plain.unlink()
    if architecture is not None:
        metadata["general.architecture"] = architecture
    if threshold is not None:
        metadata["powerinfer.sparse_threshold"] = threshold
    data: dict[str, bytes] = {}
    table: list[GgufTensor] = []
    for name, values in random_weights(model).items():
        is_down = name.endswith("ffn_down.weight")
        kind = model.tensor_type if values.ndim > 1 else "F32"
        stored = values.T.copy() if is_down else values
        called = name.replace("ffn_down", "ffn_down_t")  # its bias, too
        data[called] = (stored if kind == "F32" else encode(kind, stored)).tobytes()
        table.append(GgufTensor(called, TYPE_IDS[kind], stored.shape, 0, len(data[called])))
    shape = (model.d_ff, model.d_model)
    for layer, pair in enumerate(pairs(model.num_layers, shape, rank)):
        for role, values in zip(("fc1", "fc2"), pair, strict=True):
            name = f"blk.{layer}.{role}.weight"
            data[name] = values.tobytes()
            table.append(GgufTensor(name, 0, values.shape, 0, values.nbytes))
    plan = plan_gguf_file(metadata, table)
    raw = bytearray(plan.file_bytes)
    raw[: len(plan.head)] = plan.head
    raw[:4] = b"PWRI"
    for tensor in plan.tensors:
        raw[tensor.offset : tensor.offset + tensor.num_bytes] = data[tensor.name]
    path.write_bytes(raw)
    return path
