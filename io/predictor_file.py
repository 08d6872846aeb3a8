"""A model's predictors: the file beside it, in the container of neuron-cluster files.

A predictor names the neurons of a layer that are worth computing (DESIGN §10, PAPER §1.9):
`score = fc2 @ act(fc1 @ x)`, or `fc2 @ x` without an fc1, or `fc2 @ x + up @ x`; neuron i is
predicted when `score[i] > threshold[i]`. x is the layer's normed input, rounded to int8 blocks as
for any matrix.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray

from polyneuron.errors import ConfigError, FormatError
from polyneuron.io.file_kind import beside
from polyneuron.io.ncf_fields import Fields
from polyneuron.io.ncf_format import (
    LINE_BYTES,
    PAGE_BYTES,
    Layout,
    NcfManifest,
    NcfSection,
    NcfSource,
    NcfTensor,
    SectionKind,
    round_up,
    stored_bytes,
)
from polyneuron.io.ncf_manifest import encode_manifest
from polyneuron.io.ncf_pieces import MadePiece
from polyneuron.io.ncf_reader import read_ncf
from polyneuron.io.ncf_writer import NcfPlan, NcfWriter, laid_out
from polyneuron.io.output_file import OutputFile, Progress, write_output
from polyneuron.kernels.quant import BLOCK_COLS, StorageType, pack_tiles_from_f32

SUFFIX = ".predictors"
SOURCE_FORMAT = "predictors"
SECTION = "predictors"
METADATA_KEY = "predictors"
NAMED_KEY = "predictors.named"
NAMED_SCALE = 65535
"""Shares of tokens are kept as 16-bit words."""
HALF_MAX = 65504.0
F32 = NDArray[np.float32]


class PredictorInput(StrEnum):
    """Which normed rows a predictor reads."""

    ATTENTION = "attention"
    """The input of the layer's attention, so that reads are under way while that is computed."""
    FFN = "ffn"
    """The input of the layer's feed-forward block."""


@dataclass(frozen=True, slots=True, eq=False)
class LayerPredictor:
    """One layer's predictor in floats, as it is made."""

    fc1: F32 | None
    """(rank, d_model), rank a multiple of 32; None: fc2 reads the input itself."""
    fc2: F32
    """(d_ff, rank) or (d_ff, d_model), rows in the order of the model file's bundles."""
    threshold: F32
    """(d_ff)"""
    up: F32 | None = None
    """A second matrix (d_ff, d_model) on the input, whose product is added; only without fc1."""

    @property
    def rank(self) -> int:
        """Values between fc1 and fc2; 0 without an fc1."""
        return 0 if self.fc1 is None else len(self.fc1)


@dataclass(frozen=True, slots=True)
class PredictorInfo:
    """What holds for the predictors of all layers."""

    kind: str
    """How they were made: low-rank, sign, mlp, imported, oracle."""
    input: PredictorInput
    is_relu: bool
    """Whether negative values between fc1 and fc2 become zero."""
    fc1_type: StorageType
    fc2_type: StorageType
    report: Mapping[str, Any]
    """What they cost and keep, as measured when they were made; plain data."""
    has_up: bool = False
    """Whether scores are sums of two products; ranks are 0 then."""


@dataclass(frozen=True, slots=True, eq=False)
class PredictorFile:
    """A file of predictors, its head read and checked; matrices are tiles in one section."""

    path: Path
    info: PredictorInfo
    ranks: tuple[int, ...]
    """Of each layer; 0 without an fc1."""
    section: NcfSection
    tensors: Mapping[str, NcfTensor]
    """By name: blk.N.predictor.fc1, .fc2, .up, .threshold."""
    named: F32 | None = None
    """(layers, d_ff): the share of a text's tokens for which each neuron is named, in the order of
    the model file's bundles; None in files that do not tell."""


def predictor_path(model: Path) -> Path:
    """Where a model's predictors are kept."""
    return beside(model, SUFFIX)


def model_key(manifest: NcfManifest) -> str:
    """Names a neuron-cluster file by all its checksums and the order of its bundles."""
    data_offset = manifest.sections[0].offset
    return hashlib.sha256(encode_manifest(manifest, data_offset)).hexdigest()


def tensor_name(layer: int, role: str) -> str:
    """The name of a predictor's tensor."""
    return f"blk.{layer}.predictor.{role}"


def write_predictors(
    path: Path,
    key: str,
    info: PredictorInfo,
    ranks: Sequence[int],
    layers: Iterable[LayerPredictor],
    shape: tuple[int, int],
    *,
    named: F32 | None = None,
    force: bool = False,
    progress: Progress = lambda done, total: None,
) -> None:
    """Write the predictors of the model file named by `key` (`model_key`).

    `shape` is (d_ff, d_model); `layers` are taken one after another, each with its rank in
    `ranks` (0 without an fc1), so that they need not be in memory together. `named` (layers, d_ff)
    are the shares of tokens for which neurons are named. FormatError names a tensor that holds what
    its storage cannot.
    """
    plan = _plan(key, info, ranks, shape, named)
    output = OutputFile(
        path,
        plan.file_bytes,
        open_writer=lambda: NcfWriter(path, plan, "predictors-1"),
        pieces=lambda done: _pieces(path, plan, layers, done),
        holds=lambda: False,
    )
    write_output(output, force, progress)


def _plan(
    key: str,
    info: PredictorInfo,
    ranks: Sequence[int],
    shape: tuple[int, int],
    named: F32 | None,
) -> NcfPlan:
    tensors: list[NcfTensor] = []
    end = 0
    for layer, rank in enumerate(ranks):
        for role, storage, rows, cols in _matrices(info, rank, shape):
            num_bytes = stored_bytes(storage, rows, cols)
            name, start = tensor_name(layer, role), round_up(end, LINE_BYTES)
            place = (0, start, num_bytes, 0, "F32")
            tensors.append(NcfTensor(name, layer, f"predictor.{role}", storage, rows, cols, *place))
            end = start + num_bytes
    num_bytes = round_up(end, PAGE_BYTES)
    head = {
        "kind": info.kind, "input": str(info.input), "is_relu": info.is_relu,
        "fc1_type": info.fc1_type.name.lower(), "fc2_type": info.fc2_type.name.lower(),
        "ranks": np.array(ranks, "<u4").tobytes(), "report": dict(info.report),
        "has_up": info.has_up,
    }  # fmt: skip
    section = NcfSection(SECTION, SectionKind.FIXED, 0, num_bytes, np.zeros(0, np.uint32))
    metadata = {METADATA_KEY: msgpack.packb(head)}
    if named is not None:
        words = np.rint(np.clip(named, 0, 1) * NAMED_SCALE).astype("<u2")
        metadata[NAMED_KEY] = words.reshape(len(ranks), shape[0]).tobytes()
    source = NcfSource(SOURCE_FORMAT, num_bytes, key)
    return laid_out(NcfManifest(Layout.TILES, {}, metadata, source, (section,), tuple(tensors)))


def _matrices(
    info: PredictorInfo, rank: int, shape: tuple[int, int]
) -> Iterator[tuple[str, StorageType | None, int, int]]:
    """A layer's tensors in their order: role, storage, rows, columns."""
    d_ff, d_model = shape
    if rank % BLOCK_COLS:
        raise ValueError(f"rank: {rank} is not a multiple of {BLOCK_COLS}")
    if rank:
        yield "fc1", info.fc1_type, rank, d_model
    yield "fc2", info.fc2_type, d_ff, rank or d_model
    if info.has_up:
        yield "up", info.fc2_type, d_ff, d_model
    yield "threshold", None, 1, d_ff


def _pieces(
    path: Path, plan: NcfPlan, layers: Iterable[LayerPredictor], done: int
) -> Iterator[MadePiece]:
    """A piece a layer, from the section's last byte written on."""
    tensors, at = plan.manifest.tensors, 0
    num_bytes = plan.manifest.sections[0].num_bytes
    for index, layer in enumerate(layers):
        mine = [tensor for tensor in tensors if tensor.layer_id == index]
        is_last = mine[-1] is tensors[-1]
        end = num_bytes if is_last else mine[-1].offset + mine[-1].num_bytes
        piece = np.zeros(end - at, np.uint8)
        for tensor in mine:
            start = tensor.offset - at
            piece[start : start + tensor.num_bytes] = _stored(path, tensor, layer)
        at = end
        if index >= done:
            yield MadePiece(piece.data, {})


def _stored(path: Path, tensor: NcfTensor, layer: LayerPredictor) -> NDArray[np.uint8]:
    values = getattr(layer, tensor.role.rpartition(".")[2])
    if values is None or values.size != tensor.rows * tensor.cols:
        raise ValueError(f"{tensor.name}: not ({tensor.rows}, {tensor.cols})")
    is_float = tensor.storage in (None, StorageType.F32)
    if not np.isfinite(values).all() or not (is_float or np.abs(values).max() <= HALF_MAX):
        raise FormatError(
            f"{path}: {tensor.name} would hold values that are not finite numbers, or beyond what "
            "it is stored as; make the predictors of another text, or of another kind"
        )
    if tensor.storage is None:
        padded = np.zeros(tensor.num_bytes // 4, np.float32)
        padded[: tensor.cols] = values
        return padded.view(np.uint8)
    return pack_tiles_from_f32(tensor.storage, np.ascontiguousarray(values, np.float32))


def read_predictors(path: Path, key: str, num_layers: int, shape: tuple[int, int]) -> PredictorFile:
    """The head of a model's predictors, checked against the model: its key, layers and shape.

    Raises ConfigError when they are another model's, FormatError when they are none or damaged.
    """
    try:
        ncf = read_ncf(path)
    except FormatError as error:
        raise FormatError(f"{error}; predictors are made anew by polyneuron profile") from None
    packed = ncf.manifest.metadata.get(METADATA_KEY)
    if ncf.manifest.source.format != SOURCE_FORMAT or not isinstance(packed, bytes):
        raise FormatError(f"{path}: not a file of predictors; make one with polyneuron profile")
    if ncf.manifest.source.key != key:
        raise ConfigError(
            f"{path}: these predictors were made for another model file; make them anew with "
            "polyneuron profile"
        )
    try:
        head = msgpack.unpackb(packed)
    except (ValueError, msgpack.UnpackException) as error:
        raise FormatError(f"{path}: its description is no msgpack ({error}); damaged") from None
    fields = Fields(str(path), "the description", head)
    ranks = tuple(int(rank) for rank in fields.words("ranks"))
    info = PredictorInfo(
        kind=fields.text("kind"),
        input=fields.choice("input", PredictorInput),
        is_relu=fields.flag("is_relu"),
        fc1_type=fields.choice("fc1_type", StorageType),
        fc2_type=fields.choice("fc2_type", StorageType),
        report=fields.mapping("report"),
        has_up=fields.has("has_up") and fields.flag("has_up"),
    )
    if len(ranks) != num_layers:
        fields.fail(f"has {len(ranks)} layers, the model has {num_layers}")
    if any(rank % BLOCK_COLS for rank in ranks):
        fields.fail(f"has ranks that are no multiples of {BLOCK_COLS}")
    if info.has_up and any(ranks):
        fields.fail("has second matrices beside ranks")
    for layer, rank in enumerate(ranks):
        for role, storage, rows, cols in _matrices(info, rank, shape):
            tensor = ncf.tensor(tensor_name(layer, role))
            if (tensor.storage, tensor.rows, tensor.cols) != (storage, rows, cols):
                fields.fail(f"has another shape in {tensor.name} than the model asks for")
    words = ncf.manifest.metadata.get(NAMED_KEY)
    named = None if words is None else _named(fields, words, (num_layers, shape[0]))
    return PredictorFile(path, info, ranks, ncf.sections[0], ncf.by_name, named)


def _named(fields: Fields, words: Any, shape: tuple[int, int]) -> F32:
    if not isinstance(words, bytes) or len(words) != 2 * shape[0] * shape[1]:
        fields.fail(f"has no {shape[0]} x {shape[1]} words in {NAMED_KEY}")
    shares = np.frombuffer(words, "<u2").reshape(shape).astype(np.float32)
    return shares / np.float32(NAMED_SCALE)
