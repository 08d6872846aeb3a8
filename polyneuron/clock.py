"""Time as an argument: what waits takes a clock, and tests pass one that they move."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Tells the time and lets it pass."""

    def now_ns(self) -> int:
        """Nanoseconds since some fixed moment; never goes back."""

    def wait_ns(self, duration_ns: int) -> None:
        """Return when so much time has passed."""


class MonotonicClock:
    """The machine's CLOCK_MONOTONIC."""

    def now_ns(self) -> int:
        """As `Clock`."""
        return time.monotonic_ns()

    def wait_ns(self, duration_ns: int) -> None:
        """As `Clock`; blocks the thread."""
        time.sleep(max(duration_ns, 0) / 1e9)


class VirtualClock:
    """A clock that moves only when somebody waits on it."""

    def __init__(self, now_ns: int = 0) -> None:
        self._now_ns = now_ns

    def now_ns(self) -> int:
        """As `Clock`."""
        return self._now_ns

    def wait_ns(self, duration_ns: int) -> None:
        """As `Clock`, at once."""
        self._now_ns += max(duration_ns, 0)
