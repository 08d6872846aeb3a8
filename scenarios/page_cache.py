"""The operating system's page cache under a mapped model file, by whole matrices.

A dense model touches its pages in a cycle. Strict LRU would keep nothing of a cycle longer than
itself; kernels' approximations keep some. Here a page goes at random, which keeps a share.
"""

from __future__ import annotations

import numpy as np


class PageCache:
    """Which matrices of the file are in memory."""

    def __init__(self, num_matrices: int, matrix_bytes: int, room_bytes: int, seed: int) -> None:
        self.matrix_bytes = matrix_bytes
        self._rng = np.random.default_rng([seed, 1])
        self._order = [int(i) for i in self._rng.permutation(num_matrices)]
        self._room = 0
        self._held: list[int] = []
        self._place: dict[int, int] = {}
        self.resize(room_bytes)
        for matrix in self._order[: self._room]:
            self._admit(matrix)

    def resize(self, room_bytes: int) -> None:
        """Give it another size; what has no room leaves."""
        self._room = max(0, room_bytes // self.matrix_bytes)
        while len(self._held) > self._room:
            self._evict()

    def touch(self, matrix: int) -> int:
        """Bytes that must be read when a matrix is used."""
        if matrix in self._place:
            return 0
        if self._room:
            while len(self._held) >= self._room:
                self._evict()
            self._admit(matrix)
        return self.matrix_bytes

    @property
    def num_held(self) -> int:
        """Matrices in memory."""
        return len(self._held)

    def _admit(self, matrix: int) -> None:
        self._place[matrix] = len(self._held)
        self._held.append(matrix)

    def _evict(self) -> None:
        index = int(self._rng.integers(len(self._held)))
        gone, last = self._held[index], self._held[-1]
        self._held[index] = last
        self._place[last] = index
        self._held.pop()
        del self._place[gone]
