"""Checks of the disk, from made-up probes of it."""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from polyneuron.io.block_device import Backend, DeviceInfo
from polyneuron.io.device_probe import CASES, DeviceProbe, Pattern, ProbeRow
from polyneuron.measure.check import Check, Status
from polyneuron.measure.disk_checks import check_direct, check_disk, check_speed, check_uring
from polyneuron.measure.disk_probe import DiskProbe
from polyneuron.measure.doctor import DISK_CHECKS
from polyneuron.measure.host import Mount
from tests.support.fake_host import GIB, FakeHost

OK, WARNING = Status.OK, Status.WARNING
INFO = DeviceInfo(
    path=Path("/proc/self/fd/9"), file_bytes=256 << 20, backend=Backend.URING, uring_status=0,
    is_direct=True, offset_alignment=512, memory_alignment=4, queue_depth=32, max_requests=256,
    has_registered_file=True, registered_bytes=0, num_outstanding=0, num_reads=1, num_continued=0,
    bytes_read=1,
)  # fmt: skip


def make_probe(large_mb_per_s: float = 1500, small_per_s: float = 40e3, **info: Any) -> DeviceProbe:
    """A probe whose speed does not depend on the depth."""
    rows = []
    for case in CASES:
        is_large = case.pattern is Pattern.SEQUENTIAL
        reads = large_mb_per_s * 1e6 / case.read_bytes if is_large else small_per_s
        rows.append(ProbeRow(case, 100, reads * case.read_bytes, reads, 90_000, 900_000, 4000.0))
    return DeviceProbe(replace(INFO, **info), tuple(rows))


def make_disk(probe: DeviceProbe | None = None, type: str = "ext4", **fields: Any) -> DiskProbe:
    """A disk nothing is wrong with."""
    mount = Mount("/", type, frozenset())
    disk = DiskProbe(Path("/models"), mount, 90 * GIB, 256 << 20, probe or make_probe())
    return replace(disk, **fields)


def uring(status: int, disabled: str = "") -> Callable[[Path], Check]:
    """The check's line of a machine where io_uring gave this status."""
    probe = make_probe(backend=Backend.POOL, uring_status=-status)
    files: dict[str, str | None] = {"proc/sys/kernel/io_uring_disabled": disabled}
    return lambda root: check_uring(FakeHost(root, files).make(), make_disk(probe))


@pytest.mark.parametrize(
    ("check", "disk", "status", "found", "cure"),
    [
        (check_disk, make_disk(), OK, "/models: ext4, 90.0 GiB free", ""),
        (check_disk, make_disk(type="nfs4"), WARNING, "nfs4", "not local"),
        (check_disk, make_disk(type="fuse.sshfs"), WARNING, "fuse.sshfs", "not local"),
        (check_disk, make_disk(type="tmpfs"), WARNING, "tmpfs", "--path FOLDER"),
        (check_disk, make_disk(type=""), OK, "unknown file system", ""),
        (check_direct, make_disk(), OK, "sectors of 512 bytes", ""),
        (
            check_direct,
            make_disk(make_probe(is_direct=False), type="overlay"),
            WARNING,
            "overlay refuses it: through the page cache",
            "keep models on ext4",
        ),
        (
            check_direct,
            make_disk(make_probe(offset_alignment=4096)),
            WARNING,
            "sectors of 4096 bytes: single neurons are read through the page cache",
            "512-byte sectors",
        ),
        (check_speed, make_disk(), OK, "1500 MB/s in large reads, 40000 random reads", ""),
        (check_speed, make_disk(make_probe(90)), WARNING, "90 MB/s", "a faster disk"),
        (check_speed, make_disk(make_probe(500, 900)), WARNING, "900 random", "queues reads"),
    ],
)
def test_line(
    check: Callable[[DiskProbe], Check], disk: DiskProbe, status: Status, found: str, cure: str
) -> None:
    line = check(disk)
    assert line.status is status
    assert found in line.found
    assert cure in line.cure and bool(line.cure) == bool(cure)


@pytest.mark.parametrize(
    ("line", "found", "cure"),
    [
        (uring(errno.EPERM), "Operation not permitted: threads read instead", "seccomp"),
        (uring(errno.EPERM, "2"), "Operation not permitted", "sysctl kernel.io_uring_disabled=0"),
        (uring(errno.EPERM, "0"), "Operation not permitted", "seccomp"),
        (uring(errno.ENOSYS), "Function not implemented", "Linux 5.11"),
        (uring(errno.ENOMEM), "Cannot allocate memory", "ulimit -l unlimited"),
    ],
)
def test_uring_is_not_there(
    tmp_path: Path, line: Callable[[Path], Check], found: str, cure: str
) -> None:
    check = line(tmp_path)
    assert check.status is WARNING
    assert found in check.found and cure in check.cure


def test_uring_is_there(tmp_path: Path) -> None:
    assert check_uring(FakeHost(tmp_path).make(), make_disk()).status is OK


def test_unprobed_disk_says_why(tmp_path: Path) -> None:
    disk = make_disk(probe=None, failure="/models: Read-only file system", cure="--path FILE")
    disk = replace(disk, probe=None)
    lines = [check_uring(FakeHost(tmp_path).make(), disk), *(check(disk) for check in DISK_CHECKS)]
    told = [line for line in lines if line.status is WARNING]
    assert [line.name for line in told] == ["io_uring", "O_DIRECT", "disk speed"]
    assert {line.found for line in told} == {"not measured: /models: Read-only file system"}
    assert {line.cure for line in told} == {"--path FILE"}
