"""What a back end of the NPU executor is: static graphs over buffers that it does not own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from polyneuron.kernels.quant import StorageType


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a back end can do, as it says itself."""

    name: str
    """As `--npu` names it."""
    device: str
    """The device's own name."""
    precision: str
    """Of its arithmetic."""
    storages: frozenset[StorageType]
    """Weights it takes; matrices stored otherwise stay with the executor's kernels."""
    max_bytes: int | None = None
    """The most bytes of weights that it may be bound to; None: no limit is known."""
    max_graphs: int | None = None
    """The most graphs it keeps; None: no limit is known."""
    takes_floats: bool = False
    """Whether activations come as floats even where weights are quantised: the values of their int8
    blocks, so that it multiplies what the kernels do."""
    is_modelled: bool = False


@dataclass(frozen=True, slots=True, order=True)
class ShapeBucket:
    """Static shapes of one graph: out (tokens, rows) = x (tokens, cols) times tiles of rows."""

    tokens: int
    rows: int
    """The hot width of the run of neurons or outputs, a multiple of 32."""
    cols: int
    storage: StorageType


@dataclass(frozen=True, slots=True)
class Buffers:
    """Memory of one run; a back end reads and writes it in place."""

    x: NDArray[Any]
    """(tokens, cols / 32) activation blocks for quantised weights, else, and for back ends that
    take floats, (tokens, cols) float32."""
    weight: NDArray[np.uint8]
    """Tiles, as they lie in the arena."""
    out: NDArray[np.float32]
    """(tokens, rows)"""


@dataclass(slots=True, eq=False)
class Graph:
    """A compiled shape; back ends keep more in their own."""

    bucket: ShapeBucket


class Backend(Protocol):
    """One device; `compile` may be called from another thread than the rest.

    What any method raises is the back end's failure.
    """

    def capabilities(self) -> Capabilities:
        """What it can do."""

    def compile(self, bucket: ShapeBucket) -> Graph:
        """Make the graph of these shapes; weights are inputs of it."""

    def bind(self, graph: Graph, buffers: Buffers) -> None:
        """Have the graph's next run use these buffers."""

    def run(self, graph: Graph) -> None:
        """Compute; returns when `out` is written."""
