"""Who provides the arena: Ray's object store for the product, an anonymous memory file for tests.

Both give the same thing, a byte array that several processes map. The Ray object is put by the
driver, which owns it: actors may die and come back, and nothing is left when the job ends.
"""

from __future__ import annotations

import mmap
import os

import numpy as np
from numpy.typing import NDArray

from polyneuron.kernels.arena import PAGE_BYTES, Arena
from polyneuron.planning.layout import ArenaLayout


def object_bytes(layout: ArenaLayout) -> int:
    """Bytes of the shared object that holds the arena wherever in a page it begins."""
    return layout.num_bytes + PAGE_BYTES


def format_arena(arena: Arena, layout: ArenaLayout, num_executors: int) -> None:
    """Write header, regions and executor places into a fresh arena."""
    trace = layout.spans["trace"].num_bytes // max(1, num_executors) // 64
    arena.format(layout.at("boards.board"), layout.max_ops, num_executors, trace)
    _format_stream(arena, layout)
    for index in range(num_executors):
        record = arena.executor(index)
        record.scratch = layout.at(f"scratch.{index}")
        record.scratch_bytes = layout.spans[f"scratch.{index}"].num_bytes
        record.trace = layout.at(f"trace.{index}")


def _format_stream(arena: Arena, layout: ArenaLayout) -> None:
    """Describe the stage buffers; without streamed layers nobody looks at it."""
    streamed = layout.streamed
    stream = arena.layer_stream(layout.at("boards.stream"))
    stream.num_layers, stream.num_buffers = len(streamed), layout.num_buffers
    if streamed:
        stream.buffers = layout.at("stage.0")
        stream.buffer_bytes = layout.spans["stage.0"].num_bytes


class LocalArena:
    """An arena in an anonymous memory file: for tests and for anything without Ray."""

    def __init__(self, layout: ArenaLayout) -> None:
        self._fd = os.memfd_create("polyneuron-arena")
        os.ftruncate(self._fd, object_bytes(layout))
        self._map = mmap.mmap(self._fd, object_bytes(layout))
        self.array: NDArray[np.uint8] = np.frombuffer(self._map, dtype=np.uint8)
        self.arena = Arena.over(self.array)

    def close(self) -> None:
        """Give the memory back once no view of it is left."""
        os.close(self._fd)
