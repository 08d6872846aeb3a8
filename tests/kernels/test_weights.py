"""Products with stored weights, on every instruction set."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyneuron.kernels import gemv, quant, reference
from polyneuron.kernels import isa as isa_module
from polyneuron.kernels._kernels import ffi, lib
from polyneuron.kernels.buffers import F32, Array
from polyneuron.kernels.quant import StorageType
from tests.kernels.builders import (
    QUANT_RANGES,
    QUANTISED,
    QUANTISED_ROWS,
    ROW_TYPES,
    assert_same_bits,
    normal,
    off_boundary,
    random_weights,
    rows_of,
    tiles_of,
)

SHAPES = [(32, 32), (64, 64), (33, 96), (1, 512), (70, 544), (96, 1056)]
FLOAT_COLS = [1, 15, 16, 17, 33, 100]
# Around the 8 and 16 terms that a register holds, of a block or of a column each.
ROW_COLS = [32, 224, 256, 288, 480, 512, 544, 1056]
ROW_FLOAT_COLS = [1, 7, 8, 9, 15, 16, 17, 31, 32, 33, 100, 545]

# Largest difference from the float64 product of dequantised weights and activations, as a share of
# the sum of the terms' magnitudes: one rounding a block (quantised) or a column (float).
ERROR_BOUND = {
    StorageType.Q1: 5e-7,
    StorageType.Q4: 5e-7,
    StorageType.Q4M: 5e-7,
    StorageType.Q8: 5e-7,
    StorageType.F16: 2e-6,
    StorageType.F32: 2e-6,
}


def acts_of(storage_type: StorageType, x: F32) -> Array:
    return quant.quantize_acts(x) if storage_type.is_quantised else x


def shapes_of(storage_type: StorageType) -> list[tuple[int, int]]:
    if storage_type.is_quantised:
        return SHAPES
    return [(rows, cols) for (rows, _), cols in zip(SHAPES, FLOAT_COLS, strict=True)]


@pytest.mark.parametrize("storage_type", StorageType)
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 5, 8, 9])
def test_matmul_tiles_equals_reference(
    isa: str, storage_type: StorageType, num_tokens: int
) -> None:
    for seed, (rows, cols) in enumerate(shapes_of(storage_type)):
        weights = random_weights(seed, storage_type, rows, cols)
        acts = acts_of(storage_type, normal(seed + 100, num_tokens, cols))
        out = gemv.matmul_tiles(storage_type, tiles_of(weights), cols, acts)
        assert_same_bits(out[:, :rows], reference.matmul(weights, acts))
        assert not out[:, rows:].any(), "padded rows give zeros"


@pytest.mark.parametrize("storage_type", StorageType)
def test_matmul_tiles_error_against_float64(isa: str, storage_type: StorageType) -> None:
    rows, cols = 64, 4096
    weights = random_weights(7, storage_type, rows, cols)
    acts = acts_of(storage_type, normal(8, 3, cols))
    x = (
        acts.astype(np.float64)
        if not storage_type.is_quantised
        else (
            acts["quants"].astype(np.float64) * acts["scale"].astype(np.float64)[..., np.newaxis]
        ).reshape(3, cols)
    )
    dense = weights.dense().astype(np.float64)
    error = np.abs(gemv.matmul_tiles(storage_type, tiles_of(weights), cols, acts) - x @ dense.T)
    magnitude = np.abs(x) @ np.abs(dense).T
    assert (error / magnitude).max() < ERROR_BOUND[storage_type]
    assert error.max() > 0.0, "the bound must be tested on sums that round"


@pytest.mark.parametrize("storage_type", StorageType)
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 5, 8, 9, 70])
def test_many_tokens_equal_single_tokens(
    isa: str, storage_type: StorageType, num_tokens: int
) -> None:
    cols = 16384 if storage_type == StorageType.Q4 else 96  # long rows: several panels of tokens
    tiles = tiles_of(random_weights(3, storage_type, 64, cols))
    acts = acts_of(storage_type, normal(4, num_tokens, cols))
    together = gemv.matmul_tiles(storage_type, tiles, cols, acts)
    for t in range(num_tokens):
        single = gemv.matmul_tiles(storage_type, tiles, cols, acts[t : t + 1])
        assert_same_bits(together[t : t + 1], single)


@pytest.mark.parametrize("storage_type", StorageType)
def test_pointers_off_vector_boundaries(isa: str, storage_type: StorageType) -> None:
    weights = random_weights(5, storage_type, 64, 96)
    acts = acts_of(storage_type, normal(6, 5, 96))
    tiles = np.concatenate([np.zeros(4, np.uint8), tiles_of(weights)])[4:]
    out = off_boundary(np.zeros((5, 64), np.float32))
    gemv.matmul_tiles(storage_type, tiles, 96, off_boundary(acts), out)
    assert_same_bits(out, reference.matmul(weights, acts))


@pytest.mark.parametrize("storage_type", QUANTISED)
@pytest.mark.parametrize("quant_index", [0, 1], ids=["lowest", "highest"])
def test_extreme_quants_do_not_saturate(
    isa: str, storage_type: StorageType, quant_index: int
) -> None:
    weights = random_weights(9, storage_type, 32, 128)
    assert weights.quants is not None
    weights.quants[...] = QUANT_RANGES[storage_type][quant_index]
    for sign in (1.0, -1.0):
        acts = quant.quantize_acts(np.full((5, 128), sign, np.float32))
        assert (np.abs(acts["quants"]) == 127).all()
        out = gemv.matmul_tiles(storage_type, tiles_of(weights), 128, acts)
        assert_same_bits(out, reference.matmul(weights, acts))
        if storage_type in ROW_TYPES:
            row_out = gemv.dot_rows(storage_type, rows_of(weights), 128, acts[0])
            assert_same_bits(row_out, out[0])


@pytest.mark.parametrize("storage_type", StorageType)
def test_zero_activations_give_zero(isa: str, storage_type: StorageType) -> None:
    acts = acts_of(storage_type, np.zeros((3, 96), np.float32))
    tiles = tiles_of(random_weights(10, storage_type, 40, 96))
    assert not gemv.matmul_tiles(storage_type, tiles, 96, acts).any()


@pytest.mark.parametrize("storage_type", StorageType)
def test_gather_row_equals_dense(isa: str, storage_type: StorageType) -> None:
    for rows, cols in shapes_of(storage_type):
        weights = random_weights(11, storage_type, rows, cols)
        tiles = tiles_of(weights)
        for row in {0, rows // 2, rows - 1}:
            gathered = gemv.gather_row(storage_type, tiles, cols, row)
            assert_same_bits(gathered, weights.dense()[row])


@pytest.mark.parametrize("storage_type", ROW_TYPES)
@pytest.mark.parametrize("num_rows", [1, 7, 8, 9, 16, 40])
def test_dot_rows_equals_matmul_tiles(isa: str, storage_type: StorageType, num_rows: int) -> None:
    for seed, cols in enumerate(ROW_COLS if storage_type.is_quantised else ROW_FLOAT_COLS):
        weights = random_weights(seed, storage_type, num_rows, cols)
        acts = acts_of(storage_type, normal(seed, 1, cols))
        expected = gemv.matmul_tiles(storage_type, tiles_of(weights), cols, acts)[0, :num_rows]
        rows = rows_of(weights)
        assert_same_bits(gemv.dot_rows(storage_type, rows, cols, acts[0]), expected)
        ids = np.random.default_rng(seed).integers(0, num_rows, 19).astype(np.uint32)
        assert_same_bits(gemv.dot_rows(storage_type, rows, cols, acts[0], ids), expected[ids])


@pytest.mark.parametrize("storage_type", QUANTISED_ROWS)
@pytest.mark.parametrize("cols", [4096 + 32, 4096 + 288, 8192 + 32, 8192 + 512, 16384 + 160])
def test_dot_rows_over_more_columns_than_are_arranged_at_once(
    isa: str, storage_type: StorageType, cols: int
) -> None:
    weights = random_weights(cols, storage_type, 11, cols)
    acts = quant.quantize_acts(normal(cols, 1, cols))
    expected = gemv.matmul_tiles(storage_type, tiles_of(weights), cols, acts)[0, :11]
    assert_same_bits(gemv.dot_rows(storage_type, rows_of(weights), cols, acts[0]), expected)


@pytest.mark.parametrize("storage_type", ROW_TYPES)
@pytest.mark.parametrize("num_rows", [1, 5, 8, 9, 16, 21])
def test_axpy_rows_equals_reference(isa: str, storage_type: StorageType, num_rows: int) -> None:
    for seed, cols in enumerate(ROW_COLS if storage_type.is_quantised else ROW_FLOAT_COLS):
        weights = random_weights(seed, storage_type, 20, cols)
        ids = np.random.default_rng(seed).integers(0, 20, num_rows).astype(np.uint32)
        coef, start = normal(seed + 1, num_rows), normal(seed + 2, cols)
        coef[num_rows // 2] = 0.0
        out = off_boundary(start)
        gemv.axpy_rows(storage_type, out, rows_of(weights), coef, ids)
        assert_same_bits(out, reference.axpy_rows(start, weights, coef, ids))


@pytest.mark.parametrize("storage_type", ROW_TYPES)
@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_axpy_rows_adds_nothing_times_zero(
    isa: str, storage_type: StorageType, zero: float
) -> None:
    cols = 96
    weights = random_weights(3, storage_type, 9, cols)
    start = normal(4, cols)
    out = start.copy()
    gemv.axpy_rows(storage_type, out, rows_of(weights), np.full(9, zero, np.float32))
    assert_same_bits(out, start)


@pytest.mark.parametrize("storage_type", ROW_TYPES)
@pytest.mark.parametrize("gap", [2, 30])
def test_rows_apart_and_off_every_boundary(isa: str, storage_type: StorageType, gap: int) -> None:
    num_rows, cols = 19, 544
    weights = random_weights(gap, storage_type, num_rows, cols)
    row_size = quant.row_bytes(storage_type, cols)
    bundles = np.full(2 + num_rows * (row_size + gap), 0x7C, np.uint8)
    for row, stored in enumerate(rows_of(weights).reshape(num_rows, row_size)):
        bundles[2 + row * (row_size + gap) :][:row_size] = stored
    acts = acts_of(storage_type, normal(5, 1, cols))
    coef, out, dots = normal(6, num_rows), normal(7, cols), np.empty(num_rows, np.float32)
    expected = reference.axpy_rows(out, weights, coef, np.arange(num_rows, dtype=np.uint32))
    stride, first = row_size + gap, ffi.from_buffer(bundles) + 2
    floats = [ffi.from_buffer("float[]", array) for array in (dots, coef, out)]
    x = ffi.from_buffer(acts)
    lib.dot_rows(storage_type, floats[0], first, stride, ffi.NULL, num_rows, cols, x)
    assert_same_bits(dots, reference.matmul(weights, acts)[0])
    lib.axpy_rows(storage_type, floats[2], first, stride, ffi.NULL, floats[1], num_rows, cols)
    assert_same_bits(out, expected)


@given(
    seed=st.integers(0, 2**32 - 1),
    storage_type=st.sampled_from(list(StorageType)),
    num_blocks=st.integers(1, 20),
    num_tokens=st.integers(1, 9),
    rows=st.integers(1, 70),
)
@settings(max_examples=60)
def test_instruction_sets_agree(
    seed: int, storage_type: StorageType, num_blocks: int, num_tokens: int, rows: int
) -> None:
    cols = 32 * num_blocks
    weights = random_weights(seed, storage_type, rows, cols)
    tiles = tiles_of(weights)
    stored_rows = rows_of(weights) if storage_type in ROW_TYPES else None
    x = normal(seed, num_tokens, cols)
    outputs = []
    before = isa_module.active()
    for name in isa_module.supported():
        isa_module.select(name)
        acts = acts_of(storage_type, x)
        outputs.append(gemv.matmul_tiles(storage_type, tiles, cols, acts))
        if stored_rows is not None:
            dots = gemv.dot_rows(storage_type, stored_rows, cols, acts[0])
            assert_same_bits(dots, outputs[-1][0, :rows])
    isa_module.select(before)
    for output in outputs:
        assert_same_bits(output, outputs[0])
