"""Checks of processor and kernel: small functions from a Host to a Check."""

from __future__ import annotations

from collections.abc import Callable

from polyneuron.errors import ConfigError
from polyneuron.kernels import isa
from polyneuron.measure.check import Check, ok, problem, warning
from polyneuron.measure.host import Host

FAST_MACHINES = ("x86_64", "aarch64")
MIN_KERNEL = (5, 11)
"""io_uring as it is used: Linux before 5.11 cannot wait for reads with a time limit."""
GOVERNED_BY_FIRMWARE = ("intel_pstate", "amd-pstate", "amd-pstate-epp")
"""Their `powersave` is the normal state."""


def check_cpu(host: Host) -> Check:
    """Its name, and whether it is let run."""
    name = (
        host.field("proc/cpuinfo", "model name")
        or host.text("proc/device-tree/model")
        or host.field("proc/cpuinfo", "Hardware")
        or "unknown processor"
    )
    found = f"{name}, {host.machine}"
    if host.machine not in FAST_MACHINES:
        return warning(
            "CPU", found, f"kernels are tuned for {' and '.join(FAST_MACHINES)}; expect little"
        )
    folder = "sys/devices/system/cpu/cpu0/cpufreq"
    is_slow = host.text(f"{folder}/scaling_governor") == "powersave"
    if is_slow and host.text(f"{folder}/scaling_driver") not in GOVERNED_BY_FIRMWARE:
        cure = "cpupower frequency-set -g performance (or schedutil)"
        return warning("CPU", f"{found}, held at its lowest frequency", cure)
    return ok("CPU", found)


def check_isa(host: Host, active: Callable[[], str] = isa.active) -> Check:
    """The instruction set whose kernels will run."""
    try:
        name = active()
    except ConfigError as error:
        return problem("ISA", str(error), f"unset {isa.FORCE_VARIABLE}")
    if name == "scalar":
        cure = "a CPU with AVX2 or with NEON dot products is several times faster"
        return warning("ISA", "portable kernels only", cure)
    return ok("ISA", name)


def check_cores(host: Host) -> Check:
    """Cores, and the time a container may take of them."""
    cores, quota = host.cores(), _cpu_quota(host)
    found = f"{cores} usable"
    if quota is not None and quota < cores:
        workers = max(1, int(quota))
        cure = f"raise the container's limit (docker: --cpus={cores}), or run with -t {workers}"
        return warning("cores", f"{found}, time for {quota:g} of them", cure)
    if cores == 1:
        cure = "reading and computing share it: a second core hides most of the reading"
        return warning("cores", found, cure)
    return ok("cores", found)


def _cpu_quota(host: Host) -> float | None:
    """Cores' worth of time that cgroups allow; None: all."""
    quotas = []
    for folder in host.cgroup_folders("cpu"):
        words = host.text(f"{folder}/cpu.max").split()
        if not words:
            words = [host.text(f"{folder}/cpu.cfs_{name}_us") for name in ("quota", "period")]
        if words[0].isdigit() and words[1].isdigit():
            quotas.append(int(words[0]) / int(words[1]))
    return min(quotas, default=None)


def check_pages(host: Host) -> Check:
    """The page size: shared memory and reads are cut by it."""
    return ok("page size", f"{host.page_bytes >> 10} KiB")


def check_kernel(host: Host) -> Check:
    """Its version."""
    release = host.text("proc/sys/kernel/osrelease")
    numbers = tuple(int(part) for part in release.split("-")[0].split(".")[:2] if part.isdigit())
    if numbers and numbers < MIN_KERNEL:
        cure = "Linux 5.11 or later reads by io_uring; until then threads do"
        return warning("kernel", f"Linux {release}", cure)
    return ok("kernel", f"Linux {release or 'of unknown version'}")


def check_processes(host: Host) -> Check:
    """How many processes and threads a container allows."""
    rooms = []
    for folder in host.cgroup_folders("pids"):
        most, now = host.number(f"{folder}/pids.max"), host.number(f"{folder}/pids.current")
        if most is not None:
            rooms.append(most - (now or 0))
    room = min(rooms, default=None)
    if room is None:
        return ok("processes", "no limit by cgroups")
    found = f"room for {room} more processes and threads"
    cure = "raise the container's limit (docker: --pids-limit=1024)"
    if room < 100:
        return problem("processes", found, cure)
    return warning("processes", found, cure) if room < 400 else ok("processes", found)


def check_npu(host: Host) -> Check:
    """Neural accelerators the kernel knows; the executor of dense clusters runs without."""
    names = [
        path.name
        for pattern in ("accel/accel*", "rknpu*", "fastrpc-cdsp*", "apex_*")
        for path in sorted((host.root / "dev").glob(pattern))
    ]
    if names:
        return ok("NPU", f"{', '.join(names)}: not used yet, dense clusters run on CPU cores")
    return ok("NPU", "none: dense clusters run on CPU cores (a modelled NPU)")
