"""Cuts a conversion into pieces, in the order of the file, and makes each from the GGUF."""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyneuron.errors import FormatError
from polyneuron.io.block_device import ByteRange
from polyneuron.io.gguf_file import GgufHeader
from polyneuron.io.gguf_tensors import GgufTensor
from polyneuron.io.model_files import FilesReader
from polyneuron.io.ncf_format import LINE_BYTES, BundleShape, NcfManifest, NcfTensor, round_up
from polyneuron.io.neuron_rows import (
    Bytes,
    copy_rows,
    matrices_of,
    rows_of_tiles,
    transpose_rows,
)
from polyneuron.io.pack import PackError, pack_rows_into, vector_values
from polyneuron.kernels.quant import TILE_ROWS, num_tiles, tile_bytes

READ_BYTES = 4 << 20
PRIVATE_BYTES = 96 << 20
"""Down's rows of one layer beyond this are kept in a temporary file."""
RECIPE = "gguf-1"
"""Changes whenever pieces are cut or made in another way."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of rows of one tensor, or of bundles of one section, and the zeros behind it."""

    section_index: int
    tensor_index: int | None
    first_row: int
    num_rows: int
    num_bytes: int
    """With the zeros."""


@dataclass(frozen=True, slots=True)
class MadePiece:
    """A piece's bytes, valid until the next one is made, and what packing it cost by tensor."""

    data: memoryview
    errors: dict[int, PackError]


def cut_pieces(manifest: NcfManifest, tensors: dict[str, GgufTensor]) -> Iterator[Piece]:
    """All pieces; together they are the bytes from the data offset to the file's end."""
    for index, section in enumerate(manifest.sections):
        inside = [i for i, t in enumerate(manifest.tensors) if t.section_index == index]
        if section.bundles is not None:
            yield from _bundle_pieces(index, section.num_bytes, section.bundles)
            continue
        for rank, i in enumerate(inside):
            tensor, is_last = manifest.tensors[i], rank + 1 == len(inside)
            end = section.num_bytes if is_last else manifest.tensors[inside[rank + 1]].offset
            yield from _tensor_pieces(index, i, tensor, tensors[tensor.name], end)


def _bundle_pieces(index: int, num_bytes: int, shape: BundleShape) -> Iterator[Piece]:
    most = max(1, READ_BYTES // (shape.bundle_bytes * TILE_ROWS)) * TILE_ROWS
    for first in range(0, shape.num_neurons, most):
        count = min(most, shape.num_neurons - first)
        is_last = first + count == shape.num_neurons
        end = num_bytes if is_last else (first + count) * shape.bundle_bytes
        yield Piece(index, None, first, count, end - first * shape.bundle_bytes)


def _tensor_pieces(
    section_index: int, index: int, tensor: NcfTensor, source: GgufTensor, end: int
) -> Iterator[Piece]:
    if tensor.storage is None:
        yield Piece(section_index, index, 0, 1, end - tensor.offset)
        return
    tile = tile_bytes(tensor.storage, tensor.cols)
    most = max(1, READ_BYTES // (max(source.row_bytes * TILE_ROWS, tile))) * TILE_ROWS
    for first in range(0, tensor.rows, most):
        count = min(most, tensor.rows - first)
        start = tensor.offset + first // TILE_ROWS * tile
        is_last = first + count == tensor.rows
        stop = end if is_last else start + count // TILE_ROWS * tile
        yield Piece(section_index, index, first, count, stop - start)


def source_ranges(
    pieces: Iterable[Piece], manifest: NcfManifest, tensors: dict[str, GgufTensor]
) -> Iterator[ByteRange]:
    """What the pieces are made of, as far as it is read in sequence."""
    for piece in pieces:
        names = [tensor.name for tensor in _read_in_sequence(piece, manifest)]
        for source in map(tensors.__getitem__, names):
            start = source.offset + piece.first_row * source.row_bytes
            yield ByteRange(start, piece.num_rows * source.row_bytes)


def _read_in_sequence(piece: Piece, manifest: NcfManifest) -> list[NcfTensor]:
    """Down is read by columns, and neurons in an order of their own one by one."""
    if piece.tensor_index is not None:
        return [manifest.tensors[piece.tensor_index]]
    if manifest.sections[piece.section_index].neuron_ids is not None:
        return []
    inside = [t for t in manifest.tensors if t.section_index == piece.section_index]
    return [tensor for tensor in inside if tensor.role != "ffn_down"]


class PieceMaker:
    """Makes pieces from a GGUF; memory stays bounded whatever the model's size.

    `views` gives the bytes of `source_ranges` of the same pieces, each valid until the next.
    """

    def __init__(
        self,
        header: GgufHeader,
        manifest: NcfManifest,
        views: Iterator[memoryview],
        spill: Path,
    ) -> None:
        self._path = header.path
        self._tensors = header.by_name
        self._manifest = manifest
        self._views = views
        self._spill = spill
        self._out: Bytes = np.empty(0, np.uint8)
        self._down_layer = -1
        self._down: Bytes = np.empty((0, 0), np.uint8)
        self._down_error = PackError()
        self._reader = FilesReader(header.files)

    def close(self) -> None:
        """Close the files for random reads."""
        self._reader.close()

    def make(self, piece: Piece) -> MadePiece:
        """The piece's bytes."""
        if len(self._out) < piece.num_bytes:
            self._out = np.empty(round_up(piece.num_bytes, LINE_BYTES), np.uint8)
        out = self._out[: piece.num_bytes]
        try:
            if piece.tensor_index is None:
                errors = self._make_bundles(piece, out)
            else:
                errors = {piece.tensor_index: self._make_run(piece, piece.tensor_index, out)}
        except FormatError as problem:  # names the tensor; only here is the file known
            raise FormatError(f"{self._path}: {problem}") from None
        kept = {index: error for index, error in errors.items() if not error.is_lossless}
        return MadePiece(out.data, kept)

    def _make_run(self, piece: Piece, index: int, out: Bytes) -> PackError:
        tensor = self._manifest.tensors[index]
        source = self._tensors[tensor.name]
        raw = next(self._views)
        try:
            if tensor.storage is None:
                out[:] = 0
                values = vector_values(source, raw)
                out[: values.nbytes] = values.view(np.uint8)
                return PackError()
            used = num_tiles(piece.num_rows) * tile_bytes(tensor.storage, tensor.cols)
            out[used:] = 0
            return pack_rows_into(source, tensor.storage, raw, out[:used])
        finally:
            raw.release()

    def _make_bundles(self, piece: Piece, out: Bytes) -> dict[int, PackError]:
        section = self._manifest.sections[piece.section_index]
        shape = section.bundles
        assert shape is not None
        end = piece.first_row + piece.num_rows
        ids = section.neuron_ids
        neurons = np.arange(piece.first_row, end) if ids is None else ids[piece.first_row : end]
        out[:] = 0
        bundles = out[: piece.num_rows * shape.bundle_bytes].reshape(piece.num_rows, -1)
        errors = {}
        for index, tensor in enumerate(self._manifest.tensors):
            if tensor.section_index != piece.section_index:
                continue
            if tensor.role == "ffn_down":
                rows, error = self._down_rows(piece.section_index, tensor)
                part = rows[neurons]
                error = error if piece.first_row == 0 else PackError()  # counted once
            else:
                part, error = self._neuron_rows(tensor, neurons, ids is None)
            bundles[:, tensor.offset : tensor.offset + part.shape[1]] = part
            errors[index] = error
        return errors

    def _neuron_rows(
        self, tensor: NcfTensor, neurons: NDArray[np.integer[Any]], in_order: bool
    ) -> tuple[Bytes, PackError]:
        """Gate or up rows of these neurons, with the weights that tiles would have."""
        source, storage = self._tensors[tensor.name], tensor.storage
        assert storage is not None
        if in_order:
            raw = np.frombuffer(next(self._views), np.uint8)
        else:
            raw = np.empty(len(neurons) * source.row_bytes, np.uint8)
            for row, neuron in zip(raw.reshape(len(neurons), -1), neurons, strict=True):
                offset = source.offset + int(neuron) * source.row_bytes
                self._reader.read(offset, row)
        tiles = np.empty(num_tiles(len(neurons)) * tile_bytes(storage, tensor.cols), np.uint8)
        error = pack_rows_into(source, storage, raw, tiles)
        return rows_of_tiles(storage, tiles, len(neurons), tensor.cols), error

    def _down_rows(self, section_index: int, tensor: NcfTensor) -> tuple[Bytes, PackError]:
        """Down's columns of a whole layer as rows, in the model's order."""
        if self._down_layer != section_index:
            source, storage = self._tensors[tensor.name], tensor.storage
            assert storage is not None
            self._down = np.empty((0, 0), np.uint8)  # give the last layer's memory back first
            self._down = _room(self._spill, tensor.rows, tensor.num_bytes)
            self._down_error = PackError()
            for part, rows in matrices_of(source, self._down):
                bring = copy_rows if part.is_turned else transpose_rows
                self._down_error += bring(self._reader, part, storage, rows)
            self._down_layer = section_index
        return self._down, self._down_error


def _room(folder: Path, num_rows: int, num_bytes: int) -> Bytes:
    """Memory for a layer's rows; much of it is a temporary file's, which the kernel can take."""
    if num_bytes <= PRIVATE_BYTES:
        room = mmap.mmap(-1, num_bytes)
    else:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.truncate(num_bytes)
            room = mmap.mmap(file.fileno(), num_bytes)
    return np.frombuffer(room, np.uint8).reshape(num_rows, -1)
