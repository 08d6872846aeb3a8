"""How much of a model its tokens use, from the counters in the arena."""

from __future__ import annotations

from dataclasses import dataclass

from polyneuron.kernels.arena import Arena
from polyneuron.planning.layout import ArenaLayout


@dataclass(frozen=True, slots=True)
class LayerActivity:
    """One layer's decode steps so far; shares are of its neurons, means over the tokens.

    The decode program computes generated tokens, and the tokens of a prompt whose chunks are as
    short as a decode step; those of longer chunks are not counted.
    """

    tokens: int
    gated_share: float
    """The value that decides (gate, or up where there is none) is above zero: its up and down rows
    are needed. Counted in dense mode too."""
    predicted_share: float
    """A predictor named it: its gate was computed. Hot clusters are not predicted."""
    active_share: float
    """The product that meets the down matrix is not zero; in dense mode every neuron counts."""


def layer_activity(arena: Arena, layout: ArenaLayout) -> list[LayerActivity]:
    """How many neurons of each layer decode steps activated so far; empty of tiles."""
    if layout.bundles is None:
        return []
    activities = []
    for index in range(len(layout.bundles.layers)):
        counts = arena.layer_activity(layout.at("boards.activity"), index)
        total = max(1, int(counts.tokens)) * layout.bundles.rows.num_neurons
        shares = (counts.gated / total, counts.predicted / total, counts.active / total)
        activities.append(LayerActivity(int(counts.tokens), *shares))
    return activities
