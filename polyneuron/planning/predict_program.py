"""Predicted mode's ops of a decode step (DESIGN §10, PAPER §1.8): predict, order, compute.

A predictor's first matrix and the rounding of its outputs stand where its input is at hand. Missing
rows are ordered there too, so that they are read while attention is computed, or only before they
are needed: the same neurons are named either way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from polyneuron.io.predictor_file import PredictorFile, PredictorInput, tensor_name
from polyneuron.kernels.arena import OpFlag, OpKind
from polyneuron.planning.bundles import BundlePlan
from polyneuron.planning.layout import WeightPlace, act_bytes
from polyneuron.planning.neuron_runs import Run, cached_run, decode_fields, extent, pinned_run

if TYPE_CHECKING:
    from polyneuron.planning.step_program import Compiler


def predictor_readers(compiler: Compiler, layer: int, at: PredictorInput) -> list[WeightPlace]:
    """The matrix of a layer's predictor that reads the normed rows there, if one does."""
    predictors = compiler.predictors
    if predictors is None or predictors.info.input is not at:
        return []
    first = "fc1" if predictors.ranks[layer] else "fc2"
    return [compiler.weight(tensor_name(layer, first))]


def add_predictor(compiler: Compiler, layer: int, at: PredictorInput) -> None:
    """What of a layer's predictor is computed where its normed input is."""
    predictors = compiler.predictors
    if predictors is None or predictors.info.input is not at:
        return
    if predictors.ranks[layer]:
        _add_hidden(compiler, predictors, layer)
    if compiler.spec.experts:
        return  # which of them are chosen is not known here
    if compiler.layout.config.lookahead or at is PredictorInput.FFN:
        _add_prediction(compiler, predictors, layer)


def add_expert_prediction(compiler: Compiler, layer: int, values: dict[str, Any]) -> None:
    """Once experts are chosen: name neurons of theirs; `values`: the fields of the clusters."""
    predictors = compiler.predictors
    assert predictors is not None
    compiler.add(kind=OpKind.PREDICT, **values | _scores(compiler, predictors, layer))


def add_late_prediction(compiler: Compiler, layer: int) -> None:
    """Before the feed-forward block: name neurons that were not named before attention."""
    predictors = compiler.predictors
    assert predictors is not None
    if predictors.info.input is PredictorInput.ATTENTION and not compiler.layout.config.lookahead:
        _add_prediction(compiler, predictors, layer)


def _hidden_acts(compiler: Compiler, rank: int, prefix: str) -> dict[str, Any]:
    """Rows of `rank` values one behind the other, as kernels read them: ranks differ by layer."""
    return compiler.buffer("predicted_acts", prefix) | {f"{prefix}_stride": act_bytes(rank)}


def _add_hidden(compiler: Compiler, predictors: PredictorFile, layer: int) -> None:
    """The values between a predictor's matrices."""
    fc1 = compiler.weight(tensor_name(layer, "fc1"))
    compiler.matmul(layer, fc1, "normed", **compiler.buffer("predicted"))
    compiler.add(
        kind=OpKind.QUANTIZE, layer=layer, cols=fc1.rows,
        flags=OpFlag.RELU if predictors.info.is_relu else 0,
        **compiler.buffer("predicted", "in"), **_hidden_acts(compiler, fc1.rows, "out_acts"),
    )  # fmt: skip


def _predicted_runs(compiler: Compiler, bundles: BundlePlan, layer: int) -> list[Run]:
    """The neurons that are predicted: pinned ones that are not hot, and those in slots."""
    hot = _hot_neurons(compiler, bundles)
    pinned = pinned_run(bundles, layer, range(hot, bundles.pinned_neurons))
    return pinned + cached_run(compiler, bundles)


def _hot_neurons(compiler: Compiler, bundles: BundlePlan) -> int:
    return min(bundles.rows.neurons_in(compiler.hot_clusters), bundles.pinned_neurons)


def _add_prediction(compiler: Compiler, predictors: PredictorFile, layer: int) -> None:
    """Name the neurons to compute and order what is missing of them."""
    bundles = compiler.layout.bundles
    assert bundles is not None
    shared, scores = decode_fields(compiler, bundles, layer), _scores(compiler, predictors, layer)
    for index, (neurons, _, rows) in enumerate(_predicted_runs(compiler, bundles, layer)):
        values = shared | rows | scores | extent(neurons)
        compiler.add(kind=OpKind.PREDICT, together=index > 0, **values)


def _scores(compiler: Compiler, predictors: PredictorFile, layer: int) -> dict[str, Any]:
    """How a layer's neurons are scored, and from what."""
    fc2 = compiler.weight(tensor_name(layer, "fc2"))
    rank = predictors.ranks[layer]
    source = compiler.source("predicted" if rank else "normed", fc2)
    if rank and fc2.takes_acts:
        source = _hidden_acts(compiler, rank, "in")
    more = compiler.weight(tensor_name(layer, "up")).offset if predictors.info.has_up else 0
    return source | {
        "weight": fc2.offset, "weight_type": int(fc2.storage or 0), "cols": fc2.cols,
        "up_weight": more, "bias": compiler.vector(tensor_name(layer, "threshold")), "flags": 0,
    }  # fmt: skip


def add_predicted_clusters(
    compiler: Compiler, bundles: BundlePlan, layer: int, shared: dict[str, Any]
) -> None:
    """Hot clusters beside predicted ones, then those whose rows had not landed."""
    hot = pinned_run(bundles, layer, range(_hot_neurons(compiler, bundles)))
    flags = {"flags": OpFlag.PREDICTED}
    predicted = [
        shared | rows | flags | extent(neurons)
        for neurons, _, rows in _predicted_runs(compiler, bundles, layer)
    ]
    waiting = [values for values in predicted if values.get("cache")]
    for values in waiting if compiler.layout.config.matrix_barrier else []:
        compiler.add(kind=OpKind.AWAIT_ROWS, **values)
    clusters = [
        shared | rows | extent(neurons) | {"unit": compiler.hot_unit} for neurons, _, rows in hot
    ]
    for index, values in enumerate(clusters + predicted):
        compiler.add(kind=OpKind.CLUSTERS, together=index > 0, **values)
    for values in waiting:
        compiler.add(kind=OpKind.LATE_CLUSTERS, **values)
