"""Where a player tells what happened: lines in order of time, hashed, and kept if wanted."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any, Protocol

from polyneuron.timeline import event_line


class TimelineSink(Protocol):
    """Takes events in any order of time."""

    def emit(self, t_ns: int, actor: str, event: str, **keys: Any) -> None:
        """Tell an event; keys are whole numbers, short words, flags, and floats where said."""

    def tell(self, events: Iterable[tuple[int, str]]) -> None:
        """Events whose keys are written already: the time, and what is behind time and number."""


class KeptTimeline:
    """Events of one run in memory; equal runs give equal bytes."""

    def __init__(self) -> None:
        self._events: list[tuple[int, str]] = []

    def emit(self, t_ns: int, actor: str, event: str, **keys: Any) -> None:
        """As `TimelineSink`."""
        line = event_line({"actor": actor, "event": event, **keys})
        self._events.append((t_ns, line[1:-2]))

    def tell(self, events: Iterable[tuple[int, str]]) -> None:
        """As `TimelineSink`."""
        self._events.extend(events)

    def lines(self) -> list[str]:
        """The file's lines, by time; events of one moment in the order they were told."""
        ordered = sorted(self._events, key=lambda told: told[0])
        return [
            f'{{"t_ns":{t_ns},"seq":{seq},{keys}}}\n' for seq, (t_ns, keys) in enumerate(ordered)
        ]

    def text(self) -> bytes:
        """The file's bytes."""
        return "".join(self.lines()).encode()


def sha256_of(text: bytes) -> str:
    """What names a timeline's bytes."""
    return hashlib.sha256(text).hexdigest()
