"""The private directory of one cluster: where it goes, and how a dead owner's is swept."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

from polyneuron.errors import ConfigError

PREFIX = "pn-"
_LOCK_NAME = "owner.lock"
_MAX_SOCKET_PATH_BYTES = 107
# Ray puts /session_<date>_<time>_<microseconds>_<pid>/sockets/plasma_store below it.
_SESSION_PATH_BYTES = len("/session_2000-01-01_00-00-00_000000_4194304/sockets/plasma_store")
_RAY_NAME = "r"
_MAX_BASE_BYTES = (
    _MAX_SOCKET_PATH_BYTES - _SESSION_PATH_BYTES - len(f"/{PREFIX}12345678/{_RAY_NAME}")
)


def choose_base() -> Path:
    """The directory for temporary files, or a shorter one if socket paths would not fit."""
    for base in (tempfile.gettempdir(), "/tmp", "/var/tmp"):
        if len(os.fsencode(os.path.realpath(base))) > _MAX_BASE_BYTES:
            continue
        if os.path.isdir(base) and os.access(base, os.W_OK | os.X_OK):
            return Path(os.path.realpath(base))
    raise ConfigError(
        f"no writable directory with a path of at most {_MAX_BASE_BYTES} bytes for Ray's sockets: "
        f"set TMPDIR to one, or make /tmp writable"
    )


class PrivateDir:
    """A directory only this user can enter, locked as long as its owner lives."""

    def __init__(self, base: Path) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))  # mode 0700
        pending = self.path / "owner.new"
        self._lock = os.open(pending, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        os.write(self._lock, f"{os.getpid()}\n".encode())
        # Under its final name only once it is locked: a sweeper never sees it free.
        pending.rename(self.path / _LOCK_NAME)

    @property
    def for_ray(self) -> Path:
        """A directory below, since Ray opens the one it is given to all users."""
        return self.path / _RAY_NAME

    def remove(self) -> None:
        """Delete the directory with all it holds."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def sweep(base: Path) -> list[Path]:
    """Remove directories of this user whose owner was killed, and return them."""
    removed = []
    for path in sorted(base.glob(f"{PREFIX}*")):
        with contextlib.suppress(OSError):
            if path.lstat().st_uid == os.getuid() and _remove_if_unowned(path):
                removed.append(path)
    return removed


def _remove_if_unowned(path: Path) -> bool:
    lock = os.open(path / _LOCK_NAME, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path, ignore_errors=True)
        return True
    finally:
        os.close(lock)
