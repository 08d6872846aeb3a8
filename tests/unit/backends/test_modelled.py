"""A modelled device: speed, memory, graphs, failures."""

from __future__ import annotations

import numpy as np
import pytest

from polyneuron.backends.backend import Buffers, ShapeBucket
from polyneuron.backends.modelled import HANG_NS, ModelledBackend
from polyneuron.backends.spec import DeviceLimits, Failure
from polyneuron.clock import VirtualClock
from polyneuron.errors import BackendError
from polyneuron.kernels.quant import StorageType, pack_tiles_from_f32

TOKENS, ROWS, COLS = 4, 32, 64
BUCKET = ShapeBucket(TOKENS, ROWS, COLS, StorageType.F32)


def buffers() -> Buffers:
    weight = pack_tiles_from_f32(StorageType.F32, np.ones((ROWS, COLS), np.float32))
    x = np.ones((TOKENS, COLS), np.float32)
    return Buffers(x, weight, np.zeros((TOKENS, ROWS), np.float32))


def test_speed() -> None:
    clock = VirtualClock()
    backend = ModelledBackend(DeviceLimits(gops=0.001), clock)
    graph, bound = backend.compile(BUCKET), buffers()
    backend.bind(graph, bound)
    backend.run(graph)
    assert clock.now_ns() == 2 * TOKENS * ROWS * COLS * 1000
    assert np.array_equal(bound.out, np.full((TOKENS, ROWS), COLS, np.float32))


def test_memory() -> None:
    weights = buffers()
    backend = ModelledBackend(DeviceLimits(memory_bytes=weights.weight.nbytes))
    graph = backend.compile(BUCKET)
    backend.bind(graph, weights)
    backend.bind(graph, weights)  # the same ones count once
    with pytest.raises(BackendError, match="there is room for"):
        backend.bind(graph, buffers())


def test_graphs() -> None:
    backend = ModelledBackend(DeviceLimits(max_graphs=2))
    kept = [backend.compile(BUCKET), backend.compile(BUCKET)]
    with pytest.raises(BackendError, match="room for 2 graphs"):
        backend.compile(BUCKET)
    kept.pop()
    assert backend.compile(BUCKET).bucket == BUCKET


@pytest.mark.parametrize("failure", [Failure.COMPILE, Failure.BIND, Failure.RUN])
def test_failures_from_a_call_on(failure: Failure) -> None:
    backend = ModelledBackend(DeviceLimits(failure=failure, fails_from=2))
    bound = buffers()

    def once() -> None:
        graph = backend.compile(BUCKET)
        backend.bind(graph, bound)
        backend.run(graph)

    once()
    for _ in range(2):
        with pytest.raises(BackendError, match="modelled"):
            once()


def test_what_is_no_number() -> None:
    backend = ModelledBackend(DeviceLimits(failure=Failure.NAN))
    graph, bound = backend.compile(BUCKET), buffers()
    backend.bind(graph, bound)
    backend.run(graph)
    assert np.isnan(bound.out).sum() == 1


def test_hanging() -> None:
    clock = VirtualClock()
    backend = ModelledBackend(DeviceLimits(failure=Failure.HANG), clock)
    graph = backend.compile(BUCKET)
    backend.bind(graph, buffers())
    backend.run(graph)
    assert clock.now_ns() == HANG_NS
