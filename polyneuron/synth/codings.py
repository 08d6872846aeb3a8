"""Rows of random weights in each storage type: filled, planted, transposed, and as ggml blocks.

A row is as in bundles: the quants of all blocks of 32 columns, then all scales.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyneuron.kernels.quant import BLOCK_COLS, GgmlType, StorageType, row_bytes
from polyneuron.kernels.random_rows import (
    WORD_BYTES,
    RowIds,
    fill_random_rows,
    random_bytes,
    random_rows,
)

Bytes = NDArray[np.uint8]
Halves = NDArray[np.float16]
F32 = NDArray[np.float32]

LOW, HIGH = np.uint8(0x0F), np.uint8(0xF0)
HALF_BYTES = 2
NUM_SCALES = 256
SCALE_SPREAD = 0.3
"""Scales lie evenly in 1 - spread to 1 + spread of their size, of either sign."""
NUM_VALUES = 4096


@dataclass(frozen=True, slots=True, eq=False)
class Chance:
    """Where a matrix's random bits come from, and what they choose from."""

    key: int
    choices: Halves
    """Of scales, or of values."""
    scale_key: int
    tile_scales: Halves | None
    """(rows / 32, cols / 32): scales shared by 32 rows; None: each block has its own."""


@dataclass(frozen=True)
class Coding:
    """One storage type and the ggml type of the same values."""

    storage: StorageType
    ggml_type: GgmlType

    def row_bytes(self, cols: int) -> int:
        """Bytes of one row."""
        return row_bytes(self.storage, cols)

    def choices(self, std: float) -> Halves:
        """What random bits choose from, so that values have this size."""
        raise NotImplementedError

    def tile_scales(self, key: int, rows: int, cols: int, choices: Halves) -> Halves | None:
        """Scales for 32 rows each, where transposing must not change a value."""
        raise NotImplementedError

    def fill(self, rows: Bytes, row_ids: RowIds, chance: Chance) -> None:
        """Random values into rows (num_rows, row_bytes), which may lie apart."""
        raise NotImplementedError

    def resize(self, rows: Bytes, sizes: F32) -> None:
        """Multiply what fill made by sizes (rows or 1, blocks of 32 columns or 1)."""
        raise NotImplementedError

    def set_first_block(self, rows: Bytes, values: F32) -> None:
        """Make columns 0 to 31 of rows[i] all values[i], but for the rounding of a half."""
        raise NotImplementedError

    def transposed(self, rows: Bytes) -> Bytes:
        """rows (n, row_bytes(m)) made with tile_scales -> (m, row_bytes(n)), the same values."""
        raise NotImplementedError

    def to_ggml(self, rows: Bytes, out: Bytes) -> None:
        """The rows as a GGUF holds them, into out of the same shape, without gaps."""
        raise NotImplementedError


class QuantisedCoding(Coding):
    """Types with one scale for 32 columns."""

    quant_bytes: int
    """Of 32 columns."""
    quant_rms: float
    constant_quants: int
    constant_value: float

    def choices(self, std: float) -> Halves:
        """Scales of both signs: quants alone would not have mean 0."""
        sizes = np.linspace(1.0 - SCALE_SPREAD, 1.0 + SCALE_SPREAD, NUM_SCALES // 2)
        scale = std / self.quant_rms / math.sqrt(float(np.square(sizes).mean()))
        return (scale * np.concatenate([sizes, -sizes])).astype(np.float16)

    def tile_scales(self, key: int, rows: int, cols: int, choices: Halves) -> Halves | None:
        """One for each 32 x 32 values."""
        shape = (rows // BLOCK_COLS, cols // BLOCK_COLS)
        return choices[random_bytes(key, shape[0] * shape[1])].reshape(shape)

    def fill(self, rows: Bytes, row_ids: RowIds, chance: Chance) -> None:
        """Random quants, and scales by random bytes."""
        quants, scales = self._parts(rows)
        fill_random_rows(quants, chance.key, row_ids)
        if chance.tile_scales is not None:
            scales[:] = chance.tile_scales.view(np.uint16).take(row_ids // BLOCK_COLS, axis=0)
            return
        num_blocks = scales.shape[1]
        whole_words = -(-num_blocks // WORD_BYTES) * WORD_BYTES
        chosen = random_rows(chance.scale_key, row_ids, whole_words)[:, :num_blocks]
        scales[:] = chance.choices.view(np.uint16).take(chosen)  # faster than an index

    def resize(self, rows: Bytes, sizes: F32) -> None:
        """Only the scales change, so tiles of 32 x 32 still have one."""
        scales = self._parts(rows)[1].view(np.float16)
        scales *= sizes

    def set_first_block(self, rows: Bytes, values: F32) -> None:
        """All quants alike."""
        quants, scales = self._parts(rows)
        quants[:, : self.quant_bytes] = self.constant_quants
        scales[:, 0] = (values / self.constant_value).astype(np.float16).view(np.uint16)

    def transposed(self, rows: Bytes) -> Bytes:
        """Tile by tile of 32 x 32."""
        quants, scales = self._parts(rows)
        num_tiles, num_blocks = len(rows) // BLOCK_COLS, scales.shape[1]
        out = np.empty((num_blocks * BLOCK_COLS, self.row_bytes(len(rows))), np.uint8)
        out_quants, out_scales = self._parts(out)
        self._transpose_quants(
            quants.reshape(num_tiles, BLOCK_COLS, num_blocks, self.quant_bytes),
            out_quants.reshape(num_blocks, BLOCK_COLS, num_tiles, self.quant_bytes),
        )
        out_scales.reshape(num_blocks, BLOCK_COLS, num_tiles)[:] = scales[::BLOCK_COLS].T[:, None]
        return out

    def to_ggml(self, rows: Bytes, out: Bytes) -> None:
        """Each scale before its quants."""
        quants, scales = self._parts(rows)
        blocks = out.view(np.dtype([("scale", "<u2"), ("quants", "u1", (self.quant_bytes,))]))
        blocks["scale"] = scales
        blocks["quants"] = quants.reshape(*scales.shape, self.quant_bytes)

    def _parts(self, rows: Bytes) -> tuple[Bytes, NDArray[np.uint16]]:
        """Quants (num_rows, bytes) and scales (num_rows, blocks) of rows."""
        num_blocks = rows.shape[1] // (self.quant_bytes + HALF_BYTES)
        middle = num_blocks * self.quant_bytes
        return rows[:, :middle], rows[:, middle:].view(np.uint16)

    def _transpose_quants(self, quants: NDArray[Any], out: NDArray[Any]) -> None:
        """quants (tiles, 32, blocks, bytes) -> out (blocks, 32, tiles, bytes)."""
        raise NotImplementedError


class Q4Coding(QuantisedCoding):
    """q4: a nibble stands for -8 to 7; byte k has columns k and k + 16."""

    quant_bytes = 16
    quant_rms = math.sqrt(sum(q * q for q in range(-8, 8)) / 16)
    constant_quants, constant_value = 0x00, -8.0

    def _transpose_quants(self, quants: NDArray[Any], out: NDArray[Any]) -> None:
        """Nibbles of rows i and i + 16 come together in one byte."""
        low, high = quants[:, :16], quants[:, 16:]
        out[:, :16] = ((low & LOW) | (high << 4)).transpose(2, 3, 0, 1)
        out[:, 16:] = ((low >> 4) | (high & HIGH)).transpose(2, 3, 0, 1)


class Q8Coding(QuantisedCoding):
    """q8: signed bytes."""

    quant_bytes = 32
    quant_rms = math.sqrt(sum(q * q for q in range(-128, 128)) / 256)
    constant_quants, constant_value = 127, 127.0

    def _transpose_quants(self, quants: NDArray[Any], out: NDArray[Any]) -> None:
        """One byte a value."""
        out[:] = quants.transpose(2, 3, 0, 1)


class HalfCoding(Coding):
    """f16: plain values, normally distributed."""

    @cached_property
    def _quantiles(self) -> NDArray[np.float64]:
        normal = NormalDist()
        values = np.array([normal.inv_cdf((i + 0.5) / NUM_VALUES) for i in range(NUM_VALUES)])
        unit: NDArray[np.float64] = values / np.sqrt(np.square(values).mean())
        return unit

    def choices(self, std: float) -> Halves:
        """Quantiles of the normal distribution."""
        return (std * self._quantiles).astype(np.float16)

    def tile_scales(self, key: int, rows: int, cols: int, choices: Halves) -> Halves | None:
        """Values have no scales."""
        return None

    def fill(self, rows: Bytes, row_ids: RowIds, chance: Chance) -> None:
        """Each value is chosen by its own bits."""
        fill_random_rows(rows, chance.key, row_ids)
        values = rows.view(np.uint16)
        values[:] = chance.choices.view(np.uint16).take(values % NUM_VALUES)

    def resize(self, rows: Bytes, sizes: F32) -> None:
        """Every value."""
        values = rows.view(np.float16).reshape(len(rows), -1, BLOCK_COLS)  # never a copy
        values *= sizes[..., None]

    def set_first_block(self, rows: Bytes, values: F32) -> None:
        """The values themselves."""
        halves = values.astype(np.float16).view(np.uint16)
        rows.view(np.uint16)[:, :BLOCK_COLS] = halves[:, None]

    def transposed(self, rows: Bytes) -> Bytes:
        """A plain transposition."""
        return np.ascontiguousarray(rows.view(np.uint16).T).view(np.uint8)

    def to_ggml(self, rows: Bytes, out: Bytes) -> None:
        """They are the same."""
        out[:] = rows


Q4 = Q4Coding(StorageType.Q4, GgmlType.Q4_0)
Q8 = Q8Coding(StorageType.Q8, GgmlType.Q8_0)
F16 = HalfCoding(StorageType.F16, GgmlType.F16)
CODINGS = {"q4": Q4, "q8": Q8, "f16": F16}
