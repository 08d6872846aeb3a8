"""What is known of a model beforehand: its bytes, its neurons' frequencies, its predictors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from polyneuron.io.ncf_format import Layout
from polyneuron.io.predictor_file import PredictorFile, PredictorInput, predictor_path
from polyneuron.planning.cost_model import CostModel, PredictorWork
from polyneuron.planning.device import DeviceProfile
from polyneuron.planning.hotness import Hotness
from polyneuron.planning.source import ModelSource
from polyneuron.planning.work import mean_matrix, model_work

TYPICAL_POSITIONS = 256
"""Of the context that attention looks back on in a step that is planned for."""
USUAL_RECALL, USUAL_PRECISION = 0.97, 0.6
"""Of predictors whose report does not say."""


def known_model(source: ModelSource, device: DeviceProfile, num_ctx: int) -> CostModel:
    """A model on a device, with what lies beside its file."""
    work = model_work(source)
    hotness = predictor = None
    if work.rows is not None:
        hotness = Hotness.supposed(work.rows.num_neurons)
        predictor = known_predictor(source)
    return CostModel(work, device, hotness, predictor, min(num_ctx, TYPICAL_POSITIONS))


def known_predictor(source: ModelSource) -> PredictorWork | None:
    """The predictors beside a model; None where there are none.

    Raises ConfigError when they are another model's, FormatError when they are damaged.
    """
    is_there = source.manifest.layout is Layout.BUNDLES and predictor_path(source.path).exists()
    return predictor_work(source.predictors()) if is_there else None


def predictor_work(file: PredictorFile) -> PredictorWork:
    """What predictors cost, and what their report promises; means over the layers."""
    layers = len(file.ranks)
    hidden = [t for t in file.tensors.values() if t.role == "predictor.fc1"]
    scores = [t for t in file.tensors.values() if t.role == "predictor.fc2"]
    recall = _mean_of(file.info.report, "recall", USUAL_RECALL)
    precision = _mean_of(file.info.report, "precision", USUAL_PRECISION)
    is_early = file.info.input is PredictorInput.ATTENTION
    return PredictorWork(
        mean_matrix(hidden, layers) if hidden else None,
        mean_matrix(scores, layers),
        recall,
        recall / precision,
        is_early,
    )


def _mean_of(report: Mapping[str, Any], name: str, usual: float) -> float:
    """A share in the report: of all layers, or of each of them."""
    found = report.get(name)
    if found is None:
        layers = report.get("layers")
        rows = layers if isinstance(layers, Sequence) else ()
        found = [row.get(name) for row in rows if isinstance(row, Mapping)]
    values = found if isinstance(found, Sequence) else [found]
    shares = [float(v) for v in values if isinstance(v, int | float) and 0 < v <= 1]
    return fmean(shares) if shares else usual
