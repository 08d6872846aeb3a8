"""What /proc tells about processes: who lives, whose child, how much memory and processor."""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A process for good: a reused pid has another start time."""

    pid: int
    start_ticks: int


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """Memory of one process; pages shared with others count by their share (PSS)."""

    name: str
    pid: int
    pss_bytes: int


def _stat_fields(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat from the state on; None if there is no such process."""
    try:
        text = (_PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return None
    return text.rsplit(")", 1)[1].split()  # the name before it may hold spaces and brackets


def identify(pid: int) -> ProcessId | None:
    """The process with this pid, or None if it does not exist or has ended (a zombie has)."""
    fields = _stat_fields(pid)
    if fields is None or fields[0] in "ZX":
        return None
    return ProcessId(pid, int(fields[19]))


def is_alive(process: ProcessId) -> bool:
    """Whether this very process still runs."""
    return identify(process.pid) == process


def kill(process: ProcessId) -> None:
    """End this very process at once; do nothing if it is gone."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except OSError:
        return
    try:  # the descriptor holds the process, so the pid cannot be reused after the check
        if is_alive(process):
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    finally:
        os.close(descriptor)


def descendants(pid: int) -> list[ProcessId]:
    """Living children of a process, their children and so on, in order of pid."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir(_PROC):
        if entry.isdigit():
            fields = _stat_fields(int(entry))
            if fields is not None:
                children.setdefault(int(fields[1]), []).append(int(entry))
    found: list[int] = []
    waiting = [pid]
    while waiting:
        direct = children.get(waiting.pop(), [])
        found.extend(direct)
        waiting.extend(direct)
    identified = (identify(child) for child in sorted(found))
    return [process for process in identified if process is not None]


def process_name(pid: int) -> str:
    """What a process calls itself: its title where it set one, else what it runs."""
    try:
        words = (_PROC / str(pid) / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return "?"
    first = words[0].decode(errors="replace")
    if first.startswith("ray::"):
        return first.strip()
    name = os.path.basename(first) or "?"
    if name.startswith("python") and len(words) > 1 and words[1].endswith(b".py"):
        return Path(words[1].decode(errors="replace")).stem
    return name


def pss_bytes(pid: int) -> int:
    """Proportional set size of a process in bytes; 0 if it is gone or not ours to read."""
    try:
        lines = (_PROC / str(pid) / "smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    for line in lines:
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return 0


def cpu_ticks(pid: int) -> int:
    """User and system time a process has used, in clock ticks (os.sysconf("SC_CLK_TCK"))."""
    fields = _stat_fields(pid)
    return 0 if fields is None else int(fields[11]) + int(fields[12])


def read_bytes(pid: int) -> int | None:
    """Bytes a process had read from disks, page faults included; None where that is not told."""
    try:
        text = (_PROC / str(pid) / "io").read_text()
    except OSError:
        return None
    fields = dict(line.split(": ") for line in text.splitlines())
    return int(fields["read_bytes"])
