"""The native back end as graphs: the executor's own dense kernels, a run at a time.

The plain native back end needs no graphs: the executors compute its ops in C, all threads together
(`kernels/src/program.c`). This one runs the same kernels behind the interface of the others: it is
what a model of a device computes with, and what others are compared with.
"""

from __future__ import annotations

from dataclasses import dataclass

from polyneuron.backends.backend import Buffers, Capabilities, Graph, ShapeBucket
from polyneuron.kernels import isa
from polyneuron.kernels.gemv import matmul_tiles
from polyneuron.kernels.quant import StorageType


@dataclass(slots=True, eq=False, weakref_slot=True)
class NativeGraph(Graph):
    """Shapes, and what the next run reads and writes."""

    buffers: Buffers | None = None


class NativeBackend:
    """Dense C kernels on one thread."""

    def capabilities(self) -> Capabilities:
        """As `Backend`."""
        storages = frozenset(storage for storage in StorageType if storage.is_for_weights)
        return Capabilities("native", "CPU", f"int8 and f32 by {isa.active()}", storages)

    def compile(self, bucket: ShapeBucket) -> NativeGraph:
        """As `Backend`; there is nothing to compile."""
        return NativeGraph(bucket)

    def bind(self, graph: Graph, buffers: Buffers) -> None:
        """As `Backend`."""
        assert isinstance(graph, NativeGraph)
        graph.buffers = buffers

    def run(self, graph: Graph) -> None:
        """As `Backend`: bit for bit what the executors compute."""
        assert isinstance(graph, NativeGraph) and graph.buffers is not None
        bucket, buffers = graph.bucket, graph.buffers
        matmul_tiles(bucket.storage, buffers.weight, bucket.cols, buffers.x, buffers.out)
