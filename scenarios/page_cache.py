"""The operating system's page cache under a mapped model file, by whole matrices: the least
recently used goes first.

A dense model touches its file in a cycle, of which LRU keeps nothing that is longer than itself.
"""

from __future__ import annotations


class PageCache:
    """Which matrices of the file are in memory."""

    def __init__(self, room_bytes: int) -> None:
        self._room = room_bytes
        self._held: dict[int, int] = {}
        self._held_bytes = 0

    def resize(self, room_bytes: int) -> None:
        """Give it another size; what has no room leaves."""
        self._room = room_bytes
        self._make_room(0)

    def touch(self, matrix: int, num_bytes: int) -> int:
        """Bytes that must be read when a matrix of so many is used."""
        held = self._held.pop(matrix, None)
        if held is not None:
            self._held[matrix] = held  # the last one in the dictionary was used last
            return 0
        self._make_room(num_bytes)
        if num_bytes <= self._room:
            self._held[matrix] = num_bytes
            self._held_bytes += num_bytes
        return num_bytes

    @property
    def held_bytes(self) -> int:
        """In memory now."""
        return self._held_bytes

    def _make_room(self, num_bytes: int) -> None:
        while self._held and self._held_bytes + num_bytes > self._room:
            oldest = next(iter(self._held))
            self._held_bytes -= self._held.pop(oldest)
