"""What steps read and how long they waited for it, from the counters in the arena."""

from __future__ import annotations

from typing import NamedTuple

from polyneuron.kernels.arena import Arena
from polyneuron.kernels.neuron_cache import NeuronCache
from polyneuron.planning.layout import ArenaLayout


class IoCounters(NamedTuple):
    """Counts over some steps."""

    bytes_read: int = 0
    reads: int = 0
    stall_ns: int = 0
    """Executors' time waiting for weights, summed over executors."""
    hits: int = 0
    """Neurons beyond their gates whose rows were in memory when they were needed."""
    misses: int = 0
    """Those whose rows were not: to be read, or on their way."""

    def plus(self, other: IoCounters) -> IoCounters:
        """Both together."""
        return IoCounters(*(a + b for a, b in zip(self, other, strict=True)))

    @property
    def hit_rate(self) -> float | None:
        """Hits of all neurons needed; None when none went through the neuron cache."""
        used = self.hits + self.misses
        return self.hits / used if used else None


NO_IO = IoCounters()


class IoMeter:
    """Counts from one call to the next, of an arena that something is read into while it runs.

    What is read ahead between steps counts for the step after it.
    """

    def __init__(self, arena: Arena, layout: ArenaLayout) -> None:
        self._stream = arena.layer_stream(layout.at("boards.stream"))
        self._reads = self._cache = None
        if layout.bundles and layout.has_neuron_cache:
            self._reads = arena.neuron_reads(layout.at("boards.reads"))
            self._cache = NeuronCache(arena.address + layout.at("boards.cache"))
            offset, layers = layout.at("boards.activity"), layout.bundles.layers
            self._activities = [arena.layer_activity(offset, i) for i in range(len(layers))]
        self._before = self._totals()

    def take(self) -> IoCounters:
        """What was counted since the last call; a replaced reader or cache begins at zero."""
        before, self._before = self._before, self._totals()
        return IoCounters(
            *(max(0, now - then) for now, then in zip(self._before, before, strict=True))
        )

    def _totals(self) -> IoCounters:
        stream = self._stream
        total = IoCounters(int(stream.bytes_read), int(stream.reads), int(stream.stall_ns))
        if self._reads is None or self._cache is None:
            return total
        stall_ns = sum(int(activity.stall_ns) for activity in self._activities)
        pinned = sum(int(activity.pinned) for activity in self._activities)
        used = self._cache.counters()
        return total.plus(
            IoCounters(
                int(self._reads.bytes_read), int(self._reads.reads), stall_ns,
                used.hits + pinned, used.misses + used.late,
            )
        )  # fmt: skip
