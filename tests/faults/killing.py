"""Processes that kill themselves at a chosen call that changes files."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

CHANGING_CALLS = ("pwrite", "write", "ftruncate", "fsync", "replace", "unlink")
"""What changes files; a writer is killed before and in the middle of each call of them."""
MAX_EVENTS = 2000


def in_child(body: Callable[[], object]) -> int:
    """Run `body` in a forked process; its exit status as `os.waitpid` gives it."""
    return os.waitpid(fork(body), 0)[1]


def fork(body: Callable[[], object], *unused: int) -> int:
    """Start `body` in a forked process, `unused` descriptors closed there; returns its id."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            for descriptor in unused:
                os.close(descriptor)
            body()
            status = 0
        finally:
            os._exit(status)
    return pid


def kill_at(event: int, *, torn: bool) -> None:
    """Make the process kill itself at the given call; `torn`: when half of it is done."""
    seen = 0

    def counted(name: str) -> Callable[..., Any]:
        original = getattr(os, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal seen
            seen += 1
            if seen == event:
                if torn and name in ("pwrite", "write"):
                    data = memoryview(args[1])
                    half = len(data) // 2 // 4096 * 4096 if name == "pwrite" else len(data) // 2
                    original(args[0], data[:half], *args[2:])
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)

        return call

    for name in CHANGING_CALLS:
        setattr(os, name, counted(name))
