"""Gives the layers of a file in bundles their places in the arena: hot, cold, stage."""

from __future__ import annotations

from polyneuron.config import FeedForwardMode
from polyneuron.io.ncf_format import NcfManifest, NcfSection
from polyneuron.planning.allocator import Allocator
from polyneuron.planning.bundles import (
    BundlePlan,
    LayerRows,
    NeuronRows,
    Residency,
    RowsAre,
    spread,
)

NUM_BUFFERS = 3
"""Stage buffers: one computed, one landed or landing, one landing."""


def place_bundles(
    allocator: Allocator,
    manifest: NcfManifest,
    rows: NeuronRows,
    mode: FeedForwardMode,
    residency: Residency,
) -> BundlePlan:
    """Take the runs that a residency needs."""
    sections = manifest.sections[1:]
    if mode is FeedForwardMode.PREDICTED or rows.has_experts:
        return _place_whole(allocator, sections, rows, mode, residency)
    streamed = spread(len(sections), residency.num_resident)
    pinned = 0 if residency.cold_slots else rows.num_neurons * rows.slot_bytes
    resident = [i for i in range(len(sections)) if i not in streamed]
    parts = [(f"tiles.{i}", rows.decide_bytes) for i in resident]
    allocator.region("hot", parts + [(f"rows.{i}", pinned) for i in resident if pinned])
    slots = _place_cold(allocator, rows, residency, bool(streamed or residency.cold_slots))
    layers = []
    for index, section in enumerate(sections):
        if index in streamed:
            layers.append(LayerRows(section, RowsAre.STREAMED, 0, 0))
            continue
        tiles = allocator.at(f"hot.tiles.{index}")
        if pinned:
            offset = allocator.at(f"hot.rows.{index}")
            layers.append(LayerRows(section, RowsAre.HOT, tiles, offset))
        else:
            layers.append(LayerRows(section, RowsAre.CACHED, tiles, 0))
    return BundlePlan(rows, mode, tuple(layers), residency.cold_slots, slots)


def _place_whole(
    allocator: Allocator,
    sections: tuple[NcfSection, ...],
    rows: NeuronRows,
    mode: FeedForwardMode,
    residency: Residency,
) -> BundlePlan:
    """Whole bundles: pinned clusters of every layer, the others in slots."""
    whole = rows.whole()
    num_bytes = rows.neurons_in(residency.pinned_clusters) * whole.slot_bytes
    allocator.region("hot", [(f"rows.{i}", num_bytes) for i in range(len(sections)) if num_bytes])
    slots = _place_cold(allocator, whole, residency, bool(residency.cold_slots))
    layers = [
        LayerRows(section, RowsAre.WHOLE, 0, allocator.at(f"hot.rows.{index}") if num_bytes else 0)
        for index, section in enumerate(sections)
    ]
    return BundlePlan(
        rows, mode, tuple(layers), residency.cold_slots, slots, residency.pinned_clusters
    )


def _place_cold(
    allocator: Allocator, rows: NeuronRows, residency: Residency, needs_stage: bool
) -> int:
    """The slots of the neuron cache and the stage; returns where the slots begin."""
    allocator.region("cold", [("slots", residency.cold_slots * rows.kept_bytes)])
    buffers = NUM_BUFFERS if needs_stage else 0
    allocator.region("stage", [(str(i), rows.piece_bytes) for i in range(buffers)])
    return allocator.at("cold.slots")
