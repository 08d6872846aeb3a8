"""What is known of a model beforehand: its bytes, its neurons' frequencies, its predictors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

import numpy as np

from polyneuron.io.ncf_format import Layout
from polyneuron.io.predictor_file import (
    PredictorFile,
    PredictorInput,
    predictor_path,
)
from polyneuron.planning.bundles import neuron_rows
from polyneuron.planning.cost_model import CostModel, PredictorWork
from polyneuron.planning.device import DeviceProfile
from polyneuron.planning.hotness import DEFAULT_SPARSITY, Hotness
from polyneuron.planning.source import ModelSource
from polyneuron.planning.work import mean_matrix, model_work

TYPICAL_POSITIONS = 256
"""Of the context that attention looks back on in a step that is planned for."""
SCORES = ("predictor.fc2", "predictor.up")
"""Matrices whose products are a layer's scores."""
USUAL_RECALL, USUAL_RATIO, USUAL_COLD_RATIO = 0.97, 1.6, 0.5
"""Of predictors whose report does not say; predicted neurons by those that are needed."""


def known_model(source: ModelSource, device: DeviceProfile, num_ctx: int) -> CostModel:
    """A model on a device, with what lies beside its file."""
    work = model_work(source)
    hotness = predictor = None
    if work.rows is not None:
        rows = work.rows
        hotness = known_hotness(source, rows.num_neurons, rows.num_used / rows.num_experts)
        predictor = known_predictor(source, hotness)
    return CostModel(work, device, hotness, predictor, min(num_ctx, TYPICAL_POSITIONS))


def known_hotness(source: ModelSource, num_neurons: int, chosen: float = 1.0) -> Hotness:
    """Counted in a text where a profile lies beside the file, else supposed.

    `chosen`: of the neurons, those of a token's experts.
    Raises ConfigError when the profile is another model's, FormatError when it is damaged.
    """
    profile = source.profile()
    if profile is None:
        return Hotness.supposed(num_neurons, 1.0 - chosen * (1.0 - DEFAULT_SPARSITY))
    gated = np.stack([layer.gated[0] for layer in profile.layers])
    active = sum(int(layer.active[0].sum()) for layer in profile.layers)
    return Hotness.counted(gated, profile.num_tokens, active / max(1, int(gated.sum())))


def known_predictor(source: ModelSource, hotness: Hotness) -> PredictorWork | None:
    """The predictors beside a model; None where there are none.

    Raises ConfigError when they are another model's, FormatError when they are damaged.
    """
    is_there = source.manifest.layout is Layout.BUNDLES and predictor_path(source.path).exists()
    if not is_there:
        return None
    work = predictor_work(source.predictors(), hotness, ordered_by(source))
    # Which experts are chosen is known only behind attention.
    return replace(work, is_early=False) if source.spec.experts else work


def ordered_by(source: ModelSource) -> int:
    """Neurons of the clusters that lie in the order of hotness; 0: they lie in no such order."""
    manifest = source.manifest
    is_ordered = all(section.neuron_ids is not None for section in manifest.sections[1:])
    is_ordered = is_ordered and source.spec.experts is None
    return neuron_rows(manifest).cluster_neurons if is_ordered else 0


def predictor_work(
    file: PredictorFile, hotness: Hotness, cluster_neurons: int = 0
) -> PredictorWork:
    """What predictors cost, and what their report promises; means over the layers.

    `cluster_neurons` as for `Hotness.of_rates`.
    """
    layers = len(file.ranks)
    hidden = [t for t in file.tensors.values() if t.role == "predictor.fc1"]
    scores = [t for t in file.tensors.values() if t.role in SCORES]
    return PredictorWork(
        mean_matrix(hidden, layers) if hidden else None,
        mean_matrix(scores, layers),
        *named_and_active(file, hotness, cluster_neurons),
        is_early=file.info.input is PredictorInput.ATTENTION,
    )


def named_and_active(
    file: PredictorFile, hotness: Hotness, cluster_neurons: int
) -> tuple[Hotness, Hotness]:
    """How often neurons are named, and how often they are named and active.

    Older files do not tell the first neuron by neuron: then it follows from the report's means.
    """
    report = file.info.report
    recall = _mean_of(report, "recall") or USUAL_RECALL
    predicted, cold = _mean_of(report, "predicted"), _mean_of(report, "cold_predicted")
    cold_needed = max(2 * hotness.needed(1, 0.5), 1e-6)
    cold_ratio = cold / cold_needed if cold is not None else USUAL_COLD_RATIO
    found = hotness.scaled(recall, min(recall, cold_ratio))
    if file.named is not None:
        asked = Hotness.of_rates(file.named, hotness.active_share, cluster_neurons)
        return asked, found
    ratio = predicted / max(hotness.needed(), 1e-6) if predicted else USUAL_RATIO
    return hotness.scaled(ratio, cold_ratio), found


def _mean_of(report: Mapping[str, Any], name: str) -> float | None:
    """A share in the report, as a mean over its layers; None where it does not tell."""
    layers = report.get("layers")
    rows = layers if isinstance(layers, Sequence) else ()
    found = [row.get(name) for row in rows if isinstance(row, Mapping)]
    shares = [float(v) for v in found if isinstance(v, int | float) and 0 < v <= 1]
    return fmean(shares) if shares else None
