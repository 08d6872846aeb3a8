"""Packing against the block decoders of the `gguf` package, through what the kernels read back."""

from collections.abc import Iterator

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

from polyneuron.errors import FormatError
from polyneuron.io import pack
from polyneuron.io.ggml_types import GGML_TYPES, SUPPORTED_TYPES
from polyneuron.io.gguf_file import GgufTensor
from polyneuron.io.pack import (
    PackError,
    bf16_fits_f16,
    is_lossless,
    pack_rows_into,
    packed_bytes,
    storage_type,
    vector_values,
)
from polyneuron.kernels.gemv import gather_row
from polyneuron.kernels.quant import StorageType
from tests.support.random_blocks import encode

F32 = NDArray[np.float32]
SUPPORTED = tuple(GGML_TYPES[type_id].name for type_id in SUPPORTED_TYPES)
NUM_COLS = 512
# Largest relative root mean square error on normally distributed weights; 0: lossless.
BOUNDS = {
    "F32": 0.0, "F16": 0.0, "BF16": 1e-6, "Q4_0": 0.0, "Q4_1": 0.0, "Q5_0": 0.0, "Q5_1": 7e-3,
    "Q8_0": 0.0, "Q2_K": 6e-3, "Q3_K": 6e-3, "Q4_K": 4e-4, "Q5_K": 6e-3, "Q6_K": 6e-3,
}  # fmt: skip


def make_tensor(type_name: str, num_rows: int, seed: int = 0) -> tuple[GgufTensor, bytes, F32]:
    """A random matrix: its table row, its bytes in the file, its decoded values."""
    kind = next(kind for kind in GGML_TYPES.values() if kind.name == type_name)
    rng = np.random.default_rng(seed)
    weights = (0.05 * rng.standard_normal((num_rows, NUM_COLS))).astype(np.float32)
    blocks = np.ascontiguousarray(encode(type_name, weights)).view(np.uint8)
    values = dequantize(blocks.reshape(num_rows, -1), GGMLQuantizationType(kind.type_id))
    tensor = GgufTensor("w", kind.type_id, (num_rows, NUM_COLS), 0, blocks.nbytes)
    return tensor, blocks.tobytes(), values.astype(np.float32)


def stored_rows(storage: StorageType, tiles: NDArray[np.uint8], num_rows: int) -> F32:
    """What the kernels read from the tiles."""
    return np.stack([gather_row(storage, tiles, NUM_COLS, row) for row in range(num_rows)])


def pack_all(tensor: GgufTensor, raw: bytes) -> tuple[StorageType, NDArray[np.uint8], PackError]:
    """Pack a whole tensor as its own storage type."""
    storage = storage_type(tensor)
    tiles = np.empty(packed_bytes(tensor, storage), np.uint8)
    return storage, tiles, pack_rows_into(tensor, storage, raw, tiles)


@pytest.fixture(params=[1 << 18, 32 * NUM_COLS], ids=["one_chunk", "chunk_a_tile"])
def chunk_values(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Rows decoded at once: all of them, or one tile."""
    monkeypatch.setattr(pack, "MAX_CHUNK_VALUES", request.param)
    yield request.param


class TestPackedValues:
    @pytest.mark.parametrize("num_rows", [1, 31, 32, 33, 100])
    @pytest.mark.parametrize("type_name", SUPPORTED)
    def test_stored_values_are_within_bound(
        self, type_name: str, num_rows: int, chunk_values: int
    ) -> None:
        tensor, raw, values = make_tensor(type_name, num_rows)
        storage, tiles, error = pack_all(tensor, raw)
        stored = stored_rows(storage, tiles, num_rows)
        difference = np.abs(stored.astype(np.float64) - values)
        assert error.max_abs == pytest.approx(difference.max(), rel=1e-6, abs=0.0)
        rms = np.sqrt(np.square(difference).sum() / np.square(values.astype(np.float64)).sum())
        assert error.relative_rms == pytest.approx(rms, rel=1e-3, abs=0.0)
        assert error.relative_rms <= BOUNDS[type_name]
        assert is_lossless(tensor, storage) == (BOUNDS[type_name] == 0.0)
        assert error.is_lossless == (difference.max() == 0.0)

    @pytest.mark.parametrize("type_name", SUPPORTED)
    def test_rows_after_the_last_are_zero(self, type_name: str) -> None:
        tensor, raw, _ = make_tensor(type_name, 33)
        storage, tiles, _ = pack_all(tensor, raw)
        assert not stored_rows(storage, tiles, 64)[33:].any()

    def test_parts_equal_the_whole(self) -> None:
        tensor, raw, _ = make_tensor("Q4_K", 96)
        storage, tiles, error = pack_all(tensor, raw)
        parts, total = np.empty_like(tiles), PackError()
        middle, tile_size = 64 * tensor.row_bytes, len(tiles) // 3
        total += pack_rows_into(tensor, storage, raw[:middle], parts[: 2 * tile_size])
        total += pack_rows_into(tensor, storage, raw[middle:], parts.data[2 * tile_size :])
        assert (parts == tiles).all()
        assert total.max_abs == error.max_abs
        assert total.relative_rms == pytest.approx(error.relative_rms, rel=1e-6)

    def test_q4_k_keeps_its_quants(self) -> None:
        _, raw, values = make_tensor("Q4_K", 32)
        rows = np.frombuffer(raw, np.uint8).reshape(32, -1)
        quants, scale, minimum = pack.split_q4_k(rows, NUM_COLS)
        blocks = quants.reshape(32, -1, 32).astype(np.float32)
        rebuilt = blocks * scale[..., None].astype(np.float32) + minimum[..., None]
        assert quants.max() == 15
        assert np.abs(rebuilt.reshape(32, -1) - values).max() < 1e-3 * np.abs(values).max()


class TestStorageType:
    def test_every_type_goes_where_the_design_says(self) -> None:
        expected = {
            "F32": "F32", "F16": "F16", "BF16": "F16", "Q4_0": "Q4", "Q4_1": "Q4M", "Q5_0": "Q8",
            "Q5_1": "Q8", "Q8_0": "Q8", "Q2_K": "Q8", "Q3_K": "Q8", "Q4_K": "Q4M", "Q5_K": "Q8",
            "Q6_K": "Q8",
        }  # fmt: skip
        found = {name: storage_type(make_tensor(name, 1)[0]).name for name in SUPPORTED}
        assert found == expected

    def test_vector_is_f32(self) -> None:
        assert storage_type(GgufTensor("norm", 1, (64,), 0, 128)) is StorageType.F32

    def test_bf16_beyond_f16_goes_to_f32(self) -> None:
        weights = np.ones((32, NUM_COLS), np.float32)
        weights[3, 4] = 70000.0
        raw = np.ascontiguousarray(encode("BF16", weights)).tobytes()
        tensor = GgufTensor("w", 30, weights.shape, 0, len(raw))
        assert not bf16_fits_f16(raw)
        storage = storage_type(tensor, bf16_fits=False)
        tiles = np.empty(packed_bytes(tensor, storage), np.uint8)
        assert pack_rows_into(tensor, storage, raw, tiles).is_lossless
        assert stored_rows(storage, tiles, 32)[3, 4] == pytest.approx(70000.0, rel=1 / 256)
        halves = np.empty(packed_bytes(tensor, StorageType.F16), np.uint8)
        with pytest.raises(FormatError, match="beyond the range of f16"):
            pack_rows_into(tensor, StorageType.F16, raw, halves)

    def test_bf16_inside_f16_fits(self) -> None:
        assert bf16_fits_f16(
            np.array([65280.0, -65280.0], np.float32).view(np.uint16)[1::2].tobytes()
        )
        assert not bf16_fits_f16(np.array([np.nan], np.float32).view(np.uint16)[1::2].tobytes())


class TestBadInput:
    def test_values_that_are_not_finite_are_refused(self) -> None:
        tensor, raw, _ = make_tensor("Q6_K", 32)
        broken = np.frombuffer(raw, np.uint8).reshape(-1, 210).copy()
        broken[5, 208:210] = np.array([np.inf], np.float16).view(np.uint8)
        tiles = np.empty(packed_bytes(tensor, StorageType.Q8), np.uint8)
        with pytest.raises(FormatError, match=r"'w' holds values that are not finite"):
            pack_rows_into(tensor, StorageType.Q8, broken.tobytes(), tiles)

    def test_partial_row_is_refused(self) -> None:
        tensor, raw, _ = make_tensor("Q8_0", 32)
        tiles = np.empty(packed_bytes(tensor, StorageType.Q8), np.uint8)
        with pytest.raises(ValueError, match="whole rows"):
            pack_rows_into(tensor, StorageType.Q8, raw[:-1], tiles)

    def test_wrong_room_is_refused(self) -> None:
        tensor, raw, _ = make_tensor("Q8_0", 32)
        tiles = np.empty(packed_bytes(tensor, StorageType.Q8) + 1, np.uint8)
        with pytest.raises(ValueError, match="out:"):
            pack_rows_into(tensor, StorageType.Q8, raw, tiles)


@pytest.mark.parametrize("type_name", ["F32", "F16", "BF16"])
def test_vector_values_are_decoded(type_name: str) -> None:
    kind = next(kind for kind in GGML_TYPES.values() if kind.name == type_name)
    weights = np.linspace(-2, 2, 64, dtype=np.float32)
    raw = np.ascontiguousarray(encode(type_name, weights)).tobytes()
    tensor = GgufTensor("norm", kind.type_id, (64,), 0, len(raw))
    np.testing.assert_allclose(vector_values(tensor, raw), weights, rtol=2**-8)
