"""Checks of memory: what there is, what limits it, and where the arena goes."""

from __future__ import annotations

from polyneuron.host_memory import UNLIMITED_BYTES
from polyneuron.measure.check import Check, ok, problem, warning
from polyneuron.measure.host import UNLIMITED, Host
from polyneuron.sizes import show_size

MIB = 1 << 20
LEAST_BYTES = 512 * MIB
"""Ray, the actors and the smallest model."""
LITTLE_BYTES = 1024 * MIB
SWAPPED_BYTES = 64 * MIB
LEAST_FILES, FEW_FILES = 256, 1024
SHM = "dev/shm"
THP = "sys/kernel/mm/transparent_hugepage"


def check_memory(host: Host) -> Check:
    """What a run without --memory would take."""
    limit = host.memory.available()
    found = (
        f"{show_size(limit.num_bytes)} to be had of {show_size(host.kibibytes('MemTotal'))}"
        f" ({limit.source})"
    )
    cure = "end other programs, or raise the container's limit (docker: --memory)"
    if limit.num_bytes < LEAST_BYTES:
        return problem("memory", found, cure)
    if limit.num_bytes < LITTLE_BYTES:
        return warning("memory", f"{found}: small models only", cure)
    return ok("memory", found)


def check_cgroup(host: Host) -> Check:
    """Limits of the cgroups around this process, v1 or v2."""
    limits, throttles = [], []
    for folder in host.cgroup_folders("memory"):
        most = host.number(f"{folder}/memory.max")
        most = host.number(f"{folder}/memory.limit_in_bytes") if most is None else most
        high = host.number(f"{folder}/memory.high")
        limits += [most] if most is not None and most < UNLIMITED_BYTES else []
        throttles += [high] if high is not None else []
    limit, high = min(limits, default=UNLIMITED), min(throttles, default=UNLIMITED)
    if high < limit:
        cure = (
            f"raise memory.high, or give --memory {high // MIB}MiB: the kernel slows who is above"
        )
        return warning("cgroup", f"memory.high of {show_size(high)}", cure)
    if limit == UNLIMITED:
        return ok("cgroup", "no limit of memory")
    return ok("cgroup", f"limit of {show_size(limit)} of memory, kept by every run")


def check_swap(host: Host) -> Check:
    """Weights that are swapped out are read twice."""
    total = host.kibibytes("SwapTotal")
    used = total - host.kibibytes("SwapFree")
    if total == 0:
        return ok("swap", "none")
    found = f"{show_size(used)} of {show_size(total)} in use"
    if used < SWAPPED_BYTES:
        return ok("swap", found)
    return warning("swap", found, "memory is short: give --memory, or end other programs")


def check_shm(host: Host) -> Check:
    """Shared memory, where the arena lies."""
    path = host.root / SHM
    if not path.is_dir():
        cure = "mount -t tmpfs tmpfs /dev/shm"
        return problem("/dev/shm", "is missing: the arena lies there", cure)
    mount, space = host.mount_of(path), host.space(path)
    found = f"{show_size(space.free)} free of {show_size(space.total)}"
    need = host.memory.default_budget()
    size = f"{-(-need // MIB)}M"
    cure = f"mount -o remount,size={size} /dev/shm (container: --shm-size={size.lower()})"
    if mount.type and mount.type != "tmpfs":
        return problem("/dev/shm", f"is {mount.type}, not memory", "mount -t tmpfs tmpfs /dev/shm")
    if space.free < LEAST_BYTES // 2:
        return problem("/dev/shm", f"{found}: too little for any model", cure)
    # Half of the memory is the usual size, and enough for most models.
    return ok("/dev/shm", found, f"{cure}: to use all memory" if space.free < need else "")


def check_huge_pages(host: Host) -> Check:
    """Whether the arena may lie in huge pages."""
    name, root = "huge pages", host.root
    if not (root / THP).exists():
        return ok(name, "not in this kernel")
    options = host.mount_of(root / SHM).options
    asked = {option.removeprefix("huge=") for option in options if option.startswith("huge=")}
    forced = "[force]" in host.text(f"{THP}/shmem_enabled")
    denied = "[deny]" in host.text(f"{THP}/shmem_enabled")
    if forced or (asked & {"always", "within_size"} and not denied):
        return ok(name, "shared memory takes them")
    cure = "mount -o remount,huge=within_size /dev/shm: reading weights is up to a fifth faster"
    if denied:
        cure = f"echo never > /{THP}/shmem_enabled, then {cure}"
    return ok(name, "not for shared memory", cure)


def check_address_space(host: Host) -> Check:
    """Mapping the arena takes addresses long before it takes memory."""
    limit = host.soft_limit("Max address space")
    if limit != UNLIMITED:
        found = f"limited to {show_size(limit)} a process"
        return problem("address space", found, "ulimit -v unlimited")
    if host.number("proc/sys/vm/overcommit_memory") == 2:
        cure = "sysctl vm.overcommit_memory=0"
        return problem("address space", "the kernel commits no more than it has", cure)
    return ok("address space", "no limit")


def check_locked_memory(host: Host) -> Check:
    """What the kernel may keep mapped for reads."""
    name, limit = "locked memory", host.soft_limit("Max locked memory")
    if limit == UNLIMITED or host.may_lock_memory():
        return ok(name, "no limit")
    cure = "ulimit -l unlimited: reads of single neurons take up to a quarter less CPU"
    return ok(name, f"{limit >> 10} KiB", cure)


def check_open_files(host: Host) -> Check:
    """Ray's processes and actors talk through sockets; it raises the soft limit by itself."""
    limit = host.hard_limit("Max open files")
    found = "no limit" if limit == UNLIMITED else f"{limit} a process"
    cure = f"ulimit -Hn {4 * FEW_FILES}"
    if limit < LEAST_FILES:
        return problem("open files", found, cure)
    return warning("open files", found, cure) if limit < FEW_FILES else ok("open files", found)
