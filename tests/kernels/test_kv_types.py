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
