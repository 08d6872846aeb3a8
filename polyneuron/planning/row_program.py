"""Ops of feed-forward blocks whose weights lie neuron by neuron (`neuron_ops.c`).

Few tokens (decode): clusters are tasks; late ones wait for their rows; partial sums are merged.
Many tokens (prefill): runs of neurons as tiles, then their down rows token by token. Both add in
one order, so a token's result does not depend on which of them computed it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from polyneuron.config import Phase
from polyneuron.io.predictor_file import PredictorInput
from polyneuron.kernels.arena import OpFlag, OpKind
from polyneuron.planning.bundles import BundlePlan, RowsAre
from polyneuron.planning.layout import WeightPlace
from polyneuron.planning.neuron_runs import (
    cache_fields,
    decode_fields,
    extent,
    row_reader,
    runs_of,
    shared_fields,
)
from polyneuron.planning.predict_program import (
    add_late_prediction,
    add_predicted_clusters,
    add_predictor,
    predictor_readers,
)

if TYPE_CHECKING:
    from polyneuron.planning.step_program import Compiler


def row_readers(compiler: Compiler, bundles: BundlePlan, layer: int) -> list[WeightPlace]:
    """What reads feed forward's norm: rows, and a predictor there."""
    rows = bundles.rows
    readers = [row_reader(compiler, storage) for storage in (rows.decide_type, rows.up_type)]
    return readers + predictor_readers(compiler, layer, PredictorInput.FFN)


def add_row_feed_forward(compiler: Compiler, bundles: BundlePlan, layer: int) -> None:
    """Append a layer's norm and feed-forward ops."""
    compiler.ffn_norm(layer, row_readers(compiler, bundles, layer))
    add_predictor(compiler, layer, PredictorInput.FFN)
    if compiler.phase is Phase.PREFILL:
        _add_prefill(compiler, bundles, layer)
    else:
        _add_decode(compiler, bundles, layer)


def _add_decode(compiler: Compiler, bundles: BundlePlan, layer: int) -> None:
    shared = decode_fields(compiler, bundles, layer)
    if bundles.is_predicted:
        add_late_prediction(compiler, layer)
        add_predicted_clusters(compiler, bundles, layer, shared)
    else:
        _add_clusters(compiler, bundles, layer, shared)
    bias = compiler.vector(f"blk.{layer}.ffn_down.bias")
    merge = shared | compiler.buffer("stream") | {"bias": bias, "rows": bundles.rows.num_neurons}
    if bundles.cold_slots and not compiler.layout.config.keep_neurons and bundles.is_predicted:
        merge |= {"flags": OpFlag.FORGET, "cache": compiler.layout.at("boards.cache")}
    compiler.add(kind=OpKind.MERGE, **merge)


def _add_clusters(
    compiler: Compiler, bundles: BundlePlan, layer: int, shared: dict[str, Any]
) -> None:
    is_cached = bundles.layers[layer].rows_are is RowsAre.CACHED
    shared = shared | (cache_fields(compiler) if is_cached else {})
    for index, (neurons, load, rows) in enumerate(runs_of(compiler, bundles, layer)):
        values = shared | rows | {"rows": len(neurons), "first_neuron": neurons.start}
        values["flags"] |= OpFlag.STREAM_LAST if load else 0
        compiler.add(
            kind=OpKind.CLUSTERS, together=index > 0, stream_index=load, **values,
        )  # fmt: skip
        if is_cached:
            compiler.add(kind=OpKind.LATE_CLUSTERS, **values)


def _add_prefill(compiler: Compiler, bundles: BundlePlan, layer: int) -> None:
    layout, unit = compiler.layout, compiler.dense_unit
    shared = shared_fields(compiler, bundles, layer) | {"unit": unit}
    source = compiler.source(compiler.ffn_input, row_reader(compiler, bundles.rows.decide_type))
    runs = runs_of(compiler, bundles, layer)
    down_bias = compiler.vector(f"blk.{layer}.ffn_down.bias")
    for index, (neurons, load, rows) in enumerate(runs):
        values = shared | rows | extent(neurons) | {"stream_index": load}
        compiler.add(kind=OpKind.ROWS_UP, **values | source | compiler.buffer("hidden"))
        flags = values["flags"] | (OpFlag.STREAM_LAST if load else 0)
        flags |= OpFlag.FIRST_ROWS if index == 0 else 0
        flags |= OpFlag.LAST_ROWS if index == len(runs) - 1 else 0
        down = {"flags": flags, "bias": down_bias, "partials": layout.at("activations.total")}
        streams = compiler.buffer("hidden", "in") | compiler.buffer("stream")
        compiler.add(kind=OpKind.ROWS_DOWN, **values | down | streams)
