"""Small files of random weights, as `polyneuron synth` writes the big ones."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyneuron.io.ncf_reader import NcfFile
from polyneuron.kernels.quant import BLOCK_COLS, StorageType
from polyneuron.synth.shapes import shape_spec
from polyneuron.synth.write import SynthReport, SynthSettings, synthesize
from tests.support.tiny_ncf import stored

SMALL: dict[str, int] = {
    "num_layers": 2, "d_model": 128, "d_ff": 192, "num_heads": 4, "num_kv_heads": 2,
    "vocab_size": 512,
}  # fmt: skip
ODD = {**SMALL, "d_model": 96, "num_heads": 2, "num_kv_heads": 1, "d_ff": 160, "vocab_size": 301}
"""Rows of no whole words, a last tile that is not full."""


EXPERTS = {"num_layers": 2, "d_model": 128, "d_ff": 96, "num_heads": 4, "num_kv_heads": 2}
"""Of a mixture, whose layers have several times so many neurons."""


def small_settings(shape: str = "bamboo-7b", **changes: Any) -> SynthSettings:
    """A shape made small; fields of the spec by their names, all others of the settings."""
    counts = {**SMALL, **{key: changes.pop(key) for key in SMALL if key in changes}}
    return SynthSettings(shape_spec(shape, **counts), **changes)


def write_synth(
    folder: Path, settings: SynthSettings | None = None, *, twin: bool = True, **flags: Any
) -> list[SynthReport]:
    """Write `synth.ncf` and its twin `synth.gguf`."""
    settings = settings or small_settings()
    gguf = folder / "synth.gguf" if twin else None
    return list(synthesize(settings, folder / "synth.ncf", gguf, **flags))


def bundle_values(ncf: NcfFile, name: str) -> NDArray[np.float32]:
    """The values (num_neurons, d_model) of one tensor of a file in bundles, by plain numpy."""
    tensor = ncf.tensor(name)
    rows = np.ascontiguousarray(stored(ncf, name))
    num_blocks = tensor.cols // BLOCK_COLS
    match tensor.storage:
        case StorageType.Q4:
            packed = rows[:, : num_blocks * 16].reshape(-1, num_blocks, 16)
            quants = np.concatenate([packed & 15, packed >> 4], axis=2).astype(np.int8) - 8
        case StorageType.Q8:
            quants = rows[:, : tensor.cols].view(np.int8).reshape(-1, num_blocks, 32)
        case _:
            return rows.view(np.float16).astype(np.float32)
    scales = np.ascontiguousarray(rows[:, -2 * num_blocks :]).view(np.float16).astype(np.float32)
    values: NDArray[np.float32] = quants.astype(np.float32) * scales[:, :, None]
    return values.reshape(tensor.rows, tensor.cols)
