"""What a step took and did, from the counters and the trace records in the arena."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from polyneuron.actors.trace_records import RecordSpool
from polyneuron.kernels.arena import Arena
from polyneuron.kernels.neuron_cache import NeuronCache
from polyneuron.kernels.trace import DRAIN_RECORDS, TraceRing
from polyneuron.planning.layout import ArenaLayout, num_executors
from polyneuron.timeline import TimelinePart
from polyneuron.timeline_events import Event

REMEMBERED_STEPS = 64
"""Steps whose records may still come: of executors late to leave, and of steps computed again."""
ACTIVITY_WORDS = 8
ACTIVE_WORD, PREDICTED_WORD = 2, 4
"""Places in `struct layer_activity`, in words of 8 bytes."""


def executor_name(index: int, num_workers: int) -> str:
    """The actor that an executor's place is of, as timelines have it."""
    return f"worker.{index}" if index < num_workers else f"npu.{index - num_workers}"


def counted(before: Sequence[int], after: Sequence[int]) -> list[int]:
    """What counters counted in between; one of a replaced executor or cache began at zero."""
    pairs = zip(before, after, strict=True)
    return [now - then if now >= then else now for then, now in pairs]


class StepMeter:
    """Counts from one step to the next, and the records of executors and readers."""

    def __init__(self, arena: Arena, layout: ArenaLayout, path: Path, part: TimelinePart) -> None:
        config = layout.config
        indexes = range(num_executors(config))
        names = [executor_name(index, config.num_workers) for index in indexes]
        self._executors = [arena.executor(index) for index in indexes]
        self._rings = {
            name: TraceRing(arena, layout.at(f"trace.{index}")) for index, name in enumerate(names)
        }
        self._readers = [TraceRing(arena, layout.at(f"trace.{n}")) for n in ("stream", "reads")]
        self._logs = {name: part.logger(name) for name in (*names, "io")}
        num_layers = len(layout.bundles.layers) if layout.bundles else len(layout.sections) - 1
        self._spool = RecordSpool(path, names, num_layers)
        self._steps: dict[int, int] = {}
        self._activity = self._cache = None
        if layout.bundles is not None:
            offset, shape = layout.at("boards.activity"), (num_layers, ACTIVITY_WORDS)
            self._activity = arena.view(offset, shape, np.uint64)
        if layout.has_neuron_cache:
            self._cache = NeuronCache(arena.address + layout.at("boards.cache"))
        self._before = self._counts()
        self._cache_before = self._cache_counts()

    def opened(self, step_seq: int, step: int, *, want_reads: bool) -> None:
        """A step is about to be rung under this number."""
        if not self._steps:  # what start-up read into the cache is of no step
            self._cache_before = self._cache_counts()
        self._steps[step_seq] = step
        while len(self._steps) > REMEMBERED_STEPS:
            del self._steps[next(iter(self._steps))]
        for ring in self._readers:
            ring.want_reads(step_seq if want_reads else 0)

    def drain(self) -> None:
        """Take all records there are; says how many were overwritten before that."""
        rings = [*self._rings.items(), *(("io", ring) for ring in self._readers)]
        for name, ring in rings:
            count = DRAIN_RECORDS
            while count == DRAIN_RECORDS:
                records = ring.drain()
                count = len(records)
                if count:
                    self._spool.write(records, self._steps)
            if lost := ring.take_lost():
                self._logs[name].emit(Event.LOST, records=lost)

    def take(self) -> dict[str, int | None]:
        """Executors' times and neurons since the last call, as keys of a step."""
        before, self._before = self._before, self._counts()
        counts = counted(before, self._before)
        num = len(self._executors)
        has_activity = self._activity is not None
        return {
            "compute_ns": sum(counts[:num]),
            "wait_ns": sum(counts[num : 2 * num]),
            "active": counts[-2] if has_activity else None,
            "predicted": counts[-1] if has_activity else None,
        }

    def _counts(self) -> list[int]:
        compute = [int(executor.kernel_ns) for executor in self._executors]
        waits = [int(executor.wait_ns) for executor in self._executors]
        neurons = [0, 0]
        if self._activity is not None:
            totals = self._activity.sum(axis=0)
            neurons = [int(totals[ACTIVE_WORD]), int(totals[PREDICTED_WORD])]
        return compute + waits + neurons

    def residency(self) -> dict[str, int] | None:
        """What the neuron cache took in and gave up since the last call; None without one."""
        if self._cache is None:
            return None
        before, self._cache_before = self._cache_before, self._cache_counts()
        counts = counted(before, self._cache_before)
        return {
            "admitted": counts[0], "evicted": counts[1],
            "resident": self._cache.counters().num_resident, "slots": self._cache.sizes().num_slots,
        }  # fmt: skip

    def _cache_counts(self) -> list[int]:
        if self._cache is None:
            return []
        counters = self._cache.counters()
        return [counters.misses, counters.evictions]

    def close(self) -> None:
        """Take what is left."""
        self.drain()
        self._spool.close()
