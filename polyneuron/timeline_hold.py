"""Who writes a timeline, or joins what a run left of it, holds it: another is refused meanwhile."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

from polyneuron.errors import ConfigError


class Hold:
    """A lock on a file beside the timeline; it ends with the process, however that ends."""

    def __init__(self, path: Path, timeline: Path) -> None:
        """Make the file where it is not; ConfigError when another holds it, or it cannot be."""
        self._fd = _locked(path, timeline)

    def release(self) -> None:
        """Let others have it. Safe to call again."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def check_free(path: Path, timeline: Path) -> None:
    """ConfigError when another process holds the timeline by the file at `path`."""
    if path.exists():
        Hold(path, timeline).release()


def _locked(path: Path, timeline: Path) -> int:
    while True:
        fd = _open(path)
        try:
            with contextlib.suppress(OSError):  # of a file system without locks
                _lock(fd, timeline)
            if _is_at(fd, path):  # whoever had it may have removed it meanwhile
                return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from None


def _lock(fd: int, timeline: Path) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(
            f"{timeline}: another run is writing this timeline; wait for its end, or name another "
            "file"
        ) from None


def _is_at(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False
