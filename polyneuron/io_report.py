"""How much of a model its tokens use, from the counters in the arena."""

from __future__ import annotations

import math
from dataclasses import dataclass

from polyneuron.config import KvType
from polyneuron.kernels.arena import Arena
from polyneuron.planning.layout import ArenaLayout, num_executors


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


def kv_rms_error(arena: Arena, layout: ArenaLayout) -> float | None:
    """How far keys and values stored so far are off, by rms; None of f16 and before there are any.

    Of every eighth position, over all executors that are attached.
    """
    records = [arena.executor(index) for index in range(num_executors(layout.config))]
    square = sum(float(record.kv_square) for record in records)
    if layout.config.kv_type is KvType.F16 or not square:
        return None
    return math.sqrt(sum(float(record.kv_error) for record in records) / square)


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
