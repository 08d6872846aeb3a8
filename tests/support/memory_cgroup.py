"""A memory cgroup to run a command in: a limit that holds, with its own account."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
ENTER = 'echo $$ > "$0/cgroup.procs"; exec "$@"'


@dataclass(frozen=True, slots=True)
class MemoryCgroup:
    """One cgroup, v1 or v2, below this process's own."""

    folder: Path
    is_v1: bool

    def run(self, words: Sequence[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
        """Run a command inside."""
        return subprocess.run(
            ["sh", "-c", ENTER, str(self.folder), *words],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def peak_bytes(self) -> int:
        """The most that was in use at once, page cache included."""
        name = "memory.max_usage_in_bytes" if self.is_v1 else "memory.peak"
        return int((self.folder / name).read_text())

    def oom_kills(self) -> int:
        """Processes the kernel ended for want of memory."""
        name = "memory.oom_control" if self.is_v1 else "memory.events"
        return self._fields(name)["oom_kill"]

    def major_faults(self) -> int:
        """Page faults that had to read the disk."""
        return self._fields("memory.stat")["total_pgmajfault" if self.is_v1 else "pgmajfault"]

    def _fields(self, name: str) -> dict[str, int]:
        lines = (self.folder / name).read_text().splitlines()
        return {key: int(value) for key, value in (line.split() for line in lines)}


@contextmanager
def memory_cgroup(limit_bytes: int) -> Iterator[MemoryCgroup]:
    """Make one with this limit; OSError where that is not allowed.

    Its removal fails while a process is left in it.
    """
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    own = {line.split(":")[1]: line.split(":")[2].lstrip("/") for line in lines}
    is_v1 = (ROOT / "memory").is_dir()
    base = ROOT / "memory" / own.get("memory", "") if is_v1 else ROOT
    folder = base / f"polyneuron-test-{os.getpid()}"
    folder.mkdir()
    try:
        limit = "memory.limit_in_bytes" if is_v1 else "memory.max"
        (folder / limit).write_text(str(limit_bytes))
        yield MemoryCgroup(folder, is_v1)
    finally:
        folder.rmdir()
