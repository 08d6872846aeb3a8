"""Hands out runs of an arena that does not exist yet."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from polyneuron.io.ncf_format import LINE_BYTES, round_up
from polyneuron.kernels.arena import HEADER_BYTES, PAGE_BYTES


@dataclass(frozen=True, slots=True)
class Span:
    """A run of bytes."""

    offset: int
    num_bytes: int


@dataclass(slots=True)
class Allocator:
    """One growing address space; runs follow each other in the order they are taken."""

    offset: int = HEADER_BYTES
    spans: dict[str, Span] = field(default_factory=dict)

    def at(self, name: str) -> int:
        """Offset of a run taken before."""
        return self.spans[name].offset

    def take(self, name: str, num_bytes: int, align: int = LINE_BYTES) -> int:
        """The next run; returns its offset."""
        self.offset = round_up(self.offset, align)
        self.spans[name] = Span(self.offset, num_bytes)
        self.offset += num_bytes
        return self.spans[name].offset

    def region(self, name: str, parts: Iterable[tuple[str, int]]) -> None:
        """A page-aligned region of named parts."""
        start = round_up(self.offset, PAGE_BYTES)
        self.offset = start
        for part, num_bytes in parts:
            self.take(f"{name}.{part}", num_bytes)
        self.offset = round_up(self.offset, PAGE_BYTES)
        self.spans[name] = Span(start, self.offset - start)
