"""What was read and how often it was there already, from the counters in the arena."""

from __future__ import annotations

from dataclasses import dataclass

from polyneuron.config import Phase
from polyneuron.kernels.arena import Arena
from polyneuron.kernels.neuron_cache import NeuronCache
from polyneuron.planning.layout import ArenaLayout


@dataclass(frozen=True, slots=True)
class IoReport:
    """Reading so far; None where nothing was measured."""

    bytes_per_token: float | None = None
    reads_per_token: float | None = None
    stall_ns: int | None = None
    """Executors' time waiting for weights, summed over executors."""
    hit_rate: float | None = None
    """Of the rows of active neurons, those that were in memory when they were needed."""


@dataclass(frozen=True, slots=True)
class LayerActivity:
    """One layer's decode steps so far."""

    tokens: int
    gated_share: float
    """Of its neurons, those whose gate was not zero."""
    active_share: float
    """Those that reached the down rows: their product was not zero."""


def io_report(arena: Arena, layout: ArenaLayout) -> IoReport:
    """What was read for the tokens so far."""
    if not layout.is_streaming:
        return IoReport()
    if layout.has_neuron_cache:
        return _neuron_report(arena, layout)
    stream = arena.layer_stream(layout.at("boards.stream"))
    passes = int(stream.landed) / int(stream.num_loads)
    if not passes:
        return IoReport()
    return IoReport(
        int(stream.bytes_read) / passes, int(stream.reads) / passes, int(stream.stall_ns)
    )


def _neuron_report(arena: Arena, layout: ArenaLayout) -> IoReport:
    """Neurons that were missed, and layers that pass through the stage for every token."""
    tokens, stalls = 0, 0
    for index in range(len(layout.bundles.layers) if layout.bundles else 0):
        activity = arena.layer_activity(layout.at("boards.activity"), index)
        tokens, stalls = max(tokens, int(activity.tokens)), stalls + int(activity.stall_ns)
    if not tokens:
        return IoReport()
    reads = arena.neuron_reads(layout.at("boards.reads"))
    loads = layout.loads(Phase.DECODE)
    streamed = sum(section.num_bytes for section in loads)
    counters = NeuronCache(arena.address + layout.at("boards.cache")).counters()
    used = counters.hits + counters.misses + counters.late
    return IoReport(
        int(reads.bytes_read) / tokens + streamed,
        int(reads.reads) / tokens + len(loads),
        stalls,
        counters.hits / used if used else None,
    )


def layer_activity(arena: Arena, layout: ArenaLayout) -> list[LayerActivity]:
    """How many neurons of each layer decode steps activated so far."""
    if layout.bundles is None:
        return []
    activities = []
    for index in range(len(layout.bundles.layers)):
        counts = arena.layer_activity(layout.at("boards.activity"), index)
        total = max(1, int(counts.tokens)) * layout.bundles.rows.num_neurons
        activities.append(
            LayerActivity(int(counts.tokens), counts.gated / total, counts.active / total)
        )
    return activities
