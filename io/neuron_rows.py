"""Neuron-major rows: tiles taken apart into rows, and columns of a matrix packed as rows."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from polyneuron.errors import FormatError
from polyneuron.io.ggml_types import GGML_TYPES
from polyneuron.io.gguf_tensors import GgufTensor
from polyneuron.io.gguf_values import quoted
from polyneuron.io.model_files import FilesReader
from polyneuron.io.pack import HALF_MAX, PackError, decode_rows, pack_rows_into
from polyneuron.kernels.quant import (
    BLOCK_COLS,
    TILE_ROWS,
    StorageType,
    num_tiles,
    pack_rows_from_f32,
    row_bytes,
    tile_bytes,
)

F32 = NDArray[np.float32]
Bytes = NDArray[np.uint8]

SLAB_BYTES = 64 << 20
"""Of source columns held at once."""
PANEL_VALUES = 1 << 20
"""Decoded at once: about 20 bytes a value."""


def rows_of_tiles(storage: StorageType, tiles: Bytes, num_rows: int, cols: int) -> Bytes:
    """The rows (num_rows, row_bytes) of a tiled matrix; every weight keeps its bits."""
    num = num_tiles(num_rows)
    if not storage.is_quantised:
        words = tiles.view(np.uint16 if storage is StorageType.F16 else np.uint32)
        rows = words.reshape(num, cols, TILE_ROWS).transpose(0, 2, 1)
        return np.ascontiguousarray(rows).view(np.uint8).reshape(num * TILE_ROWS, -1)[:num_rows]
    num_blocks, num_halves = cols // BLOCK_COLS, 2 if storage is StorageType.Q4M else 1
    head = num_halves * 2 * TILE_ROWS
    blocks = tiles.reshape(num, num_blocks, -1)
    out = np.empty((num, TILE_ROWS, row_bytes(storage, cols)), np.uint8)
    words_of_block = (blocks.shape[2] - head) // (4 * TILE_ROWS)
    quants = blocks[:, :, head:].view(np.uint32).reshape(num, num_blocks, words_of_block, TILE_ROWS)
    quant_bytes = num_blocks * words_of_block * 4
    out[:, :, :quant_bytes].view(np.uint32).reshape(num, TILE_ROWS, num_blocks, words_of_block)[
        :
    ] = quants.transpose(0, 3, 1, 2)
    halves = blocks[:, :, :head].view(np.uint16).reshape(num, num_blocks, num_halves, TILE_ROWS)
    out[:, :, quant_bytes:].view(np.uint16).reshape(num, TILE_ROWS, num_halves, num_blocks)[:] = (
        halves.transpose(0, 3, 2, 1)
    )
    return out.reshape(num * TILE_ROWS, -1)[:num_rows]


def decode_neuron_rows(storage: StorageType, rows: Bytes, cols: int) -> F32:
    """The values (num_rows, cols) of rows in q8, q4, f16 or f32, as the kernels read them."""
    if not storage.is_quantised:
        kind = np.float16 if storage is StorageType.F16 else np.float32
        return rows.view(kind).astype(np.float32, copy=False)
    quant_bytes = cols if storage is StorageType.Q8 else cols // 2
    packed = rows[:, :quant_bytes].reshape(len(rows), cols // BLOCK_COLS, -1)
    if storage is StorageType.Q8:
        quants = packed.view(np.int8)
    else:
        quants = np.concatenate([packed & 15, packed >> 4], axis=2).astype(np.int8) - np.int8(8)
    scales = np.ascontiguousarray(rows[:, quant_bytes:]).view(np.float16).astype(np.float32)
    values: F32 = quants.astype(np.float32) * scales[:, :, None]
    return values.reshape(len(rows), cols)


def pack_columns(tensor: GgufTensor, storage: StorageType, values: F32, out: Bytes) -> PackError:
    """values (rows, n) -> n neuron-major rows of the columns into out (n, row_bytes)."""
    columns = np.ascontiguousarray(values.T)
    if not np.isfinite(columns).all():
        raise FormatError(f"tensor {quoted(tensor.name)} holds values that are not finite numbers")
    if storage is StorageType.F16 and np.abs(columns).max() > HALF_MAX:
        raise FormatError(f"tensor {quoted(tensor.name)} holds values beyond the range of f16")
    out[:] = pack_rows_from_f32(storage, columns).reshape(out.shape)
    stored = decode_neuron_rows(storage, out, columns.shape[1])
    difference = stored - columns
    error = PackError(
        max_abs=float(np.abs(difference).max()),
        squared_error=float(np.vdot(difference, difference)),
        squared_values=float(np.vdot(columns, columns)),
    )
    if not np.isfinite(error.max_abs):
        raise FormatError(f"tensor {quoted(tensor.name)} holds values too large to be stored")
    return PackError() if error.is_lossless else error


def matrices_of(tensor: GgufTensor, out: Bytes) -> Iterator[tuple[GgufTensor, Bytes]]:
    """The matrices of a stack, or the one a tensor is, each with its share of rows in `out`."""
    count = math.prod(tensor.shape[:-2])
    num_bytes, num_rows = tensor.num_bytes // count, tensor.num_cols
    for index in range(count):
        offset = tensor.offset + index * num_bytes
        part = replace(tensor, shape=tensor.shape[-2:], offset=offset, num_bytes=num_bytes)
        yield part, out[index * num_rows : (index + 1) * num_rows]


def copy_rows(
    reader: FilesReader, tensor: GgufTensor, storage: StorageType, out: Bytes
) -> PackError:
    """All columns of a matrix that lies turned as neuron-major rows into out (num_cols, row_bytes).

    Nothing is cut: the file's rows are the neurons', blocks and all.
    """
    cols, num_rows = tensor.shape
    stored = tensor.num_bytes // num_rows
    most = max(1, SLAB_BYTES // 16 // (stored * TILE_ROWS)) * TILE_ROWS
    total = PackError()
    for first in range(0, num_rows, most):
        count = min(most, num_rows - first)
        raw = np.empty(count * stored, np.uint8)
        reader.read(tensor.offset + first * stored, raw)
        rows = replace(tensor, shape=(count, cols), num_bytes=raw.size, is_turned=False)
        tiles = np.empty(num_tiles(count) * tile_bytes(storage, cols), np.uint8)
        total += pack_rows_into(rows, storage, raw, tiles)
        out[first : first + count] = rows_of_tiles(storage, tiles, count, cols)
    reader.forget(tensor.offset, tensor.num_bytes)
    return total


def transpose_rows(
    reader: FilesReader, tensor: GgufTensor, storage: StorageType, out: Bytes
) -> PackError:
    """All columns of a GGUF matrix as neuron-major rows into out (num_cols, row_bytes).

    A slab of columns is read at once, row by row, and decoded panel by panel.
    """
    kind = GGML_TYPES[tensor.type_id]
    num_rows, blocks = tensor.num_rows, tensor.num_cols // kind.block_values
    slab_blocks = min(blocks, max(1, SLAB_BYTES // (num_rows * kind.block_bytes)))
    panel_blocks = max(1, PANEL_VALUES // (num_rows * kind.block_values))
    slab = np.empty((num_rows, slab_blocks * kind.block_bytes), np.uint8)
    total = PackError()
    for first in range(0, blocks, slab_blocks):
        count = min(slab_blocks, blocks - first)
        read_columns(reader, tensor, first * kind.block_bytes, slab[:, : count * kind.block_bytes])
        for start in range(0, count, panel_blocks):
            num = min(panel_blocks, count - start)
            raw = slab[:, start * kind.block_bytes : (start + num) * kind.block_bytes]
            cols = num * kind.block_values
            panel = replace(tensor, shape=(num_rows, cols), num_bytes=raw.size)
            values = decode_rows(panel, np.ascontiguousarray(raw).reshape(-1))
            at = (first + start) * kind.block_values
            total += pack_columns(tensor, storage, values, out[at : at + cols])
    reader.forget(tensor.offset, tensor.num_bytes)
    return total


def read_columns(reader: FilesReader, tensor: GgufTensor, byte_offset: int, out: Bytes) -> None:
    """The bytes from `byte_offset` on of every row of a matrix into out (num_rows, num_bytes)."""
    for row in range(tensor.num_rows):
        reader.read(tensor.offset + row * tensor.row_bytes + byte_offset, out[row])
