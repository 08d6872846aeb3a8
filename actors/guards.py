"""What a running Ray changes in its process, kept in bounds: environment and signals."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import threading
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Final

_DEFERRED: Final = (signal.SIGINT, signal.SIGTERM)

_RAY_ENVIRONMENT: Final[Mapping[str, str]] = {
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_memory_monitor_refresh_ms": "0",  # it counts page cache; the product budgets itself
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_ROTATION_MAX_BYTES": str(1 << 20),
}

# Besides its own, Ray sets Python's breakpoint hook on import.
_TOUCHED_BY_RAY: Final = ("RAY_", "POLYNEURON_RAY_", "PYTHONBREAKPOINT")


@contextlib.contextmanager
def private_environment() -> Iterator[None]:
    """Ray's settings in the environment, with a fresh token; all as before afterwards.

    Settings of Ray found there are set aside: the user's are for another cluster.
    """
    saved = _take_ray_variables()
    os.environ.update(_RAY_ENVIRONMENT, RAY_AUTH_TOKEN=secrets.token_hex(32))
    try:
        yield
    finally:
        _take_ray_variables()
        os.environ.update(saved)


def _take_ray_variables() -> dict[str, str]:
    names = [name for name in os.environ if name.startswith(_TOUCHED_BY_RAY)]
    return {name: os.environ.pop(name) for name in names}


class SigtermGuard:
    """Keeps SIGTERM the program's own although Ray puts a handler in place when it starts.

    A program without a handler gets one that unwinds the main thread, so that `with` blocks end
    in order and the exit status is the customary 143. Only the main thread may touch handlers.
    """

    def __init__(self) -> None:
        self._is_main = threading.current_thread() is threading.main_thread()
        self._before = signal.getsignal(signal.SIGTERM)

    def install(self) -> None:
        """Undo what Ray has set; call after it has started."""
        if self._is_main:
            unset = self._before in (signal.SIG_DFL, None)
            signal.signal(signal.SIGTERM, _unwind if unset else self._before)

    def restore(self) -> None:
        """Put back the handler found at first."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._before or signal.SIG_DFL)


def _unwind(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


@contextlib.contextmanager
def signals_deferred() -> Iterator[None]:
    """While inside, Ctrl-C and SIGTERM wait; they take effect at the end."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []
    saved = {
        number: signal.signal(number, lambda caught, _frame: arrived.append(caught))
        for number in _DEFERRED
    }
    try:
        yield
    finally:
        for number, handler in saved.items():
            signal.signal(number, handler or signal.SIG_DFL)
    if arrived:
        signal.raise_signal(arrived[0])
