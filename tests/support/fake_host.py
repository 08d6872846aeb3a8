"""A made-up machine: kernel files in a folder, and a file system with room."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from polyneuron.measure.host import Host, Space

GIB = 1 << 30
KIB_OF_GIB = GIB >> 10

GOOD_FILES = {
    "proc/cpuinfo": "processor : 0\nmodel name\t: Fast 9000\n",
    "proc/meminfo": f"MemTotal: {8 * KIB_OF_GIB} kB\nMemAvailable: {6 * KIB_OF_GIB} kB\n"
    "SwapTotal: 0 kB\nSwapFree: 0 kB\n",
    "proc/self/cgroup": "0::/box\n",
    "proc/self/limits": "Limit  Soft Limit  Hard Limit  Units\n"
    "Max open files            1024  65536  files\n"
    "Max locked memory         unlimited  unlimited  bytes\n"
    "Max address space         unlimited  unlimited  bytes\n",
    "proc/self/mountinfo": "1 0 8:1 / / rw - ext4 /dev/sda1 rw\n"
    "2 1 0:9 / SHM rw,nosuid - tmpfs shm rw\n",
    "proc/self/status": "CapEff:\t0000000000000000\nCpus_allowed_list:\t0-2,4\n",
    "proc/sys/kernel/osrelease": "6.1.0-25-amd64\n",
    "proc/sys/vm/overcommit_memory": "0\n",
    "sys/fs/cgroup/box/memory.max": "max\n",
    "sys/kernel/mm/transparent_hugepage/shmem_enabled": "always within_size [never] force\n",
    "dev/shm/keep": "",
}


@dataclass
class FakeHost:
    """Builds a Host; every field has the value of a machine nothing is wrong with."""

    root: Path
    files: dict[str, str | None] = field(default_factory=dict)
    """By path below the root, instead of GOOD_FILES; None: not there. SHM: where /dev/shm lies."""
    machine: str = "x86_64"
    page_bytes: int = 4096
    free_bytes: int = 6 * GIB

    def make(self) -> Host:
        for name, text in {**GOOD_FILES, **self.files}.items():
            if text is not None:
                path = self.root / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text.replace("SHM", str(self.root / "dev/shm")))
        space = Space(8 * GIB, self.free_bytes)
        return Host(self.root, self.machine, self.page_bytes, lambda path: space)
