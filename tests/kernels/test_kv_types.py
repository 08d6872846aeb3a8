"""Keys and values as f16, q8 and q4: what is written, what is read back, how far it is off."""

import numpy as np
import pytest

from polyneuron.kernels import gemv, quant, reference
from polyneuron.kernels.buffers import F32
from polyneuron.kernels.quant import BLOCK_COLS, KV_TYPES, StorageType
from tests.kernels.builders import assert_same_bits, normal

QUANTISED = (StorageType.Q8, StorageType.Q4)
# Of a block's largest magnitude: half a step of 127, with the scale's f16; one of 8, since the
# largest value of the other sign than the largest magnitude has no quant of its own.
ERROR_BOUNDS = {StorageType.Q8: 0.5 / 127 * 1.08, StorageType.Q4: 1 / 8 * 1.001}
# Of values around zero, all together: rms of the error by that of the values.
RMS_BOUNDS = {StorageType.F16: 3e-4, StorageType.Q8: 6e-3, StorageType.Q4: 0.11}
BYTES_OF_128 = {StorageType.F16: 16384, StorageType.Q8: 8704, StorageType.Q4: 4608}


def name_of(storage: StorageType) -> str:
    return storage.name.lower()


def written(storage: StorageType, keys: F32, values: F32) -> np.ndarray:
    """A block of 32 tokens, begun as 0xFF, that holds keys and values (32, head_dim)."""
    block = np.full(quant.kv_block_bytes(keys.shape[1], storage), 0xFF, np.uint8)
    for slot in range(quant.KV_BLOCK_TOKENS):
        gemv.kv_write(block, slot, keys[slot], values[slot], storage)
    return block


@pytest.mark.parametrize("storage", KV_TYPES, ids=name_of)
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 256])
def test_rows_are_read_as_reference_stores_them(
    isa: str, storage: StorageType, head_dim: int
) -> None:
    keys, values = 3 * normal(1, 32, head_dim), 0.01 * normal(2, 32, head_dim)
    block = written(storage, keys, values)
    for slot in range(quant.KV_BLOCK_TOKENS):
        k, v = gemv.kv_read(block, slot, head_dim, storage)
        assert_same_bits(k, reference.stored_keys(keys[slot : slot + 1], storage)[0])
        assert_same_bits(v, reference.stored_keys(values[slot : slot + 1], storage)[0])


@pytest.mark.parametrize("storage", QUANTISED, ids=name_of)
def test_error_stays_in_bounds(storage: StorageType) -> None:
    x = normal(3, 32, 128) * np.exp(2 * normal(4, 32, 1))
    block = written(storage, x, -x)
    k = np.stack([gemv.kv_read(block, slot, 128, storage)[0] for slot in range(32)])
    blocks, found = x.reshape(32, -1, BLOCK_COLS), k.reshape(32, -1, BLOCK_COLS)
    largest = np.abs(blocks).max(axis=-1, keepdims=True)
    assert (np.abs(found - blocks) <= ERROR_BOUNDS[storage] * largest).all()


@pytest.mark.parametrize("storage", KV_TYPES, ids=name_of)
def test_rms_error_and_bytes(storage: StorageType) -> None:
    x = normal(5, 32, 128)
    block = written(storage, x, x)
    _, v = gemv.kv_read(block, 7, 128, storage)
    assert np.sqrt(np.mean((v - x[7]) ** 2) / np.mean(x[7] ** 2)) < RMS_BOUNDS[storage]
    assert quant.kv_block_bytes(128, storage) == BYTES_OF_128[storage]


@pytest.mark.parametrize("storage", KV_TYPES, ids=name_of)
def test_a_token_writes_its_own_bytes_only(storage: StorageType) -> None:
    """Executors write the tokens of a block side by side."""
    block = written(storage, normal(6, 32, 64), normal(7, 32, 64))
    before = [gemv.kv_read(block, slot, 64, storage) for slot in range(32)]
    touched = []
    for slot in (0, 15, 16, 31):
        copy = block.copy()
        gemv.kv_write(copy, slot, -9 * normal(8, 64), 9 * normal(9, 64), storage)
        touched.append(set(np.flatnonzero(copy != block)))
        for other in set(range(32)) - {slot}:
            for old, new in zip(before[other], gemv.kv_read(copy, other, 64, storage), strict=True):
                assert_same_bits(old, new)
    assert all(touched)
    assert sum(map(len, touched)) == len(set.union(*touched))


@pytest.mark.parametrize("storage", KV_TYPES, ids=name_of)
@pytest.mark.parametrize("fault", [np.nan, np.inf, -np.inf])
def test_a_fault_upstream_shows(isa: str, storage: StorageType, fault: float) -> None:
    block = np.zeros(quant.kv_block_bytes(32, storage), np.uint8)
    x = normal(10, 32)
    x[5] = fault
    gemv.kv_write(block, 0, x, np.zeros(32, np.float32), storage)
    k, v = gemv.kv_read(block, 0, 32, storage)
    assert not np.isfinite(k[5])
    assert not v.any()


def test_other_types_and_dims_are_refused() -> None:
    with pytest.raises(ValueError, match="storage_type: q4m, needs f16, q8 or q4"):
        quant.kv_block_bytes(64, StorageType.Q4M)
    with pytest.raises(ValueError, match="cols: 80 with q8, needs a positive multiple of 32"):
        quant.kv_block_bytes(80, StorageType.Q8)


@pytest.mark.parametrize("storage", QUANTISED, ids=name_of)
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 160, 256])
@pytest.mark.parametrize("num_positions", [1, 33, 70])
def test_attention_equals_reference(
    isa: str, storage: StorageType, head_dim: int, num_positions: int
) -> None:
    keys, values = normal(11, num_positions, head_dim), normal(12, num_positions, head_dim)
    kv, table = cache_of(storage, keys, values)
    for num_queries in (1, 2, 3, 4, 5, 9):
        q = normal(num_queries, num_queries, head_dim)
        out = gemv.attention_heads(q, kv, table, num_positions, 0.125, storage_type=storage)
        assert_same_bits(
            out, reference.attention_heads(q, keys, values, 0.125, storage_type=storage)
        )


@pytest.mark.parametrize("storage", QUANTISED, ids=name_of)
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128])
@pytest.mark.parametrize(("first", "num_tokens"), [(1, 70), (31, 3), (60, 37)])
def test_a_block_of_tokens_equals_them_one_by_one(
    isa: str, storage: StorageType, head_dim: int, first: int, num_tokens: int
) -> None:
    last = first + num_tokens - 1
    kv, table = cache_of(storage, normal(13, last, head_dim), normal(14, last, head_dim))
    for num_queries in (1, 3, 5):
        q = normal(num_queries, num_tokens, num_queries, head_dim)
        out = gemv.attention_block(q, kv, table, first, 0.125, storage_type=storage)
        for t in range(num_tokens):
            alone = gemv.attention_heads(q[t], kv, table, first + t, 0.125, storage_type=storage)
            assert_same_bits(out[t], alone)


def cache_of(storage: StorageType, keys: F32, values: F32) -> tuple[np.ndarray, np.ndarray]:
    """Blocks that hold keys and values (num_positions, head_dim), and their table."""
    num_blocks = -(-len(keys) // quant.KV_BLOCK_TOKENS)
    kv = np.full((num_blocks, quant.kv_block_bytes(keys.shape[1], storage)), 0xFF, np.uint8)
    table = np.arange(num_blocks, dtype=np.int32)[::-1].copy()
    for p, (k, v) in enumerate(zip(keys, values, strict=True)):
        block = kv[table[p // quant.KV_BLOCK_TOKENS]]
        gemv.kv_write(block, p % quant.KV_BLOCK_TOKENS, k, v, storage)
    return kv, table


class TestSpread:
    @pytest.mark.parametrize("n", [32, 64, 96, 128, 160, 256])
    def test_equals_reference(self, n: int) -> None:
        x = 5 * normal(15, n)
        assert_same_bits(gemv.spread_values(x, 0.25), reference.spread_values(x, 0.25))

    @pytest.mark.parametrize("n", [64, 96])
    def test_products_are_kept(self, n: int) -> None:
        q, k, size = normal(16, n), normal(17, n), n & -n
        spread = gemv.spread_values(q, 1.0) @ gemv.spread_values(k, 1.0 / size)
        assert np.isclose(spread, q @ k, rtol=1e-5)
        there_and_back = gemv.spread_values(gemv.spread_values(k, 1.0 / size), 1.0)
        assert np.allclose(there_and_back, k, atol=1e-6)

    @pytest.mark.parametrize("storage", QUANTISED, ids=name_of)
    def test_small_values_beside_large_ones_are_kept(self, storage: StorageType) -> None:
        """Keys have a few dimensions ten times as large as the others, which take all quants."""
        k = normal(18, 64)
        k[[3, 40]] *= 20
        block = np.zeros(quant.kv_block_bytes(64, storage), np.uint8)
        small = np.delete(np.arange(64), [3, 40])

        def error_of(stored: F32, back: float) -> float:
            gemv.kv_write(block, 0, stored, stored, storage)
            found = gemv.kv_read(block, 0, 64, storage)[0]
            found = gemv.spread_values(found, back) if back else found
            return float(np.square(found - k)[small].mean())

        spread = gemv.spread_values(k, 1 / 64)
        assert error_of(spread, 1.0) < 0.8 * error_of(k, 0.0)
