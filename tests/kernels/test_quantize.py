"""Quantised activations and packing."""

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from polyneuron.kernels import gemv, quant, reference
from polyneuron.kernels import isa as isa_module
from polyneuron.kernels.buffers import F32
from polyneuron.kernels.quant import GgmlType, StorageType
from tests.kernels.builders import (
    GGML_TYPES,
    ROW_TYPES,
    assert_same_bits,
    ggml_bytes,
    normal,
    off_boundary,
    random_weights,
    rows_of,
    tiles_of,
)

# Rounding to 127 levels of the block's largest magnitude, half a level, and float error on top.
ACT_ERROR_BOUND = 0.5 / 127 * (1 + 1e-5)
# The same for q8 weights, whose scale is a half float: up to 2^-11 too small, then clamped.
Q8_ERROR_BOUND = 0.5 / 127 + 2.0**-11


@pytest.mark.parametrize("cols", [32, 64, 96, 544])
def test_quantize_acts_equals_reference(isa: str, cols: int) -> None:
    x = off_boundary(normal(1, 3, cols))
    actual, expected = quant.quantize_acts(x), reference.quantize_acts(x)
    assert actual.tobytes() == expected.tobytes()


def test_quantize_acts_error(isa: str) -> None:
    x = normal(2, 64, 256)
    acts = quant.quantize_acts(x)
    values = acts["quants"].astype(np.float64) * acts["scale"][..., np.newaxis]
    blocks = x.reshape(values.shape).astype(np.float64)
    amax = np.abs(blocks).max(axis=-1, keepdims=True)
    assert (np.abs(values - blocks) / amax).max() < ACT_ERROR_BOUND


@given(
    arrays(
        np.float32,
        (2, 32),
        elements=st.one_of(
            st.floats(width=32, allow_nan=False, allow_infinity=False),
            st.floats(-(2.0**-118), 2.0**-118, width=32, allow_subnormal=True),
            st.sampled_from([0.0, -0.0, 0.5, 1.5, 63.5, -63.5, 127.0, 3.4028234663852886e38]),
        ),
    )
)
def test_quantize_acts_of_any_finite_values(x: F32) -> None:
    expected = reference.quantize_acts(x).tobytes()
    before = isa_module.active()
    for name in isa_module.supported():
        isa_module.select(name)
        assert quant.quantize_acts(x).tobytes() == expected, name
    isa_module.select(before)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_quantize_acts_shows_bad_values_in_the_scale(isa: str, bad: float) -> None:
    x = normal(3, 1, 64)
    x[0, 5] = bad
    acts = quant.quantize_acts(x)[0]
    assert not np.isfinite(acts["scale"][0])
    assert not acts["quants"][0].any() and acts["sum"][0] == 0
    assert np.isfinite(acts["scale"][1])


@pytest.mark.parametrize("exponent", [-119, -120, -121, -126, -149])
def test_quantize_acts_of_tiny_blocks(isa: str, exponent: int) -> None:
    x = np.full((1, 32), 2.0**exponent, np.float32)
    acts = quant.quantize_acts(x)
    is_kept = exponent >= -120
    assert (acts["quants"] == (127 if is_kept else 0)).all()
    assert (acts["scale"] > 0).all() == is_kept
    assert acts.tobytes() == reference.quantize_acts(x).tobytes()


@pytest.mark.parametrize("storage_type", ROW_TYPES)
@pytest.mark.parametrize("rows", [1, 31, 32, 33, 64])
def test_packing_is_lossless(storage_type: StorageType, rows: int) -> None:
    cols = 96
    weights = random_weights(rows, storage_type, rows, cols)
    ggml_type = gguf.GGMLQuantizationType(int(GGML_TYPES[storage_type]))
    source = ggml_bytes(weights)
    by_gguf = gguf.quants.dequantize(source.reshape(rows, -1), ggml_type)
    assert_same_bits(weights.dense(), by_gguf.astype(np.float32).reshape(rows, cols))
    tiles = tiles_of(weights)
    for row in range(rows):
        assert_same_bits(gemv.gather_row(storage_type, tiles, cols, row), weights.dense()[row])
    for row in range(rows, 32 * quant.num_tiles(rows)):
        padding = gemv.gather_row(storage_type, tiles, cols, row)
        assert not padding.any()


def test_q5_0_is_packed_as_q8_losslessly() -> None:
    rows, cols = 40, 128
    source = gguf.quants.quantize(normal(5, rows, cols), gguf.GGMLQuantizationType.Q5_0)
    expected = gguf.quants.dequantize(source, gguf.GGMLQuantizationType.Q5_0)
    tiles = quant.pack_tiles(StorageType.Q8, GgmlType.Q5_0, source.reshape(-1), rows, cols)
    for row in range(rows):
        assert_same_bits(gemv.gather_row(StorageType.Q8, tiles, cols, row), expected[row])


@pytest.mark.parametrize("storage_type", [StorageType.Q8, StorageType.F16, StorageType.F32])
def test_packing_from_f32(storage_type: StorageType) -> None:
    x = normal(6, 45, 96)
    x[3, :32] = 0.0
    x[4, :32] *= 1e-9
    x[5, 0] = 2e7
    tiles = quant.pack_tiles_from_f32(storage_type, x)
    dense = np.stack([gemv.gather_row(storage_type, tiles, 96, row) for row in range(45)])
    if storage_type == StorageType.Q8:
        amax = np.repeat(np.abs(x).reshape(45, 3, 32).max(axis=-1), 32, axis=1)
        fits = (amax > 127 * 2.0**-14) & (amax < 65504 * 127)  # the scale is a normal half
        error = np.abs(dense - x)[fits] / amax[fits]
        assert fits.mean() > 0.9 and error.max() < Q8_ERROR_BOUND
        assert np.isfinite(dense).all() and not dense[3, :32].any()
    else:
        with np.errstate(over="ignore"):
            rounded = x.astype(np.float16 if storage_type == StorageType.F16 else np.float32)
        assert_same_bits(dense, rounded.astype(np.float32))
    rows = quant.pack_rows_from_f32(storage_type, x)
    coef = np.ones(1, np.float32)
    for row in range(45):
        out = np.zeros(96, np.float32)
        gemv.axpy_rows(storage_type, out, rows, coef, np.array([row], np.uint32))
        assert np.array_equal(out, dense[row])


def hard_q4_blocks() -> F32:
    """Blocks of zeros, of equal magnitudes, of ties, and of scales at the ends of f16's range."""
    x = normal(11, 12, 64)
    x[0] = 0.0
    x[1] = np.where(np.arange(64) % 3, np.float32(1.5), np.float32(-1.5))
    x[2] = -x[1]
    x[3] = (np.arange(64) % 16 - 7.5) / 2  # with a scale of 1/2, all half way between quants
    x[3, ::32] = -4.0
    factors = np.array([1e-45, 1e-39, 1e-38, 1e-7, 1e-5, 1e5, 1e7, 1e38], np.float32)
    x[4:] *= factors[:, np.newaxis]
    return x


def test_q4_from_f32_equals_reference() -> None:
    for x in (normal(12, 45, 544), hard_q4_blocks()):
        expected = reference.quantize_q4(x)
        assert np.isfinite(expected.dense()).all()
        assert np.array_equal(quant.pack_rows_from_f32(StorageType.Q4, x), rows_of(expected))
        assert np.array_equal(quant.pack_tiles_from_f32(StorageType.Q4, x), tiles_of(expected))


def test_q4_from_f32_equals_ggml() -> None:
    x = np.concatenate([normal(13, 200, 64), hard_q4_blocks()[:4]])
    by_gguf = gguf.quants.quantize(x, gguf.GGMLQuantizationType.Q4_0)
    expected = quant.pack_rows(StorageType.Q4, GgmlType.Q4_0, by_gguf.reshape(-1), *x.shape)
    assert np.array_equal(quant.pack_rows_from_f32(StorageType.Q4, x), expected)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_q4_of_bad_values_spoils_its_block_alone(bad: float) -> None:
    x = normal(14, 1, 64)
    expected = reference.quantize_q4(x)
    x[0, 3] = bad
    packed = quant.pack_rows_from_f32(StorageType.Q4, x)
    assert np.array_equal(packed[16:32], rows_of(expected)[16:32])
    assert np.array_equal(packed[34:], rows_of(expected)[34:])


def hard_q1_blocks() -> F32:
    """Zeros of both signs, equal magnitudes, and means at the ends of f16's range and of f32's."""
    x = normal(15, 9, 64)
    x[0] = np.where(np.arange(64) % 2, np.float32(0.0), np.float32(-0.0))
    x[1] = np.where(np.arange(64) % 3, np.float32(1.5), np.float32(-1.5))
    x[2:] *= np.array([1e-45, 1e-39, 1e-7, 1e-5, 1e5, 1e7, 3e37], np.float32)[:, np.newaxis]
    return x


@pytest.mark.parametrize("rows", [1, 32, 45])
def test_q1_from_f32_equals_reference(isa: str, rows: int) -> None:
    for x in (normal(16, rows, 544), hard_q1_blocks()):
        expected = reference.quantize_q1(x)
        assert np.isfinite(expected.dense()).all()
        tiles = quant.pack_tiles_from_f32(StorageType.Q1, x)
        assert np.array_equal(tiles, tiles_of(expected))
        for row in range(len(x)):
            gathered = gemv.gather_row(StorageType.Q1, tiles, x.shape[1], row)
            assert_same_bits(gathered, expected.dense()[row])


def test_q1_takes_a_scale() -> None:
    x = normal(17, 3, 96)
    scale = normal(18, 3, 3).astype(np.float16)
    tiles = quant.pack_tiles_q1(x, scale)
    expected = np.where(x >= 0, np.float32(1.0), np.float32(-1.0))
    expected *= np.repeat(scale.astype(np.float32), 32, axis=1)
    for row in range(3):
        assert_same_bits(gemv.gather_row(StorageType.Q1, tiles, 96, row), expected[row])


def test_q1_of_a_nan_shows_in_its_block_alone() -> None:
    x = normal(19, 1, 64)
    x[0, 3] = np.nan
    gathered = gemv.gather_row(StorageType.Q1, quant.pack_tiles_q1(x), 64, 0)
    assert np.isnan(gathered[:32]).all() and np.isfinite(gathered[32:]).all()


def test_q1_layout() -> None:
    x = np.full((32, 32), -1.0, np.float32)
    x[5, 4 * 3 + 2] = 1.0  # bit 3 of byte 2 of the word of row 5
    tile = quant.pack_tiles_q1(x)
    assert tile.size == quant.tile_bytes(StorageType.Q1, 32) == 192
    assert (tile[:64].view(np.float16) == 1.0).all()
    assert np.flatnonzero(tile[64:]).tolist() == [4 * 5 + 2] and tile[64 + 4 * 5 + 2] == 1 << 3


def test_every_half_is_read_exactly(isa: str) -> None:
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    source = halves.view(np.uint8)
    rows = quant.pack_rows(StorageType.F16, GgmlType.F16, source, 64, 1024)
    with np.errstate(invalid="ignore"):
        expected = halves.astype(np.float32).reshape(64, 1024) + np.float32(0.0)
    for row in range(64):
        out = np.zeros(1024, np.float32)
        ids = np.array([row], np.uint32)
        gemv.axpy_rows(StorageType.F16, out, rows, np.ones(1, np.float32), ids)
        assert_same_bits(out, expected[row])


def test_q4m_parts_equal_q4_1_blocks() -> None:
    weights = random_weights(8, StorageType.Q4M, 40, 96)
    assert weights.quants is not None and weights.scale is not None
    assert weights.minimum is not None
    quants = weights.quants.astype(np.uint8)
    tiles = quant.pack_tiles_q4m_parts(quants, weights.scale, weights.minimum)
    assert np.array_equal(tiles, tiles_of(weights))


def test_pairs_without_lossless_packing_are_refused() -> None:
    source = ggml_bytes(random_weights(9, StorageType.Q8, 1, 32))
    with pytest.raises(ValueError, match="Q8_0 cannot be packed as q4"):
        quant.pack_tiles(StorageType.Q4, GgmlType.Q8_0, source, 1, 32)
    with pytest.raises(ValueError, match="Q8_0 cannot be packed as q1"):
        quant.pack_tiles(StorageType.Q1, GgmlType.Q8_0, source, 1, 32)
    with pytest.raises(ValueError, match="float32 cannot be packed as q4m"):
        quant.pack_rows_from_f32(StorageType.Q4M, normal(1, 1, 32))


def test_row_sizes() -> None:
    weights = random_weights(10, StorageType.Q4, 3, 64)
    assert rows_of(weights).size == 3 * quant.row_bytes(StorageType.Q4, 64) == 3 * 36
    assert quant.tile_bytes(StorageType.Q4M, 64) == 2 * 640
