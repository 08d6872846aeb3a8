"""Checks of processor and kernel: small functions from a Host to a Check."""

from __future__ import annotations

from collections.abc import Callable

from polyneuron.config import EngineConfig
from polyneuron.core_use import place
from polyneuron.cores import Cores, show_cores
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
    cores = host.cores().ids
    if slow := [core for core in cores if _is_held_low(host, core)]:
        which = "" if len(slow) == len(cores) else f"{show_cores(slow)} of its cores "
        cure = "cpupower frequency-set -g performance (or schedutil)"
        return warning("CPU", f"{found}, {which}held at the lowest frequency", cure)
    return ok("CPU", found)


def _is_held_low(host: Host, core: int) -> bool:
    """Whether a core's governor keeps it slow: each cluster of a big.LITTLE has its own."""
    folder = f"sys/devices/system/cpu/cpu{core}/cpufreq"
    is_slow = host.text(f"{folder}/scaling_governor") == "powersave"
    return is_slow and host.text(f"{folder}/scaling_driver") not in GOVERNED_BY_FIRMWARE


def check_isa(
    host: Host,
    active: Callable[[], str] = isa.active,
    supported: Callable[[], list[str]] = isa.supported,
    built: Callable[[], list[str]] = isa.built,
) -> Check:
    """The instruction set whose kernels will run, and those that would be better."""
    try:
        name = active()
    except ConfigError as error:
        return problem("ISA", str(error), f"unset {isa.FORCE_VARIABLE}")
    best = supported()[0]
    if name != best:
        found = f"{name} as {isa.FORCE_VARIABLE} asks, though this CPU has {best}"
        return warning("ISA", found, f"unset {isa.FORCE_VARIABLE}")
    better = built()[: built().index(name)]
    cure = "; ".join(f"{other} would run on a CPU with {isa.NEEDS[other]}" for other in better)
    if name == "scalar":
        cure = cure or f"kernels are tuned for {' and '.join(FAST_MACHINES)}"
        return warning("ISA", "scalar, portable kernels only: several times slower", cure)
    return ok("ISA", f"{name}, the best of this build" if not better else name, cure)


def check_cores(host: Host) -> Check:
    """Cores, their kinds, the time a container may take of them, and who will use them."""
    cores = host.cores()
    total = len(cores.ids)
    found = "; ".join([f"{total} usable{_missing(cores)}", *_kinds(cores), _use(cores)])
    if cores.is_limited:
        cure = f"raise the container's limit (docker: --cpus={total})"
        return warning("cores", found, cure)
    if total == 1:
        cure = "reading and computing share it: a second core hides most of the reading"
        return warning("cores", found, cure)
    return ok("cores", found)


def _missing(cores: Cores) -> str:
    """Cores the machine has beside the usable ones."""
    parts = [f"of {cores.num_online}"] if cores.num_online > len(cores.ids) else []
    if cores.offline:
        parts.append(f"({show_cores(cores.offline)} offline)")
    return "".join(f" {part}" for part in parts)


def _kinds(cores: Cores) -> list[str]:
    """What sets cores apart, if anything does."""
    parts = []
    if len(cores.kinds) > 1:
        slow = [core for core in cores.ids if core not in cores.fast]
        shown = " | ".join(map(show_cores, cores.kinds))
        parts.append(f"by strength {shown}" + (f", of which {show_cores(slow)} slow" * bool(slow)))
    if len(cores.primary) < len(cores.ids):
        parts.append(f"{len(cores.primary)} physical, the others are their second threads")
    if cores.is_limited:
        parts.append(f"time for {cores.quota:g} of them")
    return parts


def _use(cores: Cores) -> str:
    """Who will run where."""
    config = EngineConfig(num_workers=cores.num_workers(), num_npu_threads=0)
    use = place(cores, config, reads=True)
    on = show_cores(core for cores_of in use.workers for core in cores_of)
    count = len(use.workers)
    where = f"on {show_cores(use.reader)}" if use.reader else "wherever there is time"
    return f"{count} worker{'s' if count > 1 else ''} on {on}, reader {where}"


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
