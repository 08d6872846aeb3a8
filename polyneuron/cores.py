"""Processor cores: which kinds there are, which may be used, and in which order.

Read from the kernel's files below a root, so that a test gives the tree of another machine.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path

from polyneuron.cgroups import cpu_quota, cpuset_lists, text_of
from polyneuron.errors import ConfigError

CPUS = "sys/devices/system/cpu"
SMALL_CORES = "sys/devices/cpu_atom/cpus"
"""Where Linux lists the efficiency cores of a hybrid x86 processor."""
MAX_CORES = 8192
"""More than Linux can be built for; a longer range is a slip of the pen."""
ALIKE = 0.92
"""Of a kind's strongest core: two "favoured" cores of a desktop clock a few hundredths higher."""
FAST_CAPACITY = 0.5
"""Of the strongest core: an RK3588's little cores have 0.4, the middle ones of a phone 0.85."""
FAST_CLOCK = 0.8
"""The same where only clocks tell cores apart, which understates the difference."""


@dataclass(frozen=True, slots=True)
class Core:
    """One logical processor as Linux numbers it; 0: the kernel does not say."""

    core_id: int
    capacity: int = 0
    """`cpu_capacity`, 1024 for the strongest."""
    max_khz: int = 0
    """`cpufreq/cpuinfo_max_freq`."""
    siblings: tuple[int, ...] = ()
    """Hardware threads of the same physical core, this one among them."""
    is_small: bool = False
    """Whether Linux lists it as an efficiency core."""


@dataclass(frozen=True)
class Cores:
    """The usable cores of a machine, ascending."""

    usable: tuple[Core, ...]
    num_online: int
    """Of the whole machine."""
    offline: tuple[int, ...] = ()
    quota: float | None = None
    """Cores' worth of time the cgroups allow; None: all."""

    @cached_property
    def ids(self) -> tuple[int, ...]:
        """Numbers of the usable cores."""
        return tuple(core.core_id for core in self.usable)

    @cached_property
    def kinds(self) -> tuple[tuple[int, ...], ...]:
        """Cores that are alike, the strongest kind first."""
        strength, small = self._strength, {c.core_id for c in self.usable if c.is_small}
        kinds: list[list[int]] = []
        for core in sorted(self.ids, key=lambda i: (i in small, -strength[i], i)):
            first = kinds[-1][0] if kinds else core
            is_alike = strength[core] >= ALIKE * strength[first]
            if kinds and is_alike and (core in small) == (first in small):
                kinds[-1].append(core)
            else:
                kinds.append([core])
        return tuple(tuple(sorted(kind)) for kind in kinds)

    @cached_property
    def _told_by(self) -> str:
        """What tells cores apart: capacities, else clocks; empty where neither does."""
        for name in ("capacity", "max_khz"):
            found = {getattr(core, name) for core in self.usable}
            if len(found) > 1 and min(found) > 0:
                return name
        return ""

    @cached_property
    def _strength(self) -> dict[int, float]:
        """Of each core, by the strongest; 1 where nothing tells them apart."""
        name = self._told_by
        figures = {core.core_id: getattr(core, name) if name else 1 for core in self.usable}
        most = max(figures.values())
        return {core: figure / most for core, figure in figures.items()}

    @cached_property
    def fast(self) -> tuple[int, ...]:
        """Cores near the strongest, each hardware thread of them."""
        least = FAST_CAPACITY if self._told_by == "capacity" else FAST_CLOCK
        small = {core.core_id for core in self.usable if core.is_small}
        if len(small) == len(self.usable):  # confined to efficiency cores: they are what there is
            small = set()
        others = [core for core in self.ids if core not in small]
        least *= max(self._strength[core] for core in others)
        return tuple(core for core in others if self._strength[core] >= least)

    @cached_property
    def primary(self) -> frozenset[int]:
        """One usable hardware thread of each physical core, the lowest."""
        usable = set(self.ids)
        return frozenset(min(usable & {c.core_id, *c.siblings}) for c in self.usable)

    def with_siblings(self, cores: Collection[int]) -> set[int]:
        """These, and the other hardware threads of their physical cores."""
        found = [core.siblings for core in self.usable if core.core_id in cores]
        return {*cores, *(core for siblings in found for core in siblings)}

    @cached_property
    def order(self) -> tuple[int, ...]:
        """All usable cores: physical ones, the strongest kind first, then second threads."""
        by_kind = [core for kind in self.kinds for core in kind]
        return tuple(sorted(by_kind, key=lambda core: core not in self.primary))

    @cached_property
    def usual(self) -> tuple[int, ...]:
        """Those to compute on if nobody says otherwise: fast ones, one thread of each."""
        fast = set(self.fast)
        return tuple(core for core in self.order if core in fast and core in self.primary)

    def chosen(self, named: Collection[int] = ()) -> tuple[int, ...]:
        """The cores `named`, strongest first; without names the usual ones."""
        return tuple(core for core in self.order if core in named) if named else self.usual

    def num_workers(self, named: Collection[int] = ()) -> int:
        """Executors to compute with if nobody says how many: a core each, within the quota."""
        return self._within_quota(len(self.chosen(named)))

    def worker_counts(self, named: Collection[int] = ()) -> tuple[int, ...]:
        """Numbers of executors at which another kind of core begins to take part, ascending."""
        if named:
            return (self.num_workers(named),)
        kind_of = {core: index for index, kind in enumerate(self.kinds) for core in kind}
        changes = [
            index + 1
            for index, (one, other) in enumerate(pairwise(self.order))
            if kind_of[one] != kind_of[other] or (one in self.primary) != (other in self.primary)
        ]
        counts = {*changes, len(self.order), len(self.usual)}
        return tuple(sorted({self._within_quota(count) for count in counts}))

    def _within_quota(self, count: int) -> int:
        # Rounded up: a container with 1.5 cores' time computes with two executors.
        most = count if self.quota is None else math.ceil(self.quota)
        return max(1, min(count, most))

    @property
    def is_limited(self) -> bool:
        """Whether the cgroups allow less time than there are usable cores."""
        return self.quota is not None and self.quota < len(self.ids)

    def check(self, named: Iterable[int], who: str) -> None:
        """Raise ConfigError that begins with `who` for a core that cannot be used."""
        for core in named:
            if core not in self.ids:
                raise ConfigError(
                    f"{who}: core {core} does not exist or is not allowed here: allowed "
                    f"{show_cores(self.ids)}"
                )


def read_cores(root: Path = Path("/"), allowed: Iterable[int] | None = None) -> Cores:
    """The machine below `root`; `allowed`: where this process may run, by default as /proc says.

    A file that is missing or makes no sense counts as one that says nothing.
    """
    listed = text_of(root / "proc/self/status")
    match = re.search(r"^Cpus_allowed_list:\s*(\S+)$", listed, re.MULTILINE)
    online = set(_listed(text_of(root / f"{CPUS}/online")))
    usable = set(_listed(match.group(1) if match else "") if allowed is None else allowed)
    usable = usable or online or {0}
    for limit in (online, *(set(_listed(text)) for text in cpuset_lists(root))):
        usable = usable & limit or usable  # a limit that leaves nothing is a misread one
    small = set(_listed(text_of(root / SMALL_CORES)))
    offline = _listed(text_of(root / f"{CPUS}/offline"))
    present = set(_listed(text_of(root / f"{CPUS}/present")))
    return Cores(
        tuple(_read_core(root, core, core in small) for core in sorted(usable)),
        max(len(online), len(usable)),
        tuple(core for core in offline if core in present),  # others are places for cores
        cpu_quota(root),
    )


def this_machine() -> Cores:
    """The cores this process may run on now."""
    return read_cores(Path("/"), os.sched_getaffinity(0))


def _read_core(root: Path, core: int, is_small: bool) -> Core:
    folder = root / f"{CPUS}/cpu{core}"
    siblings = _listed(text_of(folder / "topology/thread_siblings_list"))
    return Core(
        core,
        _figure(folder / "cpu_capacity"),
        _figure(folder / "cpufreq/cpuinfo_max_freq"),
        siblings if core in siblings else (core,),
        is_small,
    )


def _figure(path: Path) -> int:
    text = text_of(path)
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 16 else 0


def _listed(text: str) -> tuple[int, ...]:
    """The kernel's list, or none where it makes no sense."""
    try:
        return parse_core_list(text)
    except ValueError:
        return ()


def parse_core_list(text: str) -> tuple[int, ...]:
    """Cores of a list such as `0-3,8`, ascending; ValueError if it is none."""
    cores: set[int] = set()
    for part in text.split(",") if text else []:
        match = re.fullmatch(r"\s*(\d{1,4})(?:-(\d{1,4}))?\s*", part, re.ASCII)
        if match is None:
            raise ValueError(f"{part!r} is no core and no range of cores")
        first = int(match.group(1))
        last = int(match.group(2) or first)
        if last < first or last >= MAX_CORES:
            raise ValueError(f"{part!r} is no range of cores")
        cores.update(range(first, last + 1))
    return tuple(sorted(cores))


def show_cores(cores: Iterable[int]) -> str:
    """Cores as a list such as `0-3,8`."""
    runs: list[list[int]] = []
    for core in sorted(cores):
        if runs and core == runs[-1][-1] + 1:
            runs[-1].append(core)
        else:
            runs.append([core])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
