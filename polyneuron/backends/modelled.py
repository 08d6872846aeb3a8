"""A device modelled on the native kernels: its speed, its limits, its failures.

Results are the native back end's bit for bit, so that what a fault changes can be seen. A stall of
the executor itself is a word of its record (`executor_record.stall_ns`), whatever the back end.
"""

from __future__ import annotations

import weakref

import numpy as np

from polyneuron.backends.backend import Buffers, Capabilities, Graph, ShapeBucket
from polyneuron.backends.native import NativeBackend, NativeGraph
from polyneuron.backends.spec import DeviceLimits, Failure
from polyneuron.clock import Clock, MonotonicClock
from polyneuron.errors import BackendError

HANG_NS = 3600 * 10**9


class ModelledBackend:
    """The native back end inside limits."""

    def __init__(self, limits: DeviceLimits, clock: Clock | None = None) -> None:
        self._limits, self._clock = limits, clock or MonotonicClock()
        self._native = NativeBackend()
        self._calls = dict.fromkeys(Failure, 0)
        self._graphs: weakref.WeakSet[NativeGraph] = weakref.WeakSet()
        self._bound: dict[int, int] = {}
        """Bytes of weights by their addresses."""

    def capabilities(self) -> Capabilities:
        """As `Backend`."""
        own = self._native.capabilities()
        limits = self._limits
        return Capabilities(
            "native", "modelled NPU", own.precision, own.storages,
            limits.memory_bytes, limits.max_graphs, is_modelled=True,
        )  # fmt: skip

    def _fails(self, failure: Failure) -> bool:
        """Whether this call, one that could fail so, does."""
        self._calls[failure] += 1
        is_due = self._calls[failure] >= self._limits.fails_from
        return self._limits.failure is failure and is_due

    def compile(self, bucket: ShapeBucket) -> NativeGraph:
        """As `Backend`; BackendError past the modelled number of graphs."""
        most = self._limits.max_graphs
        if self._fails(Failure.COMPILE):
            raise BackendError(f"modelled: {bucket.tokens} x {bucket.rows} cannot be compiled")
        if most is not None and len(self._graphs) >= most:
            raise BackendError(f"modelled: there is room for {most} graphs")
        graph = self._native.compile(bucket)
        self._graphs.add(graph)
        return graph

    def bind(self, graph: Graph, buffers: Buffers) -> None:
        """As `Backend`; BackendError past the modelled memory."""
        if self._fails(Failure.BIND):
            raise BackendError("modelled: memory cannot be mapped")
        self._bound[buffers.weight.ctypes.data] = buffers.weight.nbytes
        most, total = self._limits.memory_bytes, sum(self._bound.values())
        if most is not None and total > most:
            raise BackendError(f"modelled: {total} bytes of weights, there is room for {most}")
        self._native.bind(graph, buffers)

    def run(self, graph: Graph) -> None:
        """As `Backend`, at the modelled speed."""
        if self._fails(Failure.RUN):
            raise BackendError("modelled: the run failed")
        if self._fails(Failure.HANG):
            self._clock.wait_ns(HANG_NS)
        start_ns = self._clock.now_ns()
        self._native.run(graph)
        assert isinstance(graph, NativeGraph) and graph.buffers is not None
        if self._fails(Failure.NAN):
            graph.buffers.out[0, 0] = np.nan
        bucket = graph.bucket
        due_ns = 2 * bucket.tokens * bucket.rows * bucket.cols / self._limits.gops
        left_ns = round(due_ns) - (self._clock.now_ns() - start_ns)
        if left_ns > 0:
            self._clock.wait_ns(left_ns)
