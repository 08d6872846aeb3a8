"""What is known of a model beforehand: its bytes, its neurons' frequencies, its predictors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from polyneuron.io.ncf_format import Layout
from polyneuron.io.predictor_file import (
    PredictorFile,
    PredictorInput,
    model_key,
    predictor_path,
    read_predictors,
)
from polyneuron.planning.cost_model import CostModel, PredictorWork
from polyneuron.planning.device import DeviceProfile
from polyneuron.planning.hotness import Hotness
from polyneuron.planning.source import ModelSource
from polyneuron.planning.work import Matrix, model_work

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
    path = predictor_path(source.path)
    if source.manifest.layout is not Layout.BUNDLES or not path.is_file():
        return None
    spec = source.spec
    key = model_key(source.manifest)
    file = read_predictors(path, key, spec.num_layers, (spec.d_ff, spec.d_model))
    return predictor_work(file, spec.num_layers)


def predictor_work(file: PredictorFile, num_layers: int) -> PredictorWork:
    """What predictors cost, and what their report promises; means over the layers."""
    totals: dict[tuple[str, int], int] = {}
    for tensor in file.tensors.values():
        if tensor.storage is not None and not tensor.name.endswith("threshold"):
            key = (tensor.storage.name.lower(), tensor.cols)
            totals[key] = totals.get(key, 0) + tensor.num_bytes
    matrices = tuple(Matrix(*key, total // num_layers) for key, total in sorted(totals.items()))
    recall = _mean_of(file.info.report, "recall", USUAL_RECALL)
    precision = _mean_of(file.info.report, "precision", USUAL_PRECISION)
    is_early = file.info.input is PredictorInput.ATTENTION
    return PredictorWork(matrices, recall, recall / precision, is_early)


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
