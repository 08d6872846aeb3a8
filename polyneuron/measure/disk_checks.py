"""Checks of the disk that models lie on, from what a probe of it gave."""

from __future__ import annotations

import errno
import os

from polyneuron.io.block_device import Backend, DeviceInfo
from polyneuron.io.device_probe import Pattern, ProbeRow
from polyneuron.measure.check import Check, ok, warning
from polyneuron.measure.disk_probe import DiskProbe
from polyneuron.measure.host import Host
from polyneuron.sizes import show_size

REMOTE = ("nfs", "nfs4", "cifs", "smb3", "9p", "virtiofs", "sshfs")
IN_MEMORY = ("tmpfs", "ramfs")
BUNDLE_UNIT = 512
"""Bundles of neurons are multiples of it."""
SLOW_BYTES_PER_S = 200e6
SLOW_READS_PER_S = 10e3
DEPTH = 32


def check_disk(disk: DiskProbe) -> Check:
    """What kind of disk it is, and how much is free."""
    kind = disk.mount.type or "unknown file system"
    found = f"{disk.path}: {kind}, {show_size(disk.free_bytes)} free"
    if kind in REMOTE or kind.startswith("fuse"):
        return warning("disk", found, "it is not local: keep models on a disk of this machine")
    if kind in IN_MEMORY:
        return warning(
            "disk", found, "it lies in memory: --path FOLDER of the disk with the models"
        )
    return ok("disk", found)


def check_uring(host: Host, disk: DiskProbe) -> Check:
    """Whether the kernel lets reads be queued."""
    if disk.probe is None:
        return _unknown("io_uring", disk)
    info = disk.probe.info
    if info.backend is Backend.URING:
        return ok("io_uring", "available")
    reason = os.strerror(-info.uring_status)
    found = f"{reason}: threads read instead, at more CPU a read"
    if info.uring_status in (-errno.ENOSYS, -errno.EOPNOTSUPP):
        return warning("io_uring", found, "Linux 5.11 or later, built with CONFIG_IO_URING")
    if info.uring_status == -errno.ENOMEM:
        return warning("io_uring", found, "ulimit -l unlimited")
    cure = "allow it in the container (docker: --security-opt seccomp=PROFILE that has io_uring)"
    if host.number("proc/sys/kernel/io_uring_disabled"):
        cure = "sysctl kernel.io_uring_disabled=0"
    return warning("io_uring", found, cure)


def check_direct(disk: DiskProbe) -> Check:
    """Whether reads go past the page cache, and how they must lie for that."""
    if disk.probe is None:
        return _unknown("O_DIRECT", disk)
    info = disk.probe.info
    if not info.is_direct:
        cure = "keep models on ext4, xfs, btrfs or f2fs"
        return warning(
            "O_DIRECT", f"{disk.mount.type or 'the file system'} refuses it: {_cached()}", cure
        )
    found = f"sectors of {info.offset_alignment} bytes"
    if info.offset_alignment > BUNDLE_UNIT:
        cure = f"a namespace of {BUNDLE_UNIT}-byte sectors, if the disk has one (nvme format)"
        return warning("O_DIRECT", f"{found}: single neurons are read {_cached()}", cure)
    return ok("O_DIRECT", found)


def _cached() -> str:
    return "through the page cache, at more CPU"


def check_speed(disk: DiskProbe) -> Check:
    """What deep queues of reads give: large ones for layers, small ones for neurons."""
    if disk.probe is None:
        return _unknown("disk speed", disk)
    rows = {
        (row.case.pattern, row.case.read_bytes >> 10): row
        for row in disk.probe.rows
        if row.case.depth == DEPTH
    }
    layers = rows[Pattern.SEQUENTIAL, 1024].bytes_per_s
    neurons = rows[Pattern.RANDOM, 8].reads_per_s
    found = f"{layers / 1e6:.0f} MB/s in large reads, {neurons:.0f} random reads a second of 8 KiB"
    if layers < SLOW_BYTES_PER_S:
        cure = "a faster disk, or more memory: each token of a dense model reads what is not kept"
        return warning("disk speed", found, cure)
    if neurons < SLOW_READS_PER_S:
        cure = "a disk that queues reads, or more memory: sparse models read neurons one by one"
        return warning("disk speed", found, cure)
    return ok("disk speed", found)


def row_figures(row: ProbeRow) -> dict[str, object]:
    """A row of the probe as data."""
    return {
        "pattern": row.case.pattern.value,
        "read_bytes": row.case.read_bytes,
        "depth": row.case.depth,
        "bytes_per_second": row.bytes_per_s,
        "reads_per_second": row.reads_per_s,
        "latency_p50_ms": row.latency_p50_ns / 1e6,
        "latency_p99_ms": row.latency_p99_ns / 1e6,
        "cpu_us_per_read": row.cpu_ns_per_read / 1e3,
    }


def info_figures(info: DeviceInfo) -> dict[str, object]:
    """How the file was read, as data."""
    return {
        "backend": info.backend.name.lower(),
        "is_direct": info.is_direct,
        "offset_alignment": info.offset_alignment,
        "memory_alignment": info.memory_alignment,
    }


def _unknown(name: str, disk: DiskProbe) -> Check:
    return warning(name, f"not measured: {disk.failure}", disk.cure)
