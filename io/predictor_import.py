"""Predictors that come with a model: PowerInfer's GGUF, a folder of matrices, a checkpoint's.

All are `fc2(relu(fc1 x))` (PAPER §1.9, §4.1); a neuron is named where that is above one threshold
for all layers. Where they lie and what they read:

  PWRI GGUF          blk.N.fc1.weight, blk.N.fc2.weight     the stream before feed forward's norm
  folder             model_N.npz or model_N.safetensors     the same
  safetensors        ...layers.N...predictor.fc1.weight     feed forward's input, normed
"""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from polyneuron.errors import FormatError, UnsupportedError
from polyneuron.io.file_kind import GGUF_MAGIC, PWRI_MAGIC
from polyneuron.io.ggml_types import why_unsupported
from polyneuron.io.gguf_file import GgufHeader, read_header
from polyneuron.io.gguf_values import quoted
from polyneuron.io.pack import decode_rows, storage_type
from polyneuron.io.safetensors_file import SafetensorsFile, read_safetensors
from polyneuron.kernels.quant import StorageType

F32 = NDArray[np.float32]
Load = Callable[[], F32]

THRESHOLD_KEY = "powerinfer.sparse_threshold"
MOST_THRESHOLD = 1e30
"""In size; thresholds are kept in 32 bits."""
ROLES = ("fc1", "fc2")
IN_GGUF = re.compile(r"blk\.([0-9]{1,6})\.(fc[12])\.weight")
IN_CHECKPOINT = re.compile(r"(?:.*\.)?layers\.([0-9]{1,6})\.(.*\.)?predictor\.(fc[12])\.weight")
IN_FOLDER = re.compile(r"model_([0-9]{1,6})\.(npz|safetensors)")
PICKLES = (".pt", ".pth", ".bin")


@dataclass(frozen=True, slots=True, eq=False)
class PredictorImport:
    """Matrices of all layers, found and not yet read."""

    path: Path
    is_before_norm: bool
    """Whether fc1 reads the stream before feed forward's norm, or that norm's output."""
    threshold: float
    """A raw score, not a probability: 0 is a probability of one half."""
    fc2_type: StorageType
    """Four bits where the file has no more, else eight."""
    key: str
    """Changes with the files: their names, sizes and times."""
    loads: Mapping[tuple[int, str], Load] = field(repr=False)
    """By layer and fc1 or fc2."""

    def check(self, num_layers: int) -> None:
        """FormatError unless every layer of the model has both matrices, and none is left over."""
        found = {layer for layer, _ in self.loads}
        for layer in range(num_layers):
            for role in ROLES:
                if (layer, role) not in self.loads:
                    self.fail(f"has no {role} for layer {layer}")
        if len(found) > num_layers:
            self.fail(f"has predictors for {len(found)} layers, the model has {num_layers}")

    def pair(self, layer: int, shape: tuple[int, int]) -> tuple[F32, F32]:
        """fc1 (rank, d_model) and fc2 (d_ff, rank) of a layer; shape is (d_ff, d_model)."""
        fc1, fc2 = (self.loads[layer, role]() for role in ROLES)
        d_ff, d_model = shape
        is_right = fc1.ndim == 2 and fc1.size and fc1.shape[1] == d_model
        if not is_right or fc2.shape != (d_ff, len(fc1)):
            self.fail(
                f"has fc1 {fc1.shape} and fc2 {fc2.shape} in layer {layer}; the model needs "
                f"(rank, {d_model}) and ({d_ff}, rank)"
            )
        for role, values in zip(ROLES, (fc1, fc2), strict=True):
            if not np.isfinite(values).all():
                self.fail(f"has values that are not finite numbers in {role} of layer {layer}")
        return fc1, fc2

    def fail(self, message: str) -> NoReturn:
        """FormatError that says what to do."""
        raise FormatError(
            f"--import {self.path}: {message}; give the predictors of this model, or fit some "
            "with --predictor low-rank"
        )


def open_import(path: Path) -> PredictorImport:
    """Find the predictors in a PWRI GGUF, a safetensors file, or a folder of either kind.

    Raises FormatError or UnsupportedError naming the file and the cure.
    """
    if path.is_dir():
        return _of_folder(path)
    if path.suffix == ".safetensors":
        return _of_checkpoint(path, [path])
    _refuse_pickles(path, [path])
    return _of_gguf(path)


def _of_gguf(path: Path) -> PredictorImport:
    header = read_header(path, magics=(GGUF_MAGIC, PWRI_MAGIC))
    loads: dict[tuple[int, str], Load] = {}
    for name in header.by_name:
        if found := IN_GGUF.fullmatch(name):
            loads[int(found[1]), found[2]] = _gguf_load(header, name)
    threshold = _number(path, header.metadata.get(THRESHOLD_KEY, 0.0), THRESHOLD_KEY)
    scores = [header.by_name[f"blk.{layer}.fc2.weight"] for layer, role in loads if role == "fc2"]
    is_small = all(storage_type(tensor) is StorageType.Q4 for tensor in scores)
    return _import(path, True, threshold, [path], loads, is_small)


def _gguf_load(header: GgufHeader, name: str) -> Load:
    tensor = header.by_name[name]
    if (reason := why_unsupported(tensor.type_id)) is not None:
        raise UnsupportedError(f"{header.path}: tensor {quoted(name)} has type {reason}")

    def load() -> F32:
        with header.path.open("rb") as file:
            file.seek(tensor.offset)
            return decode_rows(tensor, file.read(tensor.num_bytes)).reshape(tensor.shape)

    return load


def _of_folder(path: Path) -> PredictorImport:
    """A folder of one file a layer, else a checkpoint's."""
    files = sorted(path.iterdir())
    _refuse_pickles(path, files)
    layers = {int(m[1]): file for file in files if (m := IN_FOLDER.fullmatch(file.name))}
    if not layers:
        return _of_checkpoint(path, [file for file in files if file.suffix == ".safetensors"])
    loads = {
        (layer, role): _file_load(file, role) for layer, file in layers.items() for role in ROLES
    }
    return _import(path, True, _folder_threshold(path), layers.values(), loads)


def _folder_threshold(path: Path) -> float:
    """`sparse_threshold` of the folder's config.json, as PowerInfer's converter takes it."""
    config = path / "config.json"
    if not config.exists():
        return 0.0
    try:
        values = json.loads(config.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise FormatError(f"{config}: cannot be read as JSON ({error})") from None
    found = values.get("sparse_threshold", 0.0) if isinstance(values, dict) else None
    return _number(config, found, "sparse_threshold")


def _number(path: Path, value: Any, name: str) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not abs(value) <= MOST_THRESHOLD:
        raise FormatError(f"{path}: {name} is no number up to {MOST_THRESHOLD:g}")
    return float(value)


def _file_load(file: Path, role: str) -> Load:
    """One matrix of a layer's own file, whose names are fc1.weight or plain fc1."""

    def load() -> F32:
        if file.suffix == ".npz":
            return _npz_matrix(file, role)
        found = read_safetensors(file)
        return found.matrix(_name_in(file, found.tensors, role))

    return load


def _npz_matrix(file: Path, role: str) -> F32:
    """Never a pickle; what else a damaged file makes zip, inflate and numpy raise has no end."""
    try:
        if not zipfile.is_zipfile(file):
            raise FormatError(f"{file}: is no npz, or cut off; save it with numpy.savez")
        with np.load(file, allow_pickle=False) as arrays, np.errstate(over="ignore"):
            values = arrays[_name_in(file, arrays.files, role)]
            if values.dtype.kind not in "fiu":
                raise FormatError(f"{file}: {role} is no matrix of numbers")
            return np.asarray(values, np.float32)
    except FormatError:
        raise
    except Exception as error:  # noqa: BLE001
        raise FormatError(f"{file}: cannot be read as npz ({error}); fetch it again") from None


def _name_in(file: Path, names: Iterable[str], role: str) -> str:
    for name in (f"{role}.weight", role):
        if name in names:
            return name
    raise FormatError(f"{file}: has neither {role}.weight nor {role}")


def _of_checkpoint(path: Path, files: list[Path]) -> PredictorImport:
    loads: dict[tuple[int, str], Load] = {}
    for file in files:
        found = read_safetensors(file)
        for name in found.tensors:
            if match := IN_CHECKPOINT.fullmatch(name):
                if "experts." in (match[2] or ""):
                    raise UnsupportedError(
                        f"--import {path}: {quoted(name)} is one of an expert with an fc1 of its "
                        "own, which is not read; make some with --predictor low-rank or sign"
                    )
                loads[int(match[1]), match[3]] = _checkpoint_load(found, name)
    return _import(path, False, 0.0, files, loads)


def _checkpoint_load(file: SafetensorsFile, name: str) -> Load:
    return lambda: file.matrix(name)


def _import(
    path: Path,
    is_before_norm: bool,
    threshold: float,
    files: Iterable[Path],
    loads: Mapping[tuple[int, str], Load],
    is_small: bool = False,
) -> PredictorImport:
    if not loads:
        raise FormatError(
            f"--import {path}: no predictors in it; they are blk.N.fc1.weight in a PowerInfer "
            "GGUF, model_N.npz or model_N.safetensors in a folder, or ...predictor.fc1.weight in "
            "safetensors"
        )
    stats = [(file.name, file.stat()) for file in files]
    key = repr([(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats])
    fc2_type = StorageType.Q4 if is_small else StorageType.Q8
    return PredictorImport(path, is_before_norm, threshold, fc2_type, key, loads)


def _refuse_pickles(path: Path, files: Iterable[Path]) -> None:
    """Python pickles run code when they are opened, and need torch."""
    pickles = [file for file in files if file.suffix in PICKLES]
    if pickles:
        raise UnsupportedError(
            f"--import {path}: {pickles[0].name} is a PyTorch pickle, which is not read; save "
            "fc1.weight and fc2.weight of each layer N with numpy.savez as model_N.npz"
        )
