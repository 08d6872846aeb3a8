"""Finds what a run left behind: processes, shared memory, listening sockets, directories."""

from __future__ import annotations

import os
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

_MARK = "POLYNEURON_TEST_RUN"
_LISTEN = "0A"
_UNIX_LISTENING_FLAG = 0x10000


def wait_until(condition: Callable[[], bool], what: str, deadline_s: float = 20.0) -> None:
    """Poll a condition until it holds; fail with what was waited for after the deadline."""
    end = time.monotonic() + deadline_s
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < end, f"not within {deadline_s} s: {what}"
        pause.wait(0.02)


@dataclass
class Snapshot:
    """The state before a run, and what was seen of it on the way."""

    mark: str
    base: Path  # the run's own directory for temporary files
    shm_entries: set[str]
    processes: set[int] = field(default_factory=set)
    sockets: set[str] = field(default_factory=set)  # inodes of sockets that listened

    def observe(self) -> None:
        """Note processes and listening sockets of the run; call while it is at work."""
        listening = _listening_inodes()
        for pid in _marked(self.mark):
            self.processes.add(pid)
            self.sockets |= _socket_inodes(pid) & listening


@contextmanager
def snapshot() -> Iterator[Snapshot]:
    """Mark what this process starts from now on, and give it a directory of its own.

    The mark is an environment variable, which children of children inherit: other clusters on
    the machine are not mistaken for ours.
    """
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as base:
        changed = {_MARK: uuid.uuid4().hex, "TMPDIR": base}
        saved = {name: os.environ.get(name) for name in changed}
        os.environ.update(changed)
        tempfile.tempdir = None  # read TMPDIR again
        try:
            yield Snapshot(changed[_MARK], Path(base), set(os.listdir("/dev/shm")))
        finally:
            for name, value in saved.items():
                os.environ.pop(name)
                if value is not None:
                    os.environ[name] = value
            tempfile.tempdir = None


def assert_nothing_left(before: Snapshot, deadline_s: float = 10.0) -> None:
    """Fail unless everything the run made is gone within the deadline."""
    assert before.processes, "observe() saw no process: the check would prove nothing"
    wait_until(lambda: not leftovers(before), f"no leftovers, but: {leftovers(before)}", deadline_s)


def leftovers(before: Snapshot) -> list[str]:
    """What is still there of a run, one line each."""
    left = [f"process {pid} {_command(pid)}" for pid in _marked(before.mark)]
    left += [f"/dev/shm/{name}" for name in set(os.listdir("/dev/shm")) - before.shm_entries]
    left += [f"listening socket {inode}" for inode in before.sockets & _listening_inodes()]
    left += [f"directory {path}" for path in before.base.iterdir()]
    return left


def marked_names(before: Snapshot) -> list[str]:
    """Command lines of the run's processes."""
    return [_command(pid) for pid in _marked(before.mark)]


def _marked(mark: str) -> list[int]:
    wanted = f"{_MARK}={mark}".encode()
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            with suppress(OSError):
                if wanted in Path("/proc", entry, "environ").read_bytes().split(b"\0"):
                    found.append(int(entry))
    return found


def _command(pid: int) -> str:
    with suppress(OSError):
        return Path("/proc", str(pid), "cmdline").read_bytes().replace(b"\0", b" ").decode()[:80]
    return "(ended)"


def _socket_inodes(pid: int) -> set[str]:
    inodes = set()
    with suppress(OSError):
        for descriptor in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                target = os.readlink(f"/proc/{pid}/fd/{descriptor}")
                if target.startswith("socket:["):
                    inodes.add(target[len("socket:[") : -1])
    return inodes


def _listening_inodes() -> set[str]:
    inodes = set()
    for name in ("tcp", "tcp6"):
        with suppress(OSError):
            rows = [row.split() for row in Path("/proc/net", name).read_text().splitlines()[1:]]
            inodes |= {row[9] for row in rows if row[3] == _LISTEN}
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        row = line.split()
        if int(row[3], 16) & _UNIX_LISTENING_FLAG:
            inodes.add(row[6])
    return inodes
