"""How much memory this machine, or the cgroup around this process, leaves."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

UNLIMITED_BYTES = 1 << 60
"""A limit above this is none: cgroup v1 writes a huge number for it."""


MARGIN = 0.05
"""Share of the available memory that is left to others."""


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """Bytes that may still be taken, and who says so."""

    num_bytes: int
    source: str


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Reads /proc and cgroup files; the two roots can be replaced by a test's own trees."""

    proc: Path = Path("/proc")
    cgroup: Path = Path("/sys/fs/cgroup")

    def available(self) -> MemoryLimit:
        """The smaller of MemAvailable and what every enclosing cgroup leaves."""
        limits = [MemoryLimit(self._mem_available(), "MemAvailable"), *self._cgroup_rooms()]
        return min(limits, key=lambda limit: limit.num_bytes)

    def default_budget(self) -> int:
        """Bytes to take when nobody says how many: what is available, less a margin."""
        return int(self.available().num_bytes * (1 - MARGIN))

    def _mem_available(self) -> int:
        for line in (self.proc / "meminfo").read_text().splitlines():
            name, _, rest = line.partition(":")
            if name == "MemAvailable":
                return int(rest.split()[0]) << 10
        return UNLIMITED_BYTES

    def _cgroup_rooms(self) -> list[MemoryLimit]:
        rooms = []
        for folder, limit_file, usage_file in self._folders():
            limit = _number(folder / limit_file)
            if limit is None or limit >= UNLIMITED_BYTES:
                continue
            used = (_number(folder / usage_file) or 0) - _inactive_file(folder)
            rooms.append(MemoryLimit(max(0, limit - used), f"cgroup {folder.name or '/'}"))
        return rooms

    def _folders(self) -> list[tuple[Path, str, str]]:
        """This process's memory cgroup and all above it, v2 or v1."""
        found = []
        for line in _lines(self.proc / "self" / "cgroup"):
            number, controllers, path = line.split(":", 2)
            if number == "0" and not controllers:
                names, base = ("memory.max", "memory.current"), self.cgroup
            elif "memory" in controllers.split(","):
                names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
                base = self.cgroup / "memory"
            else:
                continue
            parts = [part for part in path.split("/") if part]
            found += [(base.joinpath(*parts[:n]), *names) for n in range(len(parts) + 1)]
        return [entry for entry in found if (entry[0] / entry[1]).exists()]

    def peak(self) -> int | None:
        """The highest use of the innermost limited cgroup; None where nothing limits or counts."""
        for folder, limit_file, _ in reversed(self._folders()):
            limit = _number(folder / limit_file)
            if limit is not None and limit < UNLIMITED_BYTES:
                peak = _number(folder / "memory.peak")
                return peak if peak is not None else _number(folder / "memory.max_usage_in_bytes")
        return None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _number(path: Path) -> int | None:
    """The number in a cgroup file; None when there is none ("max", no such file)."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _inactive_file(folder: Path) -> int:
    """Page cache the kernel gives back before anything else: it counts as free."""
    stat = dict(line.split(None, 1) for line in _lines(folder / "memory.stat") if " " in line)
    return int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))
