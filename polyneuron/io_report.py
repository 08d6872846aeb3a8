"""How much of a model its tokens use, from the counters in the arena."""

from __future__ import annotations

from dataclasses import dataclass

from polyneuron.kernels.arena import Arena
from polyneuron.planning.layout import ArenaLayout


@dataclass(frozen=True, slots=True)
class LayerActivity:
    """One layer's decode steps so far."""

    tokens: int
    gated_share: float
    """Of its neurons, those whose gate was not zero."""
    active_share: float
    """Those that reached the down rows: their product was not zero."""


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
