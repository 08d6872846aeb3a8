"""Measures a disk by a file of its own that no ending of the program leaves behind."""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from polyneuron.errors import DeviceError
from polyneuron.io.device_probe import DeviceProbe, probe_device
from polyneuron.kernels.arena import monotonic_ns
from polyneuron.measure.host import Host, Mount
from polyneuron.sizes import show_size

MIB = 1 << 20
PIECE_BYTES = 8 * MIB
MAX_SCRATCH_BYTES = 256 * MIB
MIN_SCRATCH_BYTES = 32 * MIB
MAX_SHARE = 10
"""Of the free space a scratch file takes at most one in so many parts."""
MAX_WRITE_NS = 1_500_000_000
CASE_NS = 150_000_000


@dataclass(frozen=True, slots=True)
class DiskProbe:
    """What a disk gave, or why it could not be asked."""

    path: Path
    """The folder or file that was asked for."""
    mount: Mount
    free_bytes: int
    probed_bytes: int
    """Length of the file that was read."""
    probe: DeviceProbe | None
    failure: str = ""
    cure: str = ""


def probe_disk(
    host: Host,
    path: Path,
    progress: Callable[[str], None] = lambda text: None,
    case_ns: int = CASE_NS,
    max_write_ns: int = MAX_WRITE_NS,
) -> DiskProbe:
    """Probe the file at `path`, or the disk of that folder by a file of random bytes in it.

    Takes 1.5 s at most for the file and 0.15 s for each of twelve rows.
    """
    real = path.resolve()
    try:
        if path.is_file():
            progress(f"reading {path}")
            return _result(host, real, path.stat().st_size, _probe(real, case_ns))
        size = min(MAX_SCRATCH_BYTES, host.space(real).free // MAX_SHARE)
        if size < MIN_SCRATCH_BYTES:
            failure = f"{path}: {show_size(host.space(real).free)} free are too little to measure"
            return _result(host, real, 0, None, failure, "free some, or give --path FILE to read")
        progress(f"writing up to {show_size(size)} into {path}")
        with scratch_file(real, size, max_write_ns) as (file, num_bytes):
            progress(f"reading {show_size(num_bytes)} in {path}")
            return _result(host, real, num_bytes, _probe(file, case_ns))
    except DeviceError as error:
        return _result(host, real, 0, None, str(error), "look at the disk (dmesg, smartctl)")
    except OSError as error:
        cure = "--path FOLDER of the disk that holds the models, or --path FILE"
        reason = os.strerror(error.errno) if error.errno else str(error)
        return _result(host, real, 0, None, f"{path}: {reason}", cure)


@contextmanager
def scratch_file(folder: Path, max_bytes: int, max_ns: int) -> Iterator[tuple[Path, int]]:
    """A file of random bytes on the disk, without a name: gone when this process is.

    Gives a path to read it by, and its length: whole pieces, as many as `max_ns` allows.
    """
    block = os.urandom(PIECE_BYTES)
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        end_ns, num_bytes = monotonic_ns() + max_ns, 0
        while num_bytes == 0 or (num_bytes + PIECE_BYTES <= max_bytes and monotonic_ns() < end_ns):
            num_bytes += os.pwrite(file.fileno(), block, num_bytes)
            os.fdatasync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        yield Path(f"/proc/self/fd/{file.fileno()}"), num_bytes


def nearest_folder(path: Path) -> Path:
    """The folder, or the nearest one around it that exists."""
    return next(folder for folder in (path, *path.parents) if folder.is_dir())


def _probe(path: Path, case_ns: int) -> DeviceProbe:
    return probe_device(path, random.Random(0), max_ns=case_ns)


def _result(
    host: Host,
    path: Path,
    num_bytes: int,
    probe: DeviceProbe | None,
    failure: str = "",
    cure: str = "",
) -> DiskProbe:
    return DiskProbe(
        path,
        host.mount_of(path),
        host.space(path).free,
        num_bytes,
        probe,
        failure,
        cure,
    )
