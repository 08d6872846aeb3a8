"""What the ops over neuron-major rows have in common: where rows lie, and the fields all need."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from polyneuron.config import FeedForwardMode
from polyneuron.kernels.arena import OpFlag
from polyneuron.planning.bundles import BundlePlan, LayerRows, NeuronRows, RowsAre
from polyneuron.planning.layout import LAYER_ACTIVITY_BYTES, WeightPlace

if TYPE_CHECKING:
    from polyneuron.planning.step_program import Compiler

Run = tuple[range, int, dict[str, Any]]
"""Consecutive neurons, stream index (0: they are here), and the fields that tell where they lie."""


def row_reader(compiler: Compiler, storage: Any) -> WeightPlace:
    """Stands for a matrix that reads the normed rows."""
    return WeightPlace(storage, 0, compiler.spec.d_model, 0, 0)


def runs_of(compiler: Compiler, bundles: BundlePlan, layer: int) -> list[Run]:
    """The layer's rows in this phase, all neurons in order."""
    is_streamed = bundles.is_streamed(layer, compiler.phase)
    if bundles.is_whole:
        runs = pinned_run(bundles, layer, range(bundles.pinned_neurons))
        return runs + (_streamed(compiler, bundles, layer) if is_streamed else [])
    if is_streamed:
        return _streamed(compiler, bundles, layer)
    everything = range(bundles.rows.num_neurons)
    return [(everything, 0, _slot_rows(bundles, bundles.layers[layer]))]


def _streamed(compiler: Compiler, bundles: BundlePlan, layer: int) -> list[Run]:
    first = bundles.first_load(compiler.phase, layer)
    rows = _bundle_rows(compiler, bundles)
    return [(piece, first + i, rows) for i, piece in enumerate(bundles.pieces())]


def pinned_run(bundles: BundlePlan, layer: int, neurons: range) -> list[Run]:
    """Predicted mode: some of the bundles that stay; nothing of no neurons."""
    rows = bundles.slot_rows
    base = bundles.layers[layer].rows_offset + neurons.start * rows.slot_bytes
    return [(neurons, 0, _rows_at(rows, base))] if neurons else []


def cached_run(compiler: Compiler, bundles: BundlePlan) -> list[Run]:
    """Predicted mode: the neurons whose bundles are in slots of the neuron cache."""
    neurons = range(bundles.pinned_neurons, bundles.rows.num_neurons)
    rows = _rows_at(bundles.slot_rows, bundles.slots_offset)
    return [(neurons, 0, rows | cache_fields(compiler))] if neurons else []


def _slot_rows(bundles: BundlePlan, place: LayerRows) -> dict[str, Any]:
    base = place.rows_offset if place.rows_are is RowsAre.HOT else bundles.slots_offset
    return _rows_at(bundles.rows, base)


def _rows_at(rows: NeuronRows, base: int) -> dict[str, Any]:
    """Rows in slots of their own."""
    begin = rows.read_begin
    return {
        "up_weight": base, "row_stride": rows.slot_bytes,
        "gate_row": max(0, rows.decide_row - begin),
        "up_row": rows.up_row - begin, "down_row": rows.down_row - begin,
    }  # fmt: skip


def _bundle_rows(compiler: Compiler, bundles: BundlePlan) -> dict[str, Any]:
    rows = bundles.rows
    return {
        "up_weight": compiler.layout.at("stage.0"), "row_stride": rows.bundle_bytes,
        "gate_row": rows.decide_row, "up_row": rows.up_row, "down_row": rows.down_row,
    }  # fmt: skip


def shared_fields(compiler: Compiler, bundles: BundlePlan, layer: int) -> dict[str, Any]:
    """Fields that all ops of a layer's rows have."""
    rows, spec, layout = bundles.rows, compiler.spec, compiler.layout
    has_gate = rows.decide_row != rows.up_row
    decide = "ffn_gate" if has_gate else "ffn_up"
    flags = OpFlag.ALL_NEURONS if bundles.mode is FeedForwardMode.DENSE else 0
    if rows.keeps_clusters:
        flags |= OpFlag.WHOLE_CLUSTERS
    bounds = layout.config.bounds
    tiles = 0 if bundles.is_whole else bundles.layers[layer].tiles_offset
    return {
        "layer": layer, "cols": rows.cols, "flags": flags | (OpFlag.GATE_TILES if tiles else 0),
        "weight": tiles, "weight_type": int(rows.decide_type), "up_type": int(rows.up_type),
        "down_type": int(rows.down_type), "activation": int(spec.feed_forward),
        "eps": bounds[layer] if bounds else 0.0,
        "layer_neurons": rows.num_neurons, "cluster_neurons": rows.cluster_neurons,
        "bias": compiler.vector(f"blk.{layer}.{decide}.bias"),
        "up_bias": compiler.vector(f"blk.{layer}.ffn_up.bias") if has_gate else 0,
        "activity": layout.at("boards.activity") + layer * LAYER_ACTIVITY_BYTES,
    }  # fmt: skip


def decode_fields(compiler: Compiler, bundles: BundlePlan, layer: int) -> dict[str, Any]:
    """Those of the ops for a few tokens."""
    layout = compiler.layout
    source = compiler.source(compiler.ffn_input, row_reader(compiler, bundles.rows.decide_type))
    return shared_fields(compiler, bundles, layer) | source | compiler.buffer("hidden") | {
        "clusters": layout.at("activations.clusters"), "partials": layout.at("activations.partials")
    }  # fmt: skip


def cache_fields(compiler: Compiler) -> dict[str, Any]:
    """Of ops that look rows up."""
    layout = compiler.layout
    return {"cache": layout.at("boards.cache"), "reads": layout.at("boards.reads")}


def extent(neurons: range) -> dict[str, Any]:
    """Which neurons an op computes."""
    return {"rows": len(neurons), "first_neuron": neurons.start}
