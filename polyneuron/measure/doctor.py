"""The table of everything the doctor looks at, in the order of its report."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from polyneuron.measure.check import Check
from polyneuron.measure.disk_checks import check_direct, check_disk, check_speed, check_uring
from polyneuron.measure.disk_probe import DiskProbe, probe_disk
from polyneuron.measure.host import Host
from polyneuron.measure.host_checks import (
    check_cores,
    check_cpu,
    check_isa,
    check_kernel,
    check_pages,
    check_processes,
)
from polyneuron.measure.memory_checks import (
    check_address_space,
    check_cgroup,
    check_huge_pages,
    check_locked_memory,
    check_memory,
    check_open_files,
    check_shm,
    check_swap,
)
from polyneuron.measure.npu_checks import check_native, check_npu, check_openvino
from polyneuron.measure.ray_check import check_ray

HOST_CHECKS: tuple[Callable[[Host], Check], ...] = (
    check_cpu, check_isa, check_cores, check_pages, check_kernel, check_memory, check_cgroup,
    check_swap, check_shm, check_huge_pages, check_address_space, check_locked_memory,
    check_open_files, check_processes, check_npu, check_native, check_openvino,
)  # fmt: skip
DISK_CHECKS: tuple[Callable[[DiskProbe], Check], ...] = (check_direct, check_disk, check_speed)


def examine(
    host: Host,
    path: Path,
    progress: Callable[[str], None],
    probe: Callable[[Host, Path, Callable[[str], None]], DiskProbe] = probe_disk,
    ray: Callable[[], Check] = check_ray,
) -> tuple[list[Check], DiskProbe]:
    """Look at everything; `path` is the folder or file whose disk is probed."""
    checks = [check(host) for check in HOST_CHECKS]
    disk = probe(host, path, progress)
    checks += [check_uring(host, disk), *(check(disk) for check in DISK_CHECKS)]
    progress("starting Ray")
    return [*checks, ray()], disk
