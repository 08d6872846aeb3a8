"""The pieces of a neuron-cluster file of random weights, made by several threads ahead of need."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import numpy as np

from polyneuron.config import usable_cores
from polyneuron.io.ncf_format import NcfManifest, NcfTensor
from polyneuron.io.ncf_pieces import MadePiece, Piece, cut_pieces
from polyneuron.kernels.quant import TILE_ROWS, num_tiles, pack_tiles_from_rows, tile_bytes
from polyneuron.synth.codings import Bytes
from polyneuron.synth.weights import WeightSource

MAX_THREADS = 4
PACK_ROWS = 4 * TILE_ROWS
"""Made and packed at once: they stay in the cache."""

Item = TypeVar("Item")
Made = TypeVar("Made")


def made_ahead(make: Callable[[Item], Made], items: Iterator[Item]) -> Iterator[Made]:
    """make(item) in order, computed by threads while the caller uses what came before."""
    num_threads = min(len(usable_cores()), MAX_THREADS)
    ahead: deque[Future[Made]] = deque()
    with ThreadPoolExecutor(num_threads, "synth") as threads:
        try:
            for item in items:
                ahead.append(threads.submit(make, item))
                if len(ahead) > num_threads:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()
        finally:
            for waiting in ahead:
                waiting.cancel()


class SynthPieces:
    """Makes any piece of a file that `manifest` lays out."""

    def __init__(self, source: WeightSource, manifest: NcfManifest) -> None:
        self._source = source
        self._manifest = manifest
        self._inside: list[list[NcfTensor]] = [[] for _ in manifest.sections]
        for tensor in manifest.tensors:
            self._inside[tensor.section_index].append(tensor)

    def made(self, first: int) -> Iterator[MadePiece]:
        """All pieces from that number on."""
        pieces = cut_pieces(self._manifest, self._source.tensors)
        return made_ahead(self.make, itertools.islice(pieces, first, None))

    def make(self, piece: Piece) -> MadePiece:
        """One piece; nothing in it was rounded, since it has no source."""
        out = np.empty(piece.num_bytes, np.uint8)
        if piece.tensor_index is None:
            self._make_bundles(piece, out)
        else:
            self._make_run(self._manifest.tensors[piece.tensor_index], piece, out)
        return MadePiece(out.data, {})

    def _make_run(self, tensor: NcfTensor, piece: Piece, out: Bytes) -> None:
        if tensor.storage is None:
            values = self._source.vector(tensor.name).view(np.uint8)
            used = values.size
            out[:used] = values
        else:
            tile, used = tile_bytes(tensor.storage, tensor.cols), 0
            for first in range(0, piece.num_rows, PACK_ROWS):
                count = min(PACK_ROWS, piece.num_rows - first)
                rows = self._source.rows(tensor.name, piece.first_row + first, count)
                start, used = used, used + num_tiles(count) * tile
                pack_tiles_from_rows(tensor.storage, rows, tensor.cols, out[start:used])
        out[used:] = 0

    def _make_bundles(self, piece: Piece, out: Bytes) -> None:
        section = self._manifest.sections[piece.section_index]
        shape = section.bundles
        assert shape is not None
        end = piece.first_row + piece.num_rows
        ids = section.neuron_ids
        if ids is None:
            ids = np.arange(shape.num_neurons, dtype=np.uint32)
        neurons = ids[piece.first_row : end]
        used = piece.num_rows * shape.bundle_bytes
        bundles = out[:used].reshape(piece.num_rows, -1)
        filled = 0
        for tensor in self._inside[piece.section_index]:
            matrix = self._source.matrix(tensor.name)
            bundles[:, filled : tensor.offset] = 0
            filled = tensor.offset + matrix.row_bytes
            matrix.fill(bundles[:, tensor.offset : filled], neurons)
        bundles[:, filled:] = 0
        out[used:] = 0
