"""What the profiler looks at of a layer's weights: rows that decide, sizes of down rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from polyneuron.config import usable_cores
from polyneuron.io.neuron_rows import decode_neuron_rows
from polyneuron.kernels.gemv import gather_row, matmul_tiles
from polyneuron.kernels.quant import (
    TILE_ROWS,
    StorageType,
    num_tiles,
    pack_tiles_from_rows,
    quantize_acts,
    row_bytes,
    tile_bytes,
)
from polyneuron.profiling.layer_run import LayerRun

F32 = NDArray[np.float32]
Bytes = NDArray[np.uint8]

DECODED_NEURONS = 1024


@dataclass(frozen=True, slots=True, eq=False)
class TiledMatrix:
    """A matrix (num_rows, cols) as the kernels read it."""

    storage: StorageType
    tiles: Bytes = field(repr=False)
    num_rows: int
    cols: int

    def product(self, x: F32) -> F32:
        """x (tokens, cols) -> (tokens, num_rows), as the engine computes it, on all cores."""
        acts = quantize_acts(x) if self.storage.is_quantised else np.ascontiguousarray(x)
        out = np.empty((len(x), num_tiles(self.num_rows) * TILE_ROWS), np.float32)
        cuts = np.linspace(0, len(x), len(usable_cores()) + 1).astype(int)

        def multiply(begin: int, end: int) -> None:
            if begin < end:
                matmul_tiles(self.storage, self.tiles, self.cols, acts[begin:end], out[begin:end])

        with ThreadPoolExecutor(len(cuts) - 1, "product") as threads:
            list(threads.map(multiply, cuts[:-1], cuts[1:]))
        return out[:, : self.num_rows]

    def values(self) -> F32:
        """Every weight (num_rows, cols)."""
        rows = [gather_row(self.storage, self.tiles, self.cols, i) for i in range(self.num_rows)]
        return np.stack(rows)


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """A layer's weights, neurons in the order of the file."""

    deciding: TiledMatrix
    """Gate rows, or up rows where there is no gate."""
    down_norm: F32
    """Length of each neuron's down row (d_ff)."""
    attn_norm: F32
    ffn_norm: F32
    """The norms' weights (d_model)."""
    neuron_bytes: int
    """What one neuron's rows take in the file."""
    up_values: Callable[[], F32] = field(repr=False)
    """Gives the up rows (d_ff, d_model); of a file in bundles."""
    neuron_ids: NDArray[np.uint32] | None = None
    """The model's number of each neuron; None: the file keeps the model's order."""


def layer_weights(run: LayerRun) -> LayerWeights:
    """Of the layer that is in memory; the arrays are the arena's own where they can be."""
    deciding = "ffn_gate" if run.spec.has_gate else "ffn_up"
    return LayerWeights(
        _deciding_rows(run, f"blk.0.{deciding}.weight"),
        _down_norms(run),
        _vector(run, "blk.0.attn_norm.weight"),
        _vector(run, "blk.0.ffn_norm.weight"),
        _neuron_bytes(run),
        lambda: _up_values(run),
        run.source.manifest.sections[1].neuron_ids,
    )


def expert_weights(run: LayerRun, expert: int) -> LayerWeights:
    """Of one expert of the layer that is in memory, its neurons alone."""
    bundles = run.layout.bundles
    assert bundles is not None
    rows, d_ff = bundles.rows, run.spec.d_ff
    own = slice(expert * d_ff, (expert + 1) * d_ff)
    raw = _raw_rows(run, rows.decide_row, rows.decide_type)[own]
    packed = num_tiles(d_ff) * tile_bytes(rows.decide_type, rows.cols)
    tiles = np.empty(packed, np.uint8)
    pack_tiles_from_rows(rows.decide_type, np.ascontiguousarray(raw), rows.cols, tiles)
    norms = [
        np.linalg.norm(values, axis=1)
        for values in _decoded(run, rows.down_row, rows.down_type, own)
    ]
    ids = run.source.manifest.sections[1].neuron_ids
    return LayerWeights(
        TiledMatrix(rows.decide_type, tiles, d_ff, rows.cols),
        np.concatenate(norms).astype(np.float32),
        _vector(run, "blk.0.attn_norm.weight"),
        _vector(run, "blk.0.ffn_norm.weight"),
        _neuron_bytes(run),
        lambda: np.concatenate(list(_decoded(run, rows.up_row, rows.up_type, own))),
        None if ids is None else ids[own],
    )


def deciding_rows(run: LayerRun, expert: int, count: int) -> F32:
    """Evenly spaced rows of an expert's deciding matrix (count or fewer, d_model)."""
    bundles = run.layout.bundles
    assert bundles is not None
    rows, d_ff = bundles.rows, run.spec.d_ff
    step = max(1, d_ff // count)
    own = slice(expert * d_ff, (expert + 1) * d_ff, step)
    parts = list(_decoded(run, rows.decide_row, rows.decide_type, own))
    return np.concatenate(parts)[:count]


def _neuron_bytes(run: LayerRun) -> int:
    section = run.source.manifest.sections[1]
    if section.bundles is not None:
        return section.bundles.bundle_bytes
    return section.num_bytes // run.spec.d_ff


def _vector(run: LayerRun, name: str) -> F32:
    return run.arena.view(run.layout.weights[name].offset, (run.spec.d_model,), np.float32).copy()


def _deciding_rows(run: LayerRun, name: str) -> TiledMatrix:
    cols, num_rows = run.spec.d_model, run.spec.d_ff
    bundles = run.layout.bundles
    if bundles is None:
        storage, offset = run.layout.weights[name].storage, run.layout.weights[name].offset
    else:
        storage, offset = bundles.rows.decide_type, bundles.layers[0].tiles_offset
    assert storage is not None
    num_bytes = num_tiles(num_rows) * tile_bytes(storage, cols)
    return TiledMatrix(storage, run.arena.view(offset, (num_bytes,), np.uint8), num_rows, cols)


def _down_norms(run: LayerRun) -> F32:
    bundles = run.layout.bundles
    if bundles is None:
        place = run.layout.weights["blk.0.ffn_down.weight"]
        assert place.storage is not None
        tiles = run.arena.view(place.offset, (place.num_bytes,), np.uint8)
        squares = np.zeros(place.cols)
        for index in range(place.rows):
            squares += np.square(gather_row(place.storage, tiles, place.cols, index))
        return np.sqrt(squares).astype(np.float32)
    rows = bundles.rows
    parts = _decoded(run, rows.down_row, rows.down_type)
    return np.concatenate([np.linalg.norm(values, axis=1) for values in parts]).astype(np.float32)


def _up_values(run: LayerRun) -> F32:
    bundles = run.layout.bundles
    assert bundles is not None
    return np.concatenate(list(_decoded(run, bundles.rows.up_row, bundles.rows.up_type)))


def _raw_rows(run: LayerRun, place: int, storage: StorageType) -> Bytes:
    """One of the rows of each bundle (num_neurons, row_bytes); `place` is in the bundle."""
    bundles = run.layout.bundles
    assert bundles is not None
    rows = bundles.slot_rows
    shape = (rows.num_neurons, rows.slot_bytes)
    slots = run.arena.view(bundles.layers[0].rows_offset, shape, np.uint8)
    begin = place - rows.read_begin
    return slots[:, begin : begin + row_bytes(storage, rows.cols)]


def _decoded(
    run: LayerRun, place: int, storage: StorageType, own: slice = slice(None)
) -> Iterator[F32]:
    """The same decoded, of `own` neurons, some at a time."""
    raw = _raw_rows(run, place, storage)[own]
    for first in range(0, len(raw), DECODED_NEURONS):
        part = np.ascontiguousarray(raw[first : first + DECODED_NEURONS])
        yield decode_neuron_rows(storage, part, run.spec.d_model)
