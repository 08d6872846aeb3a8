"""Which actor keeps to which cores (PAPER §1.14)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from polyneuron.config import EngineConfig
from polyneuron.cores import Cores, show_cores, this_machine

Places = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class CoreUse:
    """Cores of each executor and of the reader; none: anywhere the process may run."""

    workers: Places
    """Of each CPU worker; executors share no core as long as there are enough."""
    prefill: Places
    """Of each thread of the NPU executor."""
    reader: tuple[int, ...]
    """Of the I/O actor while tokens are computed."""
    note: str = ""
    """What a person should know about them; empty where each core has its worker."""

    def as_dict(self) -> dict[str, Any]:
        """The same as data."""
        return {
            "workers": [list(cores) for cores in self.workers],
            "prefill": [list(cores) for cores in self.prefill],
            "reader": list(self.reader),
        }


def place(cores: Cores, config: EngineConfig, *, reads: bool) -> CoreUse:
    """Cores for a resolved configuration; `reads`: whether the file is read while it runs.

    The reader gets the first of `config.io_cores` without a worker, of all with one the first;
    where none are named, a fast core without a worker, if there is one.
    """
    named = set(config.cores)
    order = cores.chosen(named) if named else cores.order
    wanted = [core for core in config.io_cores if core in order] if reads else []
    if wanted:  # who reads best keeps out of the work where fewer fast cores than there are work
        order = _last_of_usual(order, wanted[0], cores)
    workers = _places(order, config.num_workers, named)
    busy = cores.with_siblings({core for place in workers for core in place})
    spare = [core for core in order if core in cores.usual and core not in busy] if reads else []
    free = [core for core in wanted if core not in busy]
    reader = tuple((free or wanted or spare)[:1]) or tuple(sorted(named))
    prefill = _places(order, config.num_npu_threads, named)
    use = CoreUse(workers, prefill, reader)
    return replace(use, note=_note(cores, use, is_named=bool(named), reads=reads))


def place_here(config: EngineConfig, *, reads: bool) -> CoreUse:
    """`place` on the machine this runs on."""
    return place(this_machine(), config, reads=reads)


def _last_of_usual(order: Sequence[int], core: int, cores: Cores) -> tuple[int, ...]:
    """The order with `core` behind the others that usually compute."""
    usual = [each for each in order if each in cores.usual]
    if core not in usual:
        return tuple(order)
    others = [each for each in usual if each != core]
    return (*others, core, *(each for each in order if each not in usual))


def _places(order: Sequence[int], count: int, named: set[int]) -> Places:
    """A core each; those that are too many go anywhere among the named cores."""
    anywhere = tuple(sorted(named))
    return tuple((order[i],) if i < len(order) else anywhere for i in range(count))


def _note(cores: Cores, use: CoreUse, *, is_named: bool, reads: bool) -> str:
    """Told where it is not simply a worker on each core."""
    parts = []
    if is_named or len(cores.usual) < len(cores.ids):
        on = sorted({core for place in use.workers for core in place})
        parts.append(f"on {'core' if len(on) == 1 else 'cores'} {show_cores(on)}")
    if cores.is_limited:
        parts.append(f"time for {cores.quota:g} of {len(cores.ids)} cores")
    if reads and len(use.reader) == 1:
        parts.append(f"reader on core {use.reader[0]}")
    return ", ".join(parts)
