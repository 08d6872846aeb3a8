"""Neuron-major rows packed into tiles: every bit kept, whatever the rows' place and number."""

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyneuron.io.neuron_rows import rows_of_tiles
from polyneuron.kernels import quant, reference
from polyneuron.kernels.quant import StorageType
from tests.kernels.builders import ROW_TYPES, random_weights, rows_of, tiles_of

Bytes = npt.NDArray[np.uint8]

NUM_ROWS = [1, 3, 4, 7, 8, 31, 32, 33, 64, 75]
QUANT_COLS = [32, 64, 96, 128, 256, 288, 544, 4096]
FLOAT_COLS = [1, 3, 4, 7, 8, 15, 16, 17, 31, 32, 33, 100, 576]


def random_rows(seed: int, storage: StorageType, num_rows: int, cols: int) -> Bytes:
    """Rows of arbitrary bytes: NaN, infinities and every quant among them."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (num_rows, quant.row_bytes(storage, cols)), np.uint8)


def cols_of(storage: StorageType) -> list[int]:
    return QUANT_COLS if storage.is_quantised else FLOAT_COLS


def assert_packed(storage: StorageType, tiles: Bytes, rows: Bytes, cols: int) -> None:
    """The tiles are the reference's, and taken apart they give the rows again."""
    assert np.array_equal(tiles, reference.pack_tiles_from_rows(storage, rows, cols))
    assert np.array_equal(rows_of_tiles(storage, tiles, len(rows), cols), rows)


@pytest.mark.parametrize("storage", ROW_TYPES)
@pytest.mark.parametrize("num_rows", NUM_ROWS)
def test_every_bit_is_kept(storage: StorageType, num_rows: int) -> None:
    for cols in cols_of(storage):
        rows = random_rows(num_rows, storage, num_rows, cols)
        size = quant.num_tiles(num_rows) * quant.tile_bytes(storage, cols)
        out = np.full(size, 0xA5, np.uint8)  # what is missing must be written as zeros
        assert quant.pack_tiles_from_rows(storage, rows, cols, out) is out
        assert_packed(storage, out, rows, cols)


@pytest.mark.parametrize("storage", ROW_TYPES)
def test_rows_packed_from_blocks_give_the_tiles_of_those_blocks(storage: StorageType) -> None:
    for num_rows, cols in ((40, 96), (64, 544)):
        weights = random_weights(1, storage, num_rows, cols)
        rows = rows_of(weights).reshape(num_rows, -1)
        tiles = quant.pack_tiles_from_rows(storage, rows, cols)
        assert np.array_equal(tiles, tiles_of(weights))


@pytest.mark.parametrize("storage", ROW_TYPES)
@pytest.mark.parametrize("gap", [2, 6, 64, 510])
@pytest.mark.parametrize("offset", [2, 10, 62])
def test_rows_of_bundles_off_every_boundary(storage: StorageType, gap: int, offset: int) -> None:
    num_rows, cols = 45, 96
    rows = random_rows(gap + offset, storage, num_rows, cols)
    stride = rows.shape[1] + gap
    memory = np.full(offset + num_rows * stride, 0x5A, np.uint8)
    bundles = memory[offset:].reshape(num_rows, stride)
    bundles[:, : rows.shape[1]] = rows
    tiles = quant.pack_tiles_from_rows(storage, bundles[:, : rows.shape[1]], cols)
    assert_packed(storage, tiles, rows, cols)
    assert np.array_equal(quant.pack_tiles_from_rows(storage, bundles, cols), tiles)


@given(
    seed=st.integers(0, 2**32 - 1),
    storage=st.sampled_from(ROW_TYPES),
    num_rows=st.integers(1, 70),
    size=st.integers(1, 40),
)
@settings(max_examples=80)
def test_any_size(seed: int, storage: StorageType, num_rows: int, size: int) -> None:
    cols = 32 * size if storage.is_quantised else size
    rows = random_rows(seed, storage, num_rows, cols)
    assert_packed(storage, quant.pack_tiles_from_rows(storage, rows, cols), rows, cols)
