"""Ops of feed-forward blocks that are mixtures of experts (`neuron_experts.c`, PAPER §1.9).

A router names the experts of each token; their clusters, in predicted mode neurons of theirs, are
looked up, and ordered where they are missing, before anything else of the block is computed. Many
tokens are gathered expert by expert.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from polyneuron.config import Phase
from polyneuron.io.predictor_file import PredictorInput
from polyneuron.kernels.arena import OpFlag, OpKind, RouteKind
from polyneuron.model.spec import ExpertSpec
from polyneuron.planning.bundles import BundlePlan
from polyneuron.planning.layout import WeightPlace
from polyneuron.planning.neuron_runs import (
    cached_run,
    decode_fields,
    extent,
    pinned_run,
    row_reader,
    runs_of,
    shared_fields,
)
from polyneuron.planning.predict_program import (
    add_expert_prediction,
    add_predictor,
    predictor_readers,
)
from polyneuron.planning.tile_program import add_tile_block

if TYPE_CHECKING:
    from polyneuron.planning.step_program import Compiler


def add_expert_feed_forward(compiler: Compiler, bundles: BundlePlan, layer: int) -> None:
    """Append a layer's norm, router, shared expert and experts."""
    rows, prefix = bundles.rows, f"blk.{layer}."
    router = compiler.weight(f"{prefix}ffn_gate_inp.weight")
    readers = [row_reader(compiler, storage) for storage in (rows.decide_type, rows.up_type)]
    shared = compiler.layout.weights.get(f"{prefix}ffn_up_shexp.weight")
    gate = compiler.layout.weights.get(f"{prefix}ffn_gate_inp_shexp.weight")
    readers += [place for place in (shared, gate) if place]
    readers += predictor_readers(compiler, layer, PredictorInput.FFN)
    if _experts(compiler).is_early:
        compiler.ffn_norm(layer, readers)
    else:
        compiler.ffn_norm(layer, [*readers, router])
        _add_router(compiler, layer, router, compiler.source("normed", router))
        _add_route(compiler, layer, bundles)
    values = shared_fields(compiler, bundles, layer) | _route_fields(compiler)
    if compiler.phase is Phase.PREFILL:
        _add_shared(compiler, layer)
        _add_prefill(compiler, bundles, layer, values)
    else:
        add_predictor(compiler, layer, PredictorInput.FFN)
        _add_decode(compiler, bundles, layer, values)


def add_early_router(compiler: Compiler, layer: int) -> None:
    """Before attention, in families whose routers read the layer's input: what is missing of chosen
    experts is read while attention is computed."""
    bundles, experts = compiler.layout.bundles, compiler.spec.experts
    if bundles is None or experts is None or not experts.is_early:
        return
    router = compiler.weight(f"blk.{layer}.ffn_gate_inp.weight")
    source = compiler.buffer("stream", "in")
    if router.takes_acts:
        acts = compiler.buffer("normed_acts", "out_acts")
        compiler.add(kind=OpKind.QUANTIZE, layer=layer, cols=router.cols, **source, **acts)
        source = compiler.buffer("normed_acts", "in")
    _add_router(compiler, layer, router, source)
    _add_route(compiler, layer, bundles)
    if _looks_ahead(compiler, bundles):
        values = shared_fields(compiler, bundles, layer) | _route_fields(compiler)
        values = _decode_values(compiler, bundles, layer, values)
        compiler.add(kind=OpKind.EXPERTS, **values)


def _looks_ahead(compiler: Compiler, bundles: BundlePlan) -> bool:
    """Whether clusters of experts are looked up before attention; predictors come behind it."""
    is_early = _experts(compiler).is_early and compiler.layout.config.lookahead
    return is_early and compiler.phase is Phase.DECODE and not bundles.is_predicted


def _experts(compiler: Compiler) -> ExpertSpec:
    experts = compiler.spec.experts
    assert experts is not None
    return experts


def _route_fields(compiler: Compiler) -> dict[str, Any]:
    """Of all ops that compute chosen experts."""
    return {
        "num_heads": _experts(compiler).num_used,
        "expert_neurons": compiler.spec.d_ff,
        "routes": compiler.layout.at("activations.routes"),
    }


def _add_router(
    compiler: Compiler, layer: int, router: WeightPlace, source: dict[str, Any]
) -> None:
    """Logits of all experts, by the workers: no back end's rounding decides who is chosen."""
    compiler.add(
        kind=OpKind.MATMUL, layer=layer, weight=router.offset, rows=router.rows, cols=router.cols,
        weight_type=int(router.storage or 0), **source, **compiler.buffer("router"),
    )  # fmt: skip


def _add_route(compiler: Compiler, layer: int, bundles: BundlePlan) -> None:
    experts, loads = _experts(compiler), 0
    if bundles.is_streamed(layer, compiler.phase):
        loads = bundles.first_load(compiler.phase, layer) + len(bundles.pieces()) - 1
    kind = RouteKind.NORMALISED if experts.is_normalised else RouteKind.SHARES
    kind = RouteKind.SIGMOID if experts.is_sigmoid else kind
    compiler.add(
        kind=OpKind.ROUTE, layer=layer, unit=compiler.dense_unit, rows=experts.num_experts,
        activation=int(kind), num_kv_heads=loads, **compiler.buffer("router", "in"),
        **_route_fields(compiler),
    )  # fmt: skip


def _add_shared(compiler: Compiler, layer: int) -> None:
    """The expert that every token has; nothing where a family has none."""
    if not _experts(compiler).shared_d_ff:
        return
    prefix, layout = f"blk.{layer}.", compiler.layout
    gate = compiler.weight(f"{prefix}ffn_gate_inp_shexp.weight")
    compiler.add(
        kind=OpKind.SIGMOID, layer=layer, unit=compiler.dense_unit, weight=gate.offset,
        cols=gate.cols, **compiler.buffer("normed", "in"), **compiler.buffer("shares"),
    )  # fmt: skip
    add_tile_block(compiler, layer, "_shexp", "shared", up_bias=layout.at("activations.shares"))


def _add_decode(
    compiler: Compiler, bundles: BundlePlan, layer: int, values: dict[str, Any]
) -> None:
    """Missing clusters are read while the shared expert is computed."""
    values = _decode_values(compiler, bundles, layer, values)
    if bundles.is_predicted:
        values |= compiler.buffer("scores")
        add_expert_prediction(compiler, layer, values)
    elif not _looks_ahead(compiler, bundles):
        compiler.add(kind=OpKind.EXPERTS, **values)
    _add_shared(compiler, layer)
    computed = values | {"flags": values["flags"] | OpFlag.PREDICTED}
    if bundles.cold_slots and compiler.layout.config.matrix_barrier:
        compiler.add(kind=OpKind.AWAIT_ROWS, **computed)
    compiler.add(kind=OpKind.CLUSTERS, **computed)
    if bundles.cold_slots:
        compiler.add(kind=OpKind.LATE_CLUSTERS, **computed)
    merge = values | compiler.buffer("stream") | {"bias": 0}
    if bundles.cold_slots and not compiler.layout.config.keep_neurons:
        merge["flags"] = OpFlag.FORGET
    compiler.add(kind=OpKind.MERGE, **merge)


def _decode_values(
    compiler: Compiler, bundles: BundlePlan, layer: int, values: dict[str, Any]
) -> dict[str, Any]:
    """The fields of the ops over a layer's clusters, wherever they are."""
    runs = cached_run(compiler, bundles)
    if not bundles.cold_slots:
        runs = pinned_run(bundles, layer, range(bundles.rows.num_neurons))
    ((neurons, _, rows),) = runs
    return decode_fields(compiler, bundles, layer) | values | rows | extent(neurons)


def _add_prefill(
    compiler: Compiler, bundles: BundlePlan, layer: int, values: dict[str, Any]
) -> None:
    values = values | {"unit": compiler.dense_unit}
    source = compiler.source("normed", row_reader(compiler, bundles.rows.decide_type))
    compiler.add(
        kind=OpKind.GATHER, layer=layer, unit=compiler.dense_unit, **source,
        **compiler.buffer("gathered"), **_route_fields(compiler),
    )  # fmt: skip
    runs = runs_of(compiler, bundles, layer)
    for index, (neurons, load, rows) in enumerate(runs):
        run = values | rows | extent(neurons) | {"stream_index": load}
        gathered = compiler.buffer("gathered", "in") | compiler.buffer("hidden")
        compiler.add(kind=OpKind.ROWS_UP, **run | gathered)
        flags = run["flags"] | (OpFlag.STREAM_LAST if load else 0)
        flags |= OpFlag.FIRST_ROWS if index == 0 else 0
        flags |= OpFlag.LAST_ROWS if index == len(runs) - 1 else 0
        down = {"flags": flags, "bias": 0, "partials": compiler.layout.at("activations.total")}
        streams = compiler.buffer("hidden", "in") | compiler.buffer("stream")
        compiler.add(kind=OpKind.ROWS_DOWN, **run | down | streams)
