"""Products with stored weights, on every instruction set."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyneuron.kernels import gemv, quant, reference
from polyneuron.kernels import isa as isa_module
from polyneuron.kernels.buffers import F32, Array
from polyneuron.kernels.quant import StorageType
from tests.kernels.builders import (
    QUANTISED,
    assert_same_bits,
    normal,
    off_boundary,
    random_weights,
    rows_of,
    tiles_of,
)

SHAPES = [(32, 32), (64, 64), (33, 96), (1, 512), (70, 544), (96, 1056)]
FLOAT_COLS = [1, 15, 16, 17, 33, 100]

# Largest difference from the float64 product of dequantised weights and activations, as a share of
# the sum of the terms' magnitudes: one rounding a block (quantised) or a column (float).
ERROR_BOUND = {
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
    low_high = {StorageType.Q4: (-8, 7), StorageType.Q4M: (0, 15), StorageType.Q8: (-128, 127)}
    weights = random_weights(9, storage_type, 32, 128)
    assert weights.quants is not None
    weights.quants[...] = low_high[storage_type][quant_index]
    for sign in (1.0, -1.0):
        acts = quant.quantize_acts(np.full((5, 128), sign, np.float32))
        assert (np.abs(acts["quants"]) == 127).all()
        out = gemv.matmul_tiles(storage_type, tiles_of(weights), 128, acts)
        assert_same_bits(out, reference.matmul(weights, acts))
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


@pytest.mark.parametrize("storage_type", StorageType)
@pytest.mark.parametrize("num_rows", [1, 7, 8, 9, 40])
def test_dot_rows_equals_matmul_tiles(isa: str, storage_type: StorageType, num_rows: int) -> None:
    for seed, cols in enumerate([32, 256, 288, 512, 544, 1056]):
        cols = cols if storage_type.is_quantised else cols + 1
        weights = random_weights(seed, storage_type, num_rows, cols)
        acts = acts_of(storage_type, normal(seed, 1, cols))
        expected = gemv.matmul_tiles(storage_type, tiles_of(weights), cols, acts)[0, :num_rows]
        rows = rows_of(weights)
        assert_same_bits(gemv.dot_rows(storage_type, rows, cols, acts[0]), expected)
        ids = np.random.default_rng(seed).integers(0, num_rows, 19).astype(np.uint32)
        assert_same_bits(gemv.dot_rows(storage_type, rows, cols, acts[0], ids), expected[ids])


@pytest.mark.parametrize("storage_type", StorageType)
def test_axpy_rows_equals_reference(isa: str, storage_type: StorageType) -> None:
    for seed, cols in enumerate([32, 64, 96, 544]):
        cols = cols if storage_type.is_quantised else cols - seed
        weights = random_weights(seed, storage_type, 20, cols)
        ids = np.array([3, 19, 0, 3, 7], np.uint32)
        coef, start = normal(seed + 1, 5), normal(seed + 2, cols)
        out = off_boundary(start)
        gemv.axpy_rows(storage_type, out, rows_of(weights), coef, ids)
        assert_same_bits(out, reference.axpy_rows(start, weights, coef, ids))


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
    tiles, stored_rows = tiles_of(weights), rows_of(weights)
    x = normal(seed, num_tokens, cols)
    outputs = []
    before = isa_module.active()
    for name in isa_module.supported():
        isa_module.select(name)
        acts = acts_of(storage_type, x)
        outputs.append(gemv.matmul_tiles(storage_type, tiles, cols, acts))
        dots = gemv.dot_rows(storage_type, stored_rows, cols, acts[0])
        assert_same_bits(dots, outputs[-1][0, :rows])
    isa_module.select(before)
    for output in outputs:
        assert_same_bits(output, outputs[0])
