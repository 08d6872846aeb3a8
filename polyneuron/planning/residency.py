"""Which feed-forward weights stay in memory where not all of them fit (DESIGN §5)."""

from __future__ import annotations

from polyneuron.config import FeedForwardMode
from polyneuron.planning.bundles import NeuronRows, Residency


def choose_residency(
    rows: NeuronRows,
    mode: FeedForwardMode,
    num_layers: int,
    room: int,
    hot_clusters: int = 0,
    num_tokens: int = 1,
) -> Residency:
    """What to keep in `room` bytes, when not everything fits.

    Deciding rows come first: without them a layer must be read whole for every token. The cold
    region holds at least what a layer of a decode step uses, so a step always finds slots.
    """
    if rows.has_experts:
        return _expert_residency(rows, num_layers, room, rows.least_slots(num_tokens))
    if mode is FeedForwardMode.DENSE:
        return Residency(max(0, min(num_layers, room // rows.resident_bytes)))
    if mode is FeedForwardMode.PREDICTED:
        return _predicted_residency(rows, num_layers, room, hot_clusters)
    if room >= num_layers * rows.resident_bytes:
        return Residency(num_layers)
    least = rows.num_neurons * rows.slot_bytes
    num_resident = min(num_layers, max(0, room - least) // rows.decide_bytes)
    if num_resident == 0:
        return Residency(0)
    slots = (room - num_resident * rows.decide_bytes) // rows.slot_bytes
    return Residency(num_resident, min(slots, num_resident * rows.num_neurons))


def _expert_residency(rows: NeuronRows, num_layers: int, room: int, least: int) -> Residency:
    """Everything, or slots of whole clusters."""
    slots = room // rows.kept_bytes
    if slots >= num_layers * rows.num_kept:
        return Residency(num_layers, 0, rows.num_clusters)
    return Residency(num_layers, max(least, slots))


def _predicted_residency(
    rows: NeuronRows, num_layers: int, room: int, hot_clusters: int
) -> Residency:
    """Everything, or as many hot clusters as are wanted and have room, and slots in the rest."""
    slot_bytes, least = rows.whole().slot_bytes, rows.num_neurons
    slots = room // slot_bytes
    if slots >= num_layers * rows.num_neurons:
        return Residency(num_layers, 0, rows.num_clusters)
    pinned = min(hot_clusters, rows.num_clusters - 1)
    pinned = max(0, min(pinned, (slots - least) // (num_layers * rows.cluster_neurons)))
    slots = max(least, slots - num_layers * pinned * rows.cluster_neurons)
    return Residency(num_layers, slots, pinned)
