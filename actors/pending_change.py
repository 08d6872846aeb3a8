"""A change that somebody wants made between two steps, and the loop that makes it."""

from __future__ import annotations

import threading
from collections.abc import Callable

from polyneuron.errors import EngineError


class PendingChange:
    """Hands one change at a time to the loop; `changed` is what the loop sleeps on."""

    def __init__(self, changed: threading.Condition) -> None:
        self._changed = changed
        self._asking = threading.Lock()
        self._change: Callable[[], None] | None = None
        self._error: str | None = None
        self._is_over = False

    @property
    def is_wanted(self) -> bool:
        """Whether a change waits for the loop."""
        return self._change is not None

    def ask(self, change: Callable[[], None], kept: str) -> None:
        """Have the loop make a change; blocks until it has, or until the loop ends.

        EngineError says what stayed as it was, by `kept`, and why.
        """
        with self._asking, self._changed:
            self._change, self._error = change, None
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._change is None or self._is_over)
            if self._error is not None:
                raise EngineError(f"{kept}: {self._error}")

    def make(self) -> None:
        """The loop, between two steps: make the change, if one is wanted."""
        change, error = self._change, None
        if change is None:
            return
        try:
            change()
        except Exception as caught:  # noqa: BLE001  it is of who asked; requests go on
            error = str(getattr(caught, "cause", caught)) or repr(caught)
        with self._changed:
            self._change, self._error = None, error
            self._changed.notify_all()

    def give_up(self) -> None:
        """The loop ends: who waits is let go. `changed` is held."""
        self._is_over = True
        self._changed.notify_all()
