"""The graphs of one back end by their shapes: compiled beside running steps, kept while used."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise

from polyneuron.backends.backend import Backend, Graph, ShapeBucket
from polyneuron.kernels.quant import TILE_ROWS

TOKEN_BUCKETS = (8, 32, 128, 512)
ROW_BUCKETS = (512, 256, 128, 64, 32)
"""Hot widths; any whole number of tiles is a sum of them."""
MAX_UNPACKED = 1 << 20
"""Weights of one graph, which may unpack them all to floats: 4 MiB; a tile may have more."""
IDLE_USES = 4096
"""A graph that was not asked for during so many other requests may make room for another."""


def token_bucket(num_tokens: int, max_tokens: int) -> int:
    """The least bucket that holds so many tokens, and no more than buffers have rows for."""
    return min(
        min((size for size in TOKEN_BUCKETS if size >= num_tokens), default=max_tokens), max_tokens
    )


def row_runs(num_rows: int, cols: int) -> list[tuple[int, int]]:
    """Whole tiles of a matrix (num_rows, cols) cut into hot widths: (first row, rows), in order."""
    runs, first, left = [], 0, -(-num_rows // TILE_ROWS) * TILE_ROWS
    for width in ROW_BUCKETS:
        if width * cols > MAX_UNPACKED and width > TILE_ROWS:
            continue
        while left >= width:
            runs.append((first, width))
            first, left = first + width, left - width
    assert all(a + n == b for (a, n), (b, _) in pairwise(runs))
    return runs


class GraphCache:
    """Compiles on a thread of its own; `waits` has it compile at once instead.

    With `waits` a step's results do not depend on how long a compilation takes.
    """

    def __init__(self, backend: Backend, *, waits: bool) -> None:
        self._backend, self._waits = backend, waits
        self._max_graphs = backend.capabilities().max_graphs
        self._compiler = ThreadPoolExecutor(1, "compile")
        self._graphs: dict[ShapeBucket, Future[Graph]] = {}
        self._used: dict[ShapeBucket, int] = {}
        self._uses = 0

    def get(self, bucket: ShapeBucket) -> Graph | None:
        """The graph for this shape; None while it is compiled, and where there is no room for it.

        Meanwhile a graph for more tokens does. Raises what made the compilation fail.
        """
        self._uses += 1
        if bucket not in self._graphs and self._has_room():
            self._graphs[bucket] = self._compiler.submit(self._backend.compile, bucket)
        found = self._graphs.get(bucket)
        if found is not None and (self._waits or found.done()):
            self._used[bucket] = self._uses
            return found.result()
        return self._larger(bucket)

    def _has_room(self) -> bool:
        if self._max_graphs is None or len(self._graphs) < self._max_graphs:
            return True
        for bucket, used in self._used.items():
            if self._uses - used > IDLE_USES:
                del self._graphs[bucket], self._used[bucket]
                return True
        return False

    def _larger(self, bucket: ShapeBucket) -> Graph | None:
        """A compiled graph of the same rows for more tokens, the smallest."""
        if self._waits:
            return None
        others = [
            other
            for other, graph in self._graphs.items()
            if other.tokens > bucket.tokens and graph.done()
            and (other.rows, other.cols, other.storage)
            == (bucket.rows, bucket.cols, bucket.storage)
        ]  # fmt: skip
        return self._graphs[min(others)].result() if others else None

    def close(self) -> None:
        """Compile nothing more."""
        self._compiler.shutdown(wait=True, cancel_futures=True)
