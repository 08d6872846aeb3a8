"""Weights made up for tests, in the stored layouts, and comparison bit for bit."""

from typing import Any

import numpy as np
import numpy.typing as npt

from polyneuron.kernels import quant
from polyneuron.kernels.buffers import F32
from polyneuron.kernels.quant import BLOCK_COLS, GgmlType, StorageType
from polyneuron.kernels.reference import Weights

# q1 is stored in tiles only, and has no ggml type.
ROW_TYPES = tuple(storage for storage in StorageType if storage is not StorageType.Q1)
QUANTISED_ROWS = (StorageType.Q4, StorageType.Q4M, StorageType.Q8)
QUANTISED = (*QUANTISED_ROWS, StorageType.Q1)
GGML_TYPES = {
    StorageType.Q4: GgmlType.Q4_0,
    StorageType.Q4M: GgmlType.Q4_1,
    StorageType.Q8: GgmlType.Q8_0,
    StorageType.F16: GgmlType.F16,
    StorageType.F32: GgmlType.F32,
}
QUANT_RANGES = {
    StorageType.Q1: (-1, 1),
    StorageType.Q4: (-8, 7),
    StorageType.Q4M: (0, 15),
    StorageType.Q8: (-128, 127),
}


def normal(seed: int, *shape: int) -> F32:
    """Float32 values around zero."""
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def random_weights(seed: int, storage_type: StorageType, rows: int, cols: int) -> Weights:
    """Weights over the whole range of quants; one block in eight has a zero scale."""
    rng = np.random.default_rng(seed)
    if not storage_type.is_quantised:
        values = rng.standard_normal((rows, cols))
        if storage_type == StorageType.F16:
            return Weights(storage_type, values=values.astype(np.float16))
        return Weights(storage_type, values=values.astype(np.float32))
    low, high = QUANT_RANGES[storage_type]
    quants = rng.integers(low, high, (rows, cols), np.int32, endpoint=True)
    if storage_type is StorageType.Q1:
        quants[quants == 0] = 1
    blocks = (rows, cols // BLOCK_COLS)
    scale = rng.standard_normal(blocks) * 0.05
    scale[rng.random(blocks) < 0.125] = 0.0
    minimum = rng.standard_normal(blocks).astype(np.float16)
    return Weights(
        storage_type,
        quants,
        scale.astype(np.float16),
        minimum if storage_type == StorageType.Q4M else None,
    )


def ggml_bytes(weights: Weights) -> npt.NDArray[np.uint8]:
    """The weights as ggml blocks, row-major."""
    if weights.values is not None:
        return np.frombuffer(weights.values.tobytes(), np.uint8)
    assert weights.quants is not None and weights.scale is not None
    rows, cols = weights.quants.shape
    quants = weights.quants.reshape(rows, cols // BLOCK_COLS, BLOCK_COLS)
    parts = [weights.scale[..., np.newaxis].view(np.uint8)]
    if weights.minimum is not None:
        parts.append(weights.minimum[..., np.newaxis].view(np.uint8))
    if weights.storage_type == StorageType.Q8:
        parts.append(quants.astype(np.int8).view(np.uint8))
    else:
        nibbles = quants - QUANT_RANGES[weights.storage_type][0]
        parts.append((nibbles[..., :16] | nibbles[..., 16:] << 4).astype(np.uint8))
    return np.concatenate(parts, axis=-1).reshape(-1)


def tiles_of(weights: Weights) -> npt.NDArray[np.uint8]:
    """The weights packed into tiles."""
    rows, cols = weights.dense().shape
    if weights.storage_type is StorageType.Q1:
        assert weights.quants is not None
        return quant.pack_tiles_q1(weights.quants.astype(np.float32), weights.scale)
    ggml_type = GGML_TYPES[weights.storage_type]
    return quant.pack_tiles(weights.storage_type, ggml_type, ggml_bytes(weights), rows, cols)


def rows_of(weights: Weights) -> npt.NDArray[np.uint8]:
    """The weights packed into neuron-major rows."""
    rows, cols = weights.dense().shape
    ggml_type = GGML_TYPES[weights.storage_type]
    return quant.pack_rows(weights.storage_type, ggml_type, ggml_bytes(weights), rows, cols)


def off_boundary(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """A copy that begins one element past a 64-byte boundary."""
    memory = np.empty(array.nbytes + 128 + array.itemsize, np.uint8)
    start = -memory.ctypes.data % 64 + array.itemsize
    copy = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def assert_same_bits(actual: npt.NDArray[Any], expected: npt.NDArray[Any]) -> None:
    """Equal shapes and equal float32 bits; a NaN equals any NaN."""
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype == np.float32
    same = actual.view(np.uint32) == expected.view(np.uint32)
    same |= np.isnan(actual) & np.isnan(expected)
    wrong = np.argwhere(~same)
    assert wrong.size == 0, (
        f"{len(wrong)} of {actual.size} differ, first at {tuple(wrong[0])}: "
        f"{actual[tuple(wrong[0])]!r} for {expected[tuple(wrong[0])]!r}"
    )
