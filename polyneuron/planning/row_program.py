"""Ops of feed-forward blocks whose weights lie neuron by neuron (`neuron_ops.c`).

Few tokens (decode): clusters are tasks; late ones wait for their rows; partial sums are merged.
Many tokens (prefill): runs of neurons as tiles, then their down rows token by token. Both add in
one order, so a token's result does not depend on which of them computed it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from polyneuron.config import FeedForwardMode, Phase
from polyneuron.kernels.arena import OpFlag, OpKind
from polyneuron.planning.bundles import BundlePlan, LayerRows, RowsAre
from polyneuron.planning.layout import LAYER_ACTIVITY_BYTES, WeightPlace

if TYPE_CHECKING:
    from polyneuron.planning.step_program import Compiler


def add_row_feed_forward(compiler: Compiler, bundles: BundlePlan, layer: int) -> None:
    """Append a layer's norm and feed-forward ops."""
    rows = bundles.rows
    readers = [_reader(compiler, storage) for storage in (rows.decide_type, rows.up_type)]
    compiler.norm(layer, f"blk.{layer}.ffn_norm.weight", readers)
    if compiler.phase is Phase.PREFILL:
        _add_prefill(compiler, bundles, layer)
    else:
        _add_decode(compiler, bundles, layer)


def _reader(compiler: Compiler, storage: Any) -> WeightPlace:
    """Stands for a matrix that reads the normed rows."""
    return WeightPlace(storage, 0, compiler.spec.d_model, 0, 0)


def _runs(
    compiler: Compiler, bundles: BundlePlan, layer: int
) -> list[tuple[range, int, dict[str, Any]]]:
    """The layer's rows in this phase: neurons, stream index (0: here), where the rows lie."""
    place = bundles.layers[layer]
    if not bundles.is_streamed(layer, compiler.phase):
        everything = range(bundles.rows.num_neurons)
        return [(everything, 0, _slot_rows(bundles, place))]
    first = bundles.first_load(compiler.phase, layer)
    rows = _bundle_rows(compiler, bundles)
    return [(piece, first + i, rows) for i, piece in enumerate(bundles.rows.pieces())]


def _slot_rows(bundles: BundlePlan, place: LayerRows) -> dict[str, Any]:
    rows = bundles.rows
    base = place.rows_offset if place.rows_are is RowsAre.HOT else bundles.slots_offset
    return {
        "up_weight": base, "row_stride": rows.slot_bytes,
        "up_row": rows.up_row - rows.read_begin, "down_row": rows.down_row - rows.read_begin,
    }  # fmt: skip


def _bundle_rows(compiler: Compiler, bundles: BundlePlan) -> dict[str, Any]:
    rows = bundles.rows
    return {
        "up_weight": compiler.layout.at("stage.0"), "row_stride": rows.bundle_bytes,
        "gate_row": rows.decide_row, "up_row": rows.up_row, "down_row": rows.down_row,
    }  # fmt: skip


def _shared(compiler: Compiler, bundles: BundlePlan, layer: int) -> dict[str, Any]:
    """Fields that all ops of a layer's rows have."""
    rows, spec, layout = bundles.rows, compiler.spec, compiler.layout
    has_gate = rows.decide_row != rows.up_row
    decide = "ffn_gate" if has_gate else "ffn_up"
    flags = OpFlag.ALL_NEURONS if bundles.mode is FeedForwardMode.DENSE else 0
    tiles = bundles.layers[layer].tiles_offset
    return {
        "layer": layer, "cols": rows.cols, "flags": flags | (OpFlag.GATE_TILES if tiles else 0),
        "weight": tiles, "weight_type": int(rows.decide_type), "up_type": int(rows.up_type),
        "down_type": int(rows.down_type), "activation": int(spec.feed_forward),
        "layer_neurons": rows.num_neurons, "cluster_neurons": rows.cluster_neurons,
        "bias": compiler.vector(f"blk.{layer}.{decide}.bias"),
        "up_bias": compiler.vector(f"blk.{layer}.ffn_up.bias") if has_gate else 0,
        "activity": layout.at("boards.activity") + layer * LAYER_ACTIVITY_BYTES,
    }  # fmt: skip


def _add_decode(compiler: Compiler, bundles: BundlePlan, layer: int) -> None:
    layout, place = compiler.layout, bundles.layers[layer]
    source = compiler.source("normed", _reader(compiler, bundles.rows.decide_type))
    shared = _shared(compiler, bundles, layer) | source | compiler.buffer("hidden")
    shared |= {
        "clusters": layout.at("activations.clusters"), "partials": layout.at("activations.partials")
    }  # fmt: skip
    if place.rows_are is RowsAre.CACHED:
        shared |= {"cache": layout.at("boards.cache"), "reads": layout.at("boards.reads")}
    for index, (neurons, load, rows) in enumerate(_runs(compiler, bundles, layer)):
        last = OpFlag.STREAM_LAST if load else 0
        values = shared | rows | {"rows": len(neurons), "first_neuron": neurons.start}
        values["flags"] |= last
        compiler.add(
            kind=OpKind.CLUSTERS, together=index > 0, stream_index=load, **values,
        )  # fmt: skip
        if place.rows_are is RowsAre.CACHED:
            compiler.add(kind=OpKind.LATE_CLUSTERS, **values)
    bias = compiler.vector(f"blk.{layer}.ffn_down.bias")
    merge = shared | compiler.buffer("stream") | {"bias": bias, "rows": bundles.rows.num_neurons}
    compiler.add(kind=OpKind.MERGE, **merge)


def _add_prefill(compiler: Compiler, bundles: BundlePlan, layer: int) -> None:
    layout, unit = compiler.layout, compiler.dense_unit
    shared = _shared(compiler, bundles, layer) | {"unit": unit}
    source = compiler.source("normed", _reader(compiler, bundles.rows.decide_type))
    runs = _runs(compiler, bundles, layer)
    down_bias = compiler.vector(f"blk.{layer}.ffn_down.bias")
    for index, (neurons, load, rows) in enumerate(runs):
        values = shared | rows | {
            "rows": len(neurons), "first_neuron": neurons.start, "stream_index": load
        }  # fmt: skip
        compiler.add(kind=OpKind.ROWS_UP, **values | source | compiler.buffer("hidden"))
        flags = values["flags"] | (OpFlag.STREAM_LAST if load else 0)
        flags |= OpFlag.FIRST_ROWS if index == 0 else 0
        flags |= OpFlag.LAST_ROWS if index == len(runs) - 1 else 0
        down = {"flags": flags, "bias": down_bias, "partials": layout.at("activations.total")}
        streams = compiler.buffer("hidden", "in") | compiler.buffer("stream")
        compiler.add(kind=OpKind.ROWS_DOWN, **values | down | streams)
