"""A memory cgroup of one's own: a limit that holds for whoever is in it, with its own account."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from polyneuron.actors.process_stats import identify
from polyneuron.measure.host import Host

ENTER = 'echo $$ > "$0/cgroup.procs" && exec "$@"'
NAME = "polyneuron-{pid}-{use}"
V1_LIMITS = ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes")
"""In this order: memory and swap together may not be less than memory."""
REMOVE_TIMEOUT_S = 5.0
POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class MemoryCgroup:
    """One cgroup, v1 or v2."""

    folder: Path
    limit_bytes: int
    is_v1: bool

    def inside(self, words: Sequence[str]) -> list[str]:
        """The command that runs `words` inside."""
        return ["sh", "-c", ENTER, str(self.folder), *words]

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Have this process inside, with what it starts from now on; memory it has stays outside.

        What it started must have ended before the end.
        """
        before = _own_folders(Host())[0]
        pid = str(os.getpid())
        (self.folder / "cgroup.procs").write_text(pid)
        try:
            yield
        finally:
            (before / "cgroup.procs").write_text(pid)

    def peak_bytes(self) -> int:
        """The most that was in use at once, page cache included."""
        name = "memory.max_usage_in_bytes" if self.is_v1 else "memory.peak"
        return int((self.folder / name).read_text())

    def oom_kills(self) -> int:
        """Processes the kernel ended for want of memory."""
        name = "memory.oom_control" if self.is_v1 else "memory.events"
        return self._fields(name)["oom_kill"]

    def _fields(self, name: str) -> dict[str, int]:
        lines = (self.folder / name).read_text().splitlines()
        return {key: int(value) for key, value in (line.split() for line in lines)}


@contextmanager
def memory_cgroup(limit_bytes: int, use: str, host: Host | None = None) -> Iterator[MemoryCgroup]:
    """Make a cgroup with this limit, swap included; OSError where that is not allowed.

    `use` tells those of one process apart. Its removal fails while a process is left in it.
    """
    cgroup = _make(limit_bytes, NAME.format(pid=os.getpid(), use=use), host or Host())
    try:
        yield cgroup
    finally:
        _remove(cgroup.folder)


def _make(limit_bytes: int, name: str, host: Host) -> MemoryCgroup:
    """In the first place that allows it: this process's own cgroup, or one around it."""
    failure = OSError(errno.ENOENT, os.strerror(errno.ENOENT), "memory cgroup")
    for parent in _own_folders(host):
        is_v1 = (parent / V1_LIMITS[0]).exists()
        folder = parent / name
        try:
            if not is_v1 and "memory" not in (parent / "cgroup.subtree_control").read_text():
                continue
            _sweep(parent)
            folder.mkdir()
        except OSError as error:
            failure = error
            continue
        try:
            _limit(folder, limit_bytes, is_v1)
        except OSError as error:
            failure = error
            folder.rmdir()
            continue
        return MemoryCgroup(folder, limit_bytes, is_v1)
    raise failure


def _own_folders(host: Host) -> list[Path]:
    """This process's cgroup and those around it."""
    folders = [host.root / folder for folder in host.cgroup_folders("memory")]
    return [folder for folder in reversed(folders) if (folder / "cgroup.procs").exists()]


def _limit(folder: Path, limit_bytes: int, is_v1: bool) -> None:
    if is_v1:
        for name in V1_LIMITS:
            if (folder / name).exists():
                (folder / name).write_text(str(limit_bytes))
        return
    (folder / "memory.max").write_text(str(limit_bytes))
    if (folder / "memory.swap.max").exists():
        (folder / "memory.swap.max").write_text("0")


def _sweep(parent: Path) -> None:
    """Remove what programs left behind that were killed: an empty cgroup has no other trace."""
    for folder in parent.glob(NAME.format(pid="*", use="*")):
        pid = folder.name.split("-")[1]
        if pid.isdigit() and identify(int(pid)) is None:
            with suppress(OSError):  # somebody is still in it
                folder.rmdir()


def _remove(folder: Path) -> None:
    """Remove it as soon as the kernel has let go of the processes that have just ended."""
    end_s = time.monotonic() + REMOVE_TIMEOUT_S
    while True:
        try:
            return folder.rmdir()
        except OSError as error:
            if error.errno != errno.EBUSY or time.monotonic() > end_s:
                raise
        time.sleep(POLL_S)
