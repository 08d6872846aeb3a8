"""Machines as /sys and /proc show their cores: a tree of files each, and what is read of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from polyneuron.cores import Cores, read_cores

CPUS = "sys/devices/system/cpu"


def write_files(root: Path, files: Mapping[str, object]) -> None:
    """One line each, as the kernel ends them."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")


def write_machine(
    root: Path,
    num_cores: int,
    *,
    capacities: Mapping[int, object] | None = None,
    clocks_khz: Mapping[int, object] | None = None,
    siblings: Mapping[int, object] | None = None,
    **files: object,
) -> None:
    """A machine all of whose cores are online and allowed; figures by core."""
    everywhere = f"0-{num_cores - 1}"
    tree: dict[str, object] = {f"{CPUS}/{name}": everywhere for name in ("online", "present")}
    tree["proc/self/status"] = f"Name:\tpython\nCpus_allowed_list:\t{everywhere}"
    tree["proc/self/cgroup"] = "0::/box"
    for name, figures in (
        ("cpu_capacity", capacities), ("cpufreq/cpuinfo_max_freq", clocks_khz),
        ("topology/thread_siblings_list", siblings),
    ):  # fmt: skip
        tree |= {f"{CPUS}/cpu{core}/{name}": figure for core, figure in (figures or {}).items()}
    write_files(root, tree | files)


def rk3588(root: Path) -> Cores:
    """Four little A55, four big A76."""
    capacities = {core: 414 if core < 4 else 1024 for core in range(8)}
    clocks = dict.fromkeys(range(4), 1800000) | {4: 2256000, 5: 2256000, 6: 2304000, 7: 2304000}
    siblings = {core: core for core in range(8)}
    write_machine(root, 8, capacities=capacities, clocks_khz=clocks, siblings=siblings)
    return read_cores(root)


def snapdragon_8_gen_3(root: Path) -> Cores:
    """1 + 5 + 2: the first two are little, the last one is the strongest, three and two between."""
    capacities = dict.fromkeys((0, 1), 380) | dict.fromkeys((2, 3, 4), 924) | {5: 867, 6: 867}
    write_machine(root, 8, capacities=capacities | {7: 1024})
    return read_cores(root)


def hyper_threaded(root: Path) -> Cores:
    """Four physical cores of two threads each; two of them clock a little higher."""
    siblings = {core: f"{core % 4},{core % 4 + 4}" for core in range(8)}
    clocks = {core: 5300000 if core % 4 in (1, 2) else 5200000 for core in range(8)}
    write_machine(root, 8, clocks_khz=clocks, siblings=siblings)
    return read_cores(root)


def hybrid(root: Path) -> Cores:
    """Four performance cores of two threads, four efficiency cores whose clocks come near."""
    siblings = {core: f"{core & ~1}-{core | 1}" for core in range(8)} | {8: 8, 9: 9, 10: 10, 11: 11}
    clocks = dict.fromkeys(range(8), 5700000) | dict.fromkeys(range(8, 12), 4600000)
    capacities = dict.fromkeys(range(12), 1024)  # the same for all where threads share cores
    write_machine(root, 12, capacities=capacities, clocks_khz=clocks, siblings=siblings)
    write_files(root, {"sys/devices/cpu_core/cpus": "0-7", "sys/devices/cpu_atom/cpus": "8-11"})
    return read_cores(root)


def alike(root: Path, num_cores: int = 4) -> Cores:
    """Cores of one kind, a thread each."""
    write_machine(
        root, num_cores, capacities=dict.fromkeys(range(num_cores), 1024),
        siblings={core: core for core in range(num_cores)},
    )  # fmt: skip
    return read_cores(root)
