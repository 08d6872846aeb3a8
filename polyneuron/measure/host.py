"""The machine as its kernel's files tell it; a test gives another root and other answers."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from polyneuron.cgroups import cgroup_folders, text_of
from polyneuron.cores import Cores, read_cores
from polyneuron.host_memory import HostMemory

CAP_IPC_LOCK = 14
UNLIMITED = 1 << 62


@dataclass(frozen=True, slots=True)
class Space:
    """Bytes of a file system."""

    total: int
    free: int


@dataclass(frozen=True, slots=True)
class Mount:
    """A mounted file system."""

    point: str
    type: str
    options: frozenset[str]


def space_of(path: Path) -> Space:
    """Bytes of the file system around `path`, as far as this user may take them."""
    status = os.statvfs(path)
    return Space(status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize)


@dataclass(frozen=True, slots=True)
class Host:
    """Where the facts come from."""

    root: Path = Path("/")
    """Of /proc, /sys and /dev."""
    machine: str = platform.machine()
    page_bytes: int = os.sysconf("SC_PAGESIZE")
    space: Callable[[Path], Space] = space_of

    @property
    def memory(self) -> HostMemory:
        """Its memory and cgroups."""
        return HostMemory(self.root / "proc", self.root / "sys/fs/cgroup")

    def text(self, path: str) -> str:
        """A file's text without the blanks around it; empty where there is no such file."""
        return text_of(self.root / path)

    def number(self, path: str) -> int | None:
        """A file's number; None where there is none, as of `max`."""
        text = self.text(path)
        return int(text) if re.fullmatch(r"-?\d+", text) else None

    def field(self, path: str, name: str) -> str:
        """The value of a line `name: value`; empty where there is none."""
        for line in self.text(path).splitlines():
            key, colon, value = line.partition(":")
            if colon and key.strip() == name:
                return value.strip()
        return ""

    def kibibytes(self, name: str) -> int:
        """Bytes that /proc/meminfo gives for `name`, 0 where it does not."""
        words = self.field("proc/meminfo", name).split()
        return int(words[0]) << 10 if words else 0

    def cores(self) -> Cores:
        """Cores this process may run on."""
        return read_cores(self.root)

    def hard_limit(self, name: str) -> int:
        """The hard limit of /proc/self/limits; UNLIMITED without one."""
        match = re.search(rf"^{name}\s+\S+\s+(\S+)", self.text("proc/self/limits"), re.MULTILINE)
        value = match.group(1) if match else "unlimited"
        return UNLIMITED if value == "unlimited" else int(value)

    def soft_limit(self, name: str) -> int:
        """The soft limit, which counts for what nobody raises."""
        match = re.search(rf"^{name}\s+(\S+)", self.text("proc/self/limits"), re.MULTILINE)
        value = match.group(1) if match else "unlimited"
        return UNLIMITED if value == "unlimited" else int(value)

    def may_lock_memory(self) -> bool:
        """Whether no limit on locked memory counts."""
        capabilities = self.field("proc/self/status", "CapEff")
        return bool(capabilities) and bool(int(capabilities, 16) >> CAP_IPC_LOCK & 1)

    def cgroup_folders(self, controller: str) -> list[str]:
        """This process's cgroup of a controller and those around it, outermost first."""
        return cgroup_folders(self.root, controller)

    def mount_of(self, path: Path) -> Mount:
        """The file system that a path lies in."""
        best = Mount("", "", frozenset())
        for line in self.text("proc/self/mountinfo").splitlines():
            before, _, after = line.partition(" - ")
            words, rest = before.split(), after.split()
            point = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code.group(1), 8)), words[4])
            is_inside = path == Path(point) or Path(point) in path.parents
            if is_inside and len(point) >= len(best.point):
                options = frozenset(words[5].split(",")) | frozenset(rest[-1].split(","))
                best = Mount(point, rest[0], options)
        return best
