"""The GGUF twin of a file of random weights: the same weights, for other engines to run.

Its architecture is one that other engines know, for most shapes `llama`. No other engine knows
dReLU, so one that is told nothing computes SiLU: the same work on the same bytes. The key
ACTIVATION_KEY tells ours.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from polyneuron.io.gguf_writer import GgufPlan, GgufWriter, is_planned, plan_gguf_file
from polyneuron.io.ncf_pieces import MadePiece
from polyneuron.io.output_file import OutputFile
from polyneuron.kernels.gemv import FeedForwardKind
from polyneuron.kernels.quant import GgmlType
from polyneuron.model.architecture import ACTIVATION_KEY
from polyneuron.synth.pieces import PACK_ROWS, made_ahead
from polyneuron.synth.vocabulary import file_keys, hyper_parameter_keys
from polyneuron.synth.weights import WeightSource

FAMILY = "llama"
KEEP_THEIRS = ("qwen3moe",)
"""Families whose files need an architecture of their own."""
SETTINGS_KEY = "polyneuron.synth.key"
FILE_TYPES = {"q4": 2, "q8": 7, "f16": 1}
"""Values of general.file_type."""
PIECE_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class TwinPiece:
    """A run of rows of one tensor and the zeros behind it; no tensor: the head."""

    index: int | None
    first_row: int
    num_rows: int
    num_bytes: int


def twin_keys(source: WeightSource, quant: str, settings_key: str) -> dict[str, Any]:
    """All metadata."""
    family = source.spec.family if source.spec.family in KEEP_THEIRS else FAMILY
    spec = replace(source.spec, family=family)
    keys = {
        **file_keys(spec),
        "general.file_type": FILE_TYPES[quant],
        **hyper_parameter_keys(spec),
        SETTINGS_KEY: settings_key,
    }
    if spec.feed_forward is not FeedForwardKind.SILU:
        keys[f"{family}.{ACTIVATION_KEY}"] = spec.feed_forward.name.lower()
    return keys


def cut_twin(plan: GgufPlan) -> Iterator[TwinPiece]:
    """All pieces; together they are the file, with zeros up to a page."""
    yield TwinPiece(None, 0, 0, len(plan.head))
    for index, tensor in enumerate(plan.tensors):
        most = max(1, PIECE_BYTES // tensor.row_bytes)
        for first in range(0, tensor.num_rows, most):
            count = min(most, tensor.num_rows - first)
            start = tensor.offset + first * tensor.row_bytes
            is_last = first + count == tensor.num_rows
            end = plan.end_of(index) if is_last else start + count * tensor.row_bytes
            yield TwinPiece(index, first, count, end - start)


class TwinPieces:
    """Makes any piece of the twin."""

    def __init__(self, source: WeightSource, plan: GgufPlan) -> None:
        self._source = source
        self._plan = plan

    def made(self, first: int) -> Iterator[MadePiece]:
        """All pieces from that number on."""
        return made_ahead(self.make, itertools.islice(cut_twin(self._plan), first, None))

    def make(self, piece: TwinPiece) -> MadePiece:
        """One piece."""
        if piece.index is None:
            return MadePiece(memoryview(self._plan.head), {})
        tensor = self._plan.tensors[piece.index]
        out, used = np.empty(piece.num_bytes, np.uint8), piece.num_rows * tensor.row_bytes
        if tensor.type_id == GgmlType.F32:
            out[:used] = self._source.vector(tensor.name).view(np.uint8)
        else:
            rows, coding = out[:used].reshape(piece.num_rows, -1), self._source.coding(tensor.name)
            for first in range(0, piece.num_rows, PACK_ROWS):
                some = rows[first : first + PACK_ROWS]
                made = self._source.rows(tensor.name, piece.first_row + first, len(some))
                coding.to_ggml(made, some)
        out[used:] = 0
        return MadePiece(out.data, {})


def twin_file(
    source: WeightSource, path: Path, keys: dict[str, Any], recipe: str, on_wait: Callable[[], None]
) -> OutputFile:
    """The twin, laid out."""
    plan = plan_gguf_file(keys, source.tensors.values())
    return OutputFile(
        path,
        plan.file_bytes,
        open_writer=lambda: GgufWriter(path, plan, f"{recipe} {PIECE_BYTES}", on_wait),
        pieces=TwinPieces(source, plan).made,
        holds=lambda: is_planned(path, plan),
    )
