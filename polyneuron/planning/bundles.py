"""Neuron-major layers in the arena: rows that stay, are cached, or pass through (DESIGN §5).

A neuron is decided by its gate row, or by its up row where the family has no gate. A resident layer
keeps its deciding rows as tiles; its other rows lie in slots, all of them (hot) or those that were
needed lately (cached). A streamed layer passes through the stage buffers piece by piece.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from polyneuron.config import FeedForwardMode, Phase
from polyneuron.errors import UnsupportedError
from polyneuron.io.expert_pieces import ExpertPieces
from polyneuron.io.ncf_format import (
    BUNDLE_ALIGN,
    PAGE_BYTES,
    BundleShape,
    NcfManifest,
    NcfSection,
    NcfTensor,
    round_up,
)
from polyneuron.kernels.quant import TILE_ROWS, StorageType, num_tiles, tile_bytes

CLUSTERS_PER_LAYER = 32
"""About so many tasks a layer: enough to share among cores, few enough partial sums to merge."""
MAX_CLUSTER_NEURONS = 1024  # as in engine_api.h
PIECE_BYTES = 8 << 20
"""About so much of a layer passes through the stage at once."""
CACHE_LINE_BYTES = 64


class RowsAre(StrEnum):
    """Where a layer's rows are while tokens are computed."""

    HOT = "hot"
    CACHED = "cached"
    STREAMED = "streamed"
    WHOLE = "whole"
    """Whole bundles, deciding rows among them: pinned clusters, and others in slots."""

    @property
    def passes_through(self) -> bool:
        """Whether nothing of the layer stays."""
        return self is RowsAre.STREAMED


@dataclass(frozen=True, slots=True, kw_only=True)
class NeuronRows:
    """How one neuron's rows lie in its bundle, and which part of it a slot holds; in bytes."""

    num_neurons: int
    cols: int
    bundle_bytes: int
    decide_type: StorageType
    up_type: StorageType
    down_type: StorageType
    decide_row: int
    up_row: int
    down_row: int
    read_begin: int
    """A slot holds the bundle from here on: what is not needed to decide."""
    slot_bytes: int
    """Of one neuron."""
    num_experts: int = 1
    num_used: int = 1
    """Experts of a token; their neurons follow each other."""
    is_named: bool = False
    """With experts: whether predictors name neurons of chosen ones, so that slots hold neurons."""

    @property
    def has_experts(self) -> bool:
        """Whether a token computes some experts only; then slots hold whole clusters."""
        return self.num_experts > 1

    @property
    def keeps_clusters(self) -> bool:
        """Whether experts are kept and computed cluster by cluster."""
        return self.has_experts and not self.is_named

    @property
    def expert_neurons(self) -> int:
        """Neurons of one expert."""
        return self.num_neurons // self.num_experts

    @property
    def slot_neurons(self) -> int:
        """Neurons that a slot of the cache holds."""
        return self.cluster_neurons if self.keeps_clusters else 1

    @property
    def num_kept(self) -> int:
        """Of a layer, what may be in the cache or not: neurons, or clusters of experts."""
        return self.num_neurons // self.slot_neurons

    @property
    def kept_bytes(self) -> int:
        """One slot of the cache."""
        return self.slot_bytes * self.slot_neurons

    def least_slots(self, num_tokens: int) -> int:
        """Slots that a decode step may need at once: those of one layer."""
        if not self.has_experts:
            return self.num_neurons
        experts = min(self.num_experts, self.num_used * num_tokens)
        return experts * self.expert_neurons // self.slot_neurons

    @property
    def cluster_neurons(self) -> int:
        """Neurons of one task; part of the summation order, so it depends on the model alone.

        With experts about 32 tasks are a token's, and each is a whole part of an expert.
        """
        if self.has_experts:
            tiles = self.expert_neurons // TILE_ROWS
            wanted = -(-self.num_used * tiles // CLUSTERS_PER_LAYER)
            most = min(wanted, MAX_CLUSTER_NEURONS // TILE_ROWS)
            return TILE_ROWS * max(n for n in range(1, most + 1) if tiles % n == 0)
        wanted = round_up(-(-self.num_neurons // CLUSTERS_PER_LAYER), TILE_ROWS)
        return min(wanted, MAX_CLUSTER_NEURONS)

    @property
    def num_clusters(self) -> int:
        """Clusters of a layer."""
        return -(-self.num_neurons // self.cluster_neurons)

    @property
    def decide_tile_bytes(self) -> int:
        """One tile of deciding rows."""
        return tile_bytes(self.decide_type, self.cols)

    @property
    def decide_bytes(self) -> int:
        """A layer's deciding rows as tiles."""
        return num_tiles(self.num_neurons) * self.decide_tile_bytes

    @property
    def scratch_bytes(self) -> int:
        """What an executor needs to turn rows into tiles."""
        return self.decide_tile_bytes + tile_bytes(self.up_type, self.cols)

    @property
    def resident_bytes(self) -> int:
        """A whole layer in memory."""
        decide = 0 if self.has_experts else self.decide_bytes
        return decide + self.num_neurons * self.slot_bytes

    @property
    def piece_neurons(self) -> int:
        """Neurons that pass through a stage buffer together: whole clusters."""
        cluster_bytes = self.cluster_neurons * self.bundle_bytes
        return self.cluster_neurons * max(1, PIECE_BYTES // cluster_bytes)

    @property
    def piece_bytes(self) -> int:
        """The longest piece."""
        return round_up(min(self.piece_neurons, self.num_neurons) * self.bundle_bytes, PAGE_BYTES)

    def pieces(self, begin: int = 0) -> list[range]:
        """The neurons of each piece, from neuron `begin` on."""
        step = self.piece_neurons
        return [
            range(first, min(first + step, self.num_neurons))
            for first in range(begin, self.num_neurons, step)
        ]

    def neurons_in(self, num_clusters: int) -> int:
        """Neurons of a layer's first clusters."""
        return min(num_clusters * self.cluster_neurons, self.num_neurons)

    def whole(self) -> NeuronRows:
        """The same bundles in slots that hold the deciding row too."""
        return replace(self, read_begin=0, slot_bytes=self.read_begin + self.slot_bytes)


def neuron_rows(manifest: NcfManifest, mode: FeedForwardMode = FeedForwardMode.DENSE) -> NeuronRows:
    """The rows of a file in bundles; UnsupportedError when its layers are not alike."""
    is_named = bool(manifest.spec.get("experts")) and mode is FeedForwardMode.PREDICTED
    layers = [_layer_rows(manifest, index, is_named) for index in range(1, len(manifest.sections))]
    if any(rows != layers[0] for rows in layers):
        raise UnsupportedError(
            "the feed-forward layers are stored in different types, which bundles cannot be run "
            "with: convert the model with --layout tiles"
        )
    return layers[0]


def _layer_rows(manifest: NcfManifest, section_index: int, is_named: bool) -> NeuronRows:
    shape = manifest.sections[section_index].bundles
    assert shape is not None
    tensors = {t.role: t for t in manifest.tensors if t.section_index == section_index}
    up, down = tensors["ffn_up"], tensors["ffn_down"]
    decide = tensors.get("ffn_gate", up)
    begin = shape.down_offset if shape.gate_offset is None else shape.up_offset
    experts = manifest.spec.get("experts")
    begin = 0 if experts else begin // BUNDLE_ALIGN * BUNDLE_ALIGN
    return NeuronRows(
        num_neurons=shape.num_neurons,
        cols=up.cols,
        bundle_bytes=shape.bundle_bytes,
        decide_type=_storage(decide),
        up_type=_storage(up),
        down_type=_storage(down),
        decide_row=shape.up_offset if shape.gate_offset is None else shape.gate_offset,
        up_row=shape.up_offset,
        down_row=shape.down_offset,
        read_begin=begin,
        slot_bytes=shape.bundle_bytes if experts and not is_named else _end(shape, down) - begin,
        num_experts=experts["num_experts"] if experts else 1,
        num_used=experts["num_used"] if experts else 1,
        is_named=is_named,
    )


def _storage(tensor: NcfTensor) -> StorageType:
    assert tensor.storage is not None
    return tensor.storage


def _end(shape: BundleShape, down: NcfTensor) -> int:
    """Where the last row of a bundle ends, in whole sectors."""
    end = shape.down_offset + down.num_bytes // down.rows
    return min(round_up(end, BUNDLE_ALIGN), shape.bundle_bytes)


@dataclass(frozen=True, slots=True)
class Residency:
    """How much of the feed-forward weights stays."""

    num_resident: int
    """Layers in memory: whole, or with their deciding rows when there are cold slots."""
    cold_slots: int = 0
    """Slots that the resident layers' other rows share; 0: those rows are all in memory."""
    pinned_clusters: int = 0
    """Predicted mode: clusters of each layer that stay, from the first on."""


@dataclass(frozen=True, slots=True, eq=False)
class LayerRows:
    """One layer in the arena; offsets are 0 where nothing is."""

    section: NcfSection
    rows_are: RowsAre
    tiles_offset: int
    """Of its deciding rows."""
    rows_offset: int
    """Of its pinned rows."""


@dataclass(frozen=True, slots=True, eq=False)
class BundlePlan:
    """A model's neuron-major layers in the arena."""

    rows: NeuronRows
    mode: FeedForwardMode
    layers: tuple[LayerRows, ...]
    cold_slots: int
    slots_offset: int
    pinned_clusters: int = 0
    """Predicted mode: of each layer, from the first on."""

    @property
    def slot_rows(self) -> NeuronRows:
        """The rows as slots hold them: in predicted mode with the deciding one."""
        return self.rows.whole() if self.is_whole else self.rows

    @property
    def is_predicted(self) -> bool:
        """Whether neurons are named by a predictor."""
        return self.mode is FeedForwardMode.PREDICTED

    @property
    def is_whole(self) -> bool:
        """Whether pinned rows and slots have the deciding row too."""
        return self.is_predicted or self.rows.has_experts

    @property
    def slots_bytes(self) -> int:
        """All slots of the neuron cache."""
        return self.cold_slots * self.slot_rows.kept_bytes

    @property
    def pinned_neurons(self) -> int:
        """Predicted mode: neurons of each layer, from the first on, whose bundles stay."""
        return self.rows.neurons_in(self.pinned_clusters)

    @property
    def resident_bytes(self) -> int:
        """Feed-forward bytes in memory."""
        rows, slots = self.rows, self.slots_bytes
        if self.is_whole:
            return len(self.layers) * self.pinned_neurons * self.slot_rows.slot_bytes + slots
        resident = [layer for layer in self.layers if layer.rows_are is not RowsAre.STREAMED]
        hot = [layer for layer in resident if layer.rows_are is RowsAre.HOT]
        pinned = len(hot) * rows.num_neurons * rows.slot_bytes
        return len(resident) * rows.decide_bytes + pinned + slots

    def is_streamed(self, layer: int, phase: Phase) -> bool:
        """Whether a layer's bundles pass through the stage in that phase."""
        rows_are = self.layers[layer].rows_are
        if phase is Phase.DECODE:
            return rows_are is RowsAre.STREAMED
        is_here = rows_are is RowsAre.HOT or (self.is_whole and not self.cold_slots)
        return not is_here  # a prompt activates nearly every neuron

    def pieces(self) -> list[range]:
        """The neurons of a streamed layer that pass through the stage together."""
        return self.rows.pieces(self.pinned_neurons)

    @property
    def expert_pieces(self) -> ExpertPieces | None:
        """How a prompt's loads are made up of experts; None where there are none."""
        rows = self.rows
        if not rows.has_experts:
            return None
        each = rows.bundle_bytes
        pieces = len(self.pieces())
        return ExpertPieces(pieces, rows.piece_neurons * each, rows.expert_neurons * each)

    def loads(self, phase: Phase) -> tuple[NcfSection, ...]:
        """What passes through the stage in one pass of a phase, piece by piece."""
        return tuple(
            _piece(self.layers[layer].section, self.rows, piece)
            for layer in range(len(self.layers))
            if self.is_streamed(layer, phase)
            for piece in self.pieces()
        )

    def first_load(self, phase: Phase, layer: int) -> int:
        """The stream index of a streamed layer's first piece."""
        before = sum(self.is_streamed(index, phase) for index in range(layer))
        return before * len(self.pieces()) + 1


def _piece(section: NcfSection, rows: NeuronRows, piece: range) -> NcfSection:
    """A run of bundles as a section of its own, without checksums."""
    start = piece.start * rows.bundle_bytes
    num_bytes = min(round_up(len(piece) * rows.bundle_bytes, PAGE_BYTES), section.num_bytes - start)
    name = f"{section.name}[{piece.start}:{piece.stop}]"
    return NcfSection(name, section.kind, section.offset + start, num_bytes, np.zeros(0, np.uint32))


def ring_places(cold_slots: int) -> int:
    """Places of the ring of reads: a power of two, at least one for each slot."""
    return 1 << max(0, cold_slots - 1).bit_length()


def cluster_bytes(rows: NeuronRows) -> int:
    """The decode ops' lists: work of each cluster, active neurons and places of their rows."""
    padded = rows.num_clusters * rows.cluster_neurons
    return rows.num_clusters * CACHE_LINE_BYTES + 2 * 4 * padded


def spread(num_layers: int, num_resident: int) -> Sequence[int]:
    """Which layers are not resident: spread evenly, so that reads and computing overlap evenly."""
    others = num_layers - num_resident
    return [
        layer
        for layer in range(num_layers)
        if (layer + 1) * others // num_layers > layer * others // num_layers
    ]
