"""OpenVINO on the CPU beside the native kernels, graph by graph; NPUs and GPUs were not here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from polyneuron.backends.backend import Buffers, ShapeBucket
from polyneuron.backends.native import NativeBackend
from polyneuron.backends.openvino_backend import STORAGES, OpenvinoBackend
from polyneuron.errors import BackendError, ConfigError
from polyneuron.kernels.quant import (
    StorageType,
    pack_tiles_from_f32,
    pack_tiles_q4m_parts,
    quantize_acts,
)

pytest.importorskip("openvino", reason="the extra `openvino` is not installed")

BOUND = 2e-6
"""Of the largest output: both add the same float32 products, in different orders."""


@pytest.fixture(scope="module")
def backend() -> Iterator[OpenvinoBackend]:
    yield OpenvinoBackend("CPU", 1)


def packed(
    storage: StorageType, rows: int, cols: int
) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    rng = np.random.default_rng(rows + cols)
    if storage is not StorageType.Q4M:
        return pack_tiles_from_f32(storage, rng.standard_normal((rows, cols)).astype(np.float32))
    quants = rng.integers(0, 16, (rows, cols)).astype(np.uint8)
    scale = rng.uniform(0.01, 0.1, (rows, cols // 32)).astype(np.float16)
    return pack_tiles_q4m_parts(quants, scale, (-8 * scale).astype(np.float16))


def buffers(bucket: ShapeBucket) -> Buffers:
    rng = np.random.default_rng(bucket.tokens)
    x = rng.standard_normal((bucket.tokens, bucket.cols)).astype(np.float32)
    out = np.full((bucket.tokens, bucket.rows), np.nan, np.float32)
    return Buffers(x, packed(bucket.storage, bucket.rows, bucket.cols), out)


@pytest.mark.parametrize("storage", sorted(STORAGES), ids=lambda storage: storage.name)
@pytest.mark.parametrize(("tokens", "rows", "cols"), [(1, 32, 32), (8, 64, 96), (32, 256, 512)])
def test_equals_native(
    backend: OpenvinoBackend, storage: StorageType, tokens: int, rows: int, cols: int
) -> None:
    bucket = ShapeBucket(tokens, rows, cols, storage)
    ours, theirs = buffers(bucket), buffers(bucket)
    if storage.is_quantised:
        acts = quantize_acts(ours.x)
        ours = replace(ours, x=acts)
        theirs.x[:] = (acts["quants"] * acts["scale"][..., None]).reshape(tokens, cols)
    native = NativeBackend()
    for which, memory in ((native, ours), (backend, theirs)):
        graph = which.compile(bucket)
        which.bind(graph, memory)
        which.run(graph)
    error = np.abs(ours.out - theirs.out).max() / np.abs(ours.out).max()
    assert error <= BOUND


@pytest.mark.parametrize("storage", [StorageType.Q4, StorageType.F16])
def test_weights_are_those_of_the_arena(backend: OpenvinoBackend, storage: StorageType) -> None:
    bucket = ShapeBucket(8, 64, 64, storage)
    memory = buffers(bucket)
    graph = backend.compile(bucket)
    backend.bind(graph, memory)
    backend.run(graph)
    assert np.abs(memory.out).max() > 0
    memory.weight[:] = 0
    backend.run(graph)
    assert np.abs(memory.out).max() == 0


def test_run_before_bind(backend: OpenvinoBackend) -> None:
    with pytest.raises(BackendError, match="bound"):
        backend.run(backend.compile(ShapeBucket(1, 32, 32, StorageType.Q8)))


def test_device_that_is_not_here() -> None:
    with pytest.raises(ConfigError, match=r"^--npu openvino:TPU: no such device here, found: CPU"):
        OpenvinoBackend("TPU", 1)


def test_says_what_it_is(backend: OpenvinoBackend) -> None:
    can = backend.capabilities()
    assert (can.name, can.precision, can.is_modelled) == ("openvino:CPU", "f32", False)
    assert can.device
