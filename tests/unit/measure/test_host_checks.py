"""Checks of processor, memory and limits, line by line, on made-up machines."""

from __future__ import annotations

from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import NoReturn

import pytest

from polyneuron.errors import ConfigError
from polyneuron.measure.check import Check, Status
from polyneuron.measure.doctor import HOST_CHECKS
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
from polyneuron.measure.ray_check import check_ray
from tests.support.fake_host import GIB, GOOD_FILES, KIB_OF_GIB, FakeHost

OK, WARNING, PROBLEM = Status.OK, Status.WARNING, Status.PROBLEM
CPUFREQ = "sys/devices/system/cpu/cpu0/cpufreq"
THP = "sys/kernel/mm/transparent_hugepage/shmem_enabled"
V1 = "9:memory:/job\n8:cpu,cpuacct:/job\n7:pids:/job\n"


def mounted(shm_type: str, options: str) -> str:
    """A machine's mounts with this one at /dev/shm, wherever the fake machine's root is."""
    return (
        f"1 0 8:1 / / rw - ext4 /dev/sda1 rw\n2 1 0:9 / SHM rw,nosuid - {shm_type} shm {options}\n"
    )


def limits(**hard: str) -> str:
    lines = [f"Max {name.replace('_', ' '):<22}{value}" for name, value in hard.items()]
    return "\n".join(lines)


CASES: list[tuple[Callable[[Host], Check], dict[str, str | None], Status, str, str]] = [
    (check_cpu, {}, OK, "Fast 9000, x86_64", ""),
    (check_cpu, {"proc/cpuinfo": "", "proc/device-tree/model": "Pi 5\0"}, OK, "Pi 5", ""),
    (check_cpu, {"proc/cpuinfo": "Hardware : BCM2711\n"}, OK, "BCM2711", ""),
    (
        check_cpu,
        {f"{CPUFREQ}/scaling_governor": "powersave", f"{CPUFREQ}/scaling_driver": "cpufreq-dt"},
        WARNING,
        "lowest frequency",
        "cpupower",
    ),
    (
        check_cpu,
        {f"{CPUFREQ}/scaling_governor": "powersave", f"{CPUFREQ}/scaling_driver": "intel_pstate"},
        OK,
        "Fast 9000",
        "",
    ),
    (check_cores, {}, OK, "4 usable", ""),
    (check_cores, {"proc/self/status": "Cpus_allowed_list: 3\n"}, WARNING, "1 usable", "second"),
    (
        check_cores,
        {"sys/fs/cgroup/box/cpu.max": "150000 100000\n"},
        WARNING,
        "4 usable; time for 1.5 of them; 2 workers on 0-1, reader on 2",
        "docker: --cpus=4)",
    ),
    (check_cores, {"sys/fs/cgroup/box/cpu.max": "max 100000\n"}, OK, "4 usable", ""),
    (
        check_cores,
        {
            "proc/self/cgroup": V1,
            "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us": "200000\n",
            "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us": "100000\n",
        },
        WARNING,
        "time for 2 of them; 2 workers on 0-1",
        "docker: --cpus=4)",
    ),
    (check_pages, {}, OK, "4 KiB", ""),
    (check_kernel, {}, OK, "Linux 6.1.0-25-amd64", ""),
    (check_kernel, {"proc/sys/kernel/osrelease": "5.10.3\n"}, WARNING, "5.10.3", "Linux 5.11"),
    (check_kernel, {"proc/sys/kernel/osrelease": None}, OK, "unknown version", ""),
    (check_memory, {}, OK, "6144 MiB to be had of 8192 MiB (MemAvailable)", ""),
    (
        check_memory,
        {"proc/meminfo": f"MemTotal: {KIB_OF_GIB} kB\nMemAvailable: {700 << 10} kB\n"},
        WARNING,
        "700 MiB to be had of 1024 MiB (MemAvailable): small models only",
        "end other programs",
    ),
    (
        check_memory,
        {"sys/fs/cgroup/box/memory.max": f"{GIB // 4}", "sys/fs/cgroup/box/memory.current": "0"},
        PROBLEM,
        "256 MiB to be had of 8192 MiB (cgroup box)",
        "docker: --memory",
    ),
    (check_cgroup, {}, OK, "no limit of memory", ""),
    (check_cgroup, {"sys/fs/cgroup/box/memory.max": f"{3 * GIB}"}, OK, "limit of 3072 MiB", ""),
    (
        check_cgroup,
        {
            "proc/self/cgroup": V1,
            "sys/fs/cgroup/memory/job/memory.limit_in_bytes": f"{2 * GIB}\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        },
        OK,
        "limit of 2048 MiB",
        "",
    ),
    (
        check_cgroup,
        {
            "sys/fs/cgroup/box/memory.max": f"{3 * GIB}",
            "sys/fs/cgroup/box/memory.high": f"{2 * GIB}",
        },
        WARNING,
        "memory.high of 2048 MiB",
        "--memory 2048MiB",
    ),
    (check_swap, {}, OK, "none", ""),
    (
        check_swap,
        {"proc/meminfo": "SwapTotal: 1048576 kB\nSwapFree: 1048570 kB\n"},
        OK,
        "0 MiB of 1024 MiB in use",
        "",
    ),
    (
        check_swap,
        {"proc/meminfo": "SwapTotal: 1048576 kB\nSwapFree: 524288 kB\n"},
        WARNING,
        "512 MiB of 1024 MiB in use",
        "memory is short",
    ),
    (check_shm, {}, OK, "6144 MiB free of 8192 MiB", ""),
    (check_shm, {"dev/shm/keep": None}, PROBLEM, "is missing", "mount -t tmpfs"),
    (check_shm, {"proc/self/mountinfo": mounted("ext4", "rw")}, PROBLEM, "is ext4", "tmpfs"),
    (check_shm, {"proc/self/mountinfo": mounted("tmpfs", "rw")}, OK, "6144 MiB free", ""),
    (
        check_huge_pages,
        {"proc/self/mountinfo": mounted("tmpfs", "rw,huge=within_size")},
        OK,
        "shared memory takes them",
        "",
    ),
    (check_huge_pages, {THP: "always never [force]"}, OK, "shared memory takes them", ""),
    (check_huge_pages, {}, OK, "not for shared memory", "mount -o remount,huge=within_size"),
    (
        check_huge_pages,
        {
            "proc/self/mountinfo": mounted("tmpfs", "rw,huge=always"),
            THP: "always [deny] force",
        },
        OK,
        "not for shared memory",
        "echo never > /sys/kernel/mm",
    ),
    (check_huge_pages, {THP: None}, OK, "not in this kernel", ""),
    (check_address_space, {}, OK, "no limit", ""),
    (
        check_address_space,
        {"proc/self/limits": limits(address_space="4294967296  unlimited  bytes")},
        PROBLEM,
        "limited to 4096 MiB a process",
        "ulimit -v unlimited",
    ),
    (
        check_address_space,
        {"proc/sys/vm/overcommit_memory": "2"},
        PROBLEM,
        "commits no more",
        "sysctl vm.overcommit_memory=0",
    ),
    (check_locked_memory, {}, OK, "no limit", ""),
    (
        check_locked_memory,
        {"proc/self/limits": limits(locked_memory="8388608  8388608  bytes")},
        OK,
        "8192 KiB",
        "ulimit -l unlimited",
    ),
    (
        check_locked_memory,
        {
            "proc/self/limits": limits(locked_memory="8388608  8388608  bytes"),
            "proc/self/status": "CapEff:\t0000000000004000\n",
        },
        OK,
        "no limit",
        "",
    ),
    (check_open_files, {}, OK, "65536 a process", ""),
    (
        check_open_files,
        {"proc/self/limits": limits(open_files="256  512  files")},
        WARNING,
        "512 a process",
        "ulimit -Hn",
    ),
    (
        check_open_files,
        {"proc/self/limits": limits(open_files="64  128  files")},
        PROBLEM,
        "128 a process",
        "ulimit -Hn 4096",
    ),
    (check_processes, {}, OK, "no limit by cgroups", ""),
    (
        check_processes,
        {"sys/fs/cgroup/box/pids.max": "300\n", "sys/fs/cgroup/box/pids.current": "50\n"},
        WARNING,
        "room for 250 more",
        "--pids-limit",
    ),
    (
        check_processes,
        {
            "proc/self/cgroup": V1,
            "sys/fs/cgroup/pids/job/pids.max": "90\n",
            "sys/fs/cgroup/pids/pids.max": "max\n",
        },
        PROBLEM,
        "room for 90 more",
        "--pids-limit",
    ),
    (check_processes, {"sys/fs/cgroup/box/pids.max": "9999\n"}, OK, "room for 9999", ""),
]


@pytest.mark.parametrize(("check", "files", "status", "found", "cure"), CASES)
def test_line(
    tmp_path: Path,
    check: Callable[[Host], Check],
    files: dict[str, str | None],
    status: Status,
    found: str,
    cure: str,
) -> None:
    line = check(FakeHost(tmp_path, files).make())
    assert line.status is status
    assert found in line.found
    assert cure in line.cure
    assert bool(line.cure) == bool(cure)


class TestOtherFacts:
    def test_unknown_machine_is_slow(self, tmp_path: Path) -> None:
        line = check_cpu(FakeHost(tmp_path, machine="riscv64").make())
        assert (line.status, line.found) == (WARNING, "Fast 9000, riscv64")

    @pytest.mark.parametrize(
        ("free", "status", "cure"),
        [(63 << 20, PROBLEM, "--shm-size=5837m"), (4 * GIB, OK, "size=5837M"), (6 * GIB, OK, "")],
    )
    def test_room_in_shm(self, tmp_path: Path, free: int, status: Status, cure: str) -> None:
        line = check_shm(FakeHost(tmp_path, free_bytes=free).make())
        assert line.status is status
        assert cure in line.cure and bool(line.cure) == bool(cure)

    @pytest.mark.parametrize(
        ("name", "supported", "status", "cure"),
        [
            ("avx512", ["avx512", "avx2", "scalar"], OK, ""),
            ("avx2", ["avx2", "scalar"], OK, "avx512 would run on a CPU with AVX-512 with VNNI"),
            ("scalar", ["scalar"], WARNING, "avx2 would run on a CPU with AVX2 and F16C"),
            ("avx2", ["avx512", "avx2", "scalar"], WARNING, "unset POLYNEURON_FORCE_ISA"),
        ],
    )
    def test_isa(
        self, tmp_path: Path, name: str, supported: list[str], status: Status, cure: str
    ) -> None:
        built = ["avx512", "avx2", "scalar"]
        host = FakeHost(tmp_path).make()
        line = check_isa(host, lambda: name, lambda: supported, lambda: built)
        assert line.status is status and line.found.startswith(name)
        assert line.cure.endswith(cure) and bool(line.cure) == bool(cure)

    def test_isa_of_a_machine_without_kernels_of_its_own(self, tmp_path: Path) -> None:
        def only_scalar() -> list[str]:
            return ["scalar"]

        host = FakeHost(tmp_path, machine="riscv64").make()
        line = check_isa(host, lambda: "scalar", only_scalar, only_scalar)
        assert (line.status, line.cure) == (WARNING, "kernels are tuned for x86_64 and aarch64")

    def test_forced_isa_that_is_not_there(self, tmp_path: Path) -> None:
        def active() -> NoReturn:
            raise ConfigError("POLYNEURON_FORCE_ISA=mmx: not available")

        line = check_isa(FakeHost(tmp_path).make(), active)
        assert (line.status, line.cure) == (PROBLEM, "unset POLYNEURON_FORCE_ISA")

    def test_every_check_stands_a_machine_without_files(self, tmp_path: Path) -> None:
        host = FakeHost(tmp_path, dict.fromkeys(GOOD_FILES)).make()
        (tmp_path / "proc").mkdir()
        (tmp_path / "proc/meminfo").touch()
        assert [check(host).found for check in HOST_CHECKS]


class TestRay:
    def test_it_starts(self) -> None:
        line = check_ray(lambda: 1.25, lambda name: "2.60.0")
        assert (line.status, line.found) == (OK, "2.60.0 starts in 1.2 s")

    def test_slow_start_is_told(self) -> None:
        line = check_ray(lambda: 31.0, lambda name: "2.60.0")
        assert (line.status, line.found) == (WARNING, "2.60.0 takes 31 s to start")

    def test_missing_package(self) -> None:
        def version(name: str) -> NoReturn:
            raise metadata.PackageNotFoundError(name)

        line = check_ray(lambda: 0.0, version)
        assert (line.status, line.cure) == (PROBLEM, "pip install ray")

    @pytest.mark.parametrize(
        ("error", "found", "cure"),
        [
            (ConfigError("/dev/shm has 1 MiB free: enlarge it"), "does not start", "enlarge it"),
            (RuntimeError("a trace\nno port"), "RuntimeError: no port", "loopback"),
            (TimeoutError(), "TimeoutError", "loopback"),
        ],
    )
    def test_failed_start(self, error: Exception, found: str, cure: str) -> None:
        def start() -> NoReturn:
            raise error

        line = check_ray(start, lambda name: "2.60.0")
        assert line.status is PROBLEM
        assert found in line.found and cure in line.cure
