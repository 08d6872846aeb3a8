"""Predictors of a layer of experts: one for each, over the tokens that chose it.

The scores of all experts are rows of one matrix, of which a token needs those of its own experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from polyneuron.io.predictor_file import LayerPredictor
from polyneuron.profiling.expert_low_rank import SharedLowRank
from polyneuron.profiling.expert_sample import ExpertLayer, ExpertSample
from polyneuron.profiling.predictors import (
    Fitted,
    PredictorReport,
    PredictorSettings,
    predictor_bytes,
)
from polyneuron.profiling.sample import LayerSample
from polyneuron.profiling.thresholds import ALWAYS

F32 = NDArray[np.float32]
Fit = Callable[[LayerSample, PredictorSettings], Fitted]

LEAST_TOKENS = 32
"""An expert that fewer chose has shown nothing: all its neurons are named."""


def fit_experts(layer: ExpertLayer, settings: PredictorSettings, fit: Fit) -> Fitted:
    """One layer's predictors as one; `fit` makes each expert's, but low-rank ones share fc1."""
    shared = SharedLowRank.of(layer, settings) if settings.kind == "low-rank" else None
    rank = shared.rank if shared else 0
    found: list[tuple[ExpertSample, Fitted]] = []
    for expert in layer.experts():
        is_told = len(expert.tokens) >= LEAST_TOKENS
        made = shared.fit(expert, settings) if shared and is_told else None
        if made is None and is_told and not shared:
            made = fit(expert.sample, settings)
        found.append((expert, made or _names_all(expert, rank, settings)))
    predictors = [fitted.predictor for _, fitted in found]
    fc1 = shared.directions.fc1 if shared else None
    predictor = LayerPredictor(
        fc1,
        np.concatenate([one.fc2 for one in predictors]),
        np.concatenate([one.threshold for one in predictors]),
        _stacked([one.up for one in predictors]),
    )
    shares = [len(expert.tokens) / layer.num_tokens for expert, _ in found]
    named = [np.float32(s) * fitted.named for s, (_, fitted) in zip(shares, found, strict=True)]
    reports = [fitted.report for _, fitted in found]
    report = joined_report(reports, shares, predictor, layer.num_used, settings)
    return Fitted(predictor, report, np.concatenate(named))


def _stacked(parts: Sequence[F32 | None]) -> F32 | None:
    there = [part for part in parts if part is not None]
    return np.concatenate(there) if there else None


def _names_all(found: ExpertSample, rank: int, settings: PredictorSettings) -> Fitted:
    """For an expert that the text does not tell."""
    d_ff, d_model = found.sample.hidden.shape[1], found.sample.ffn_input.shape[1]
    fc2 = np.zeros((d_ff, rank or d_model), np.float32)
    threshold = np.full(d_ff, ALWAYS, np.float32)
    up = np.zeros((d_ff, d_model), np.float32) if settings.has_up else None
    active = float(np.mean(found.sample.hidden != 0)) if found.sample.hidden.size else 0.0
    report = PredictorReport(rank, 1.0, 1.0, active, 1.0, 1.0, active, 0, 0)
    return Fitted(LayerPredictor(None, fc2, threshold, up), report, np.ones(d_ff, np.float32))


def joined_report(
    reports: Sequence[PredictorReport],
    shares: Sequence[float],
    predictor: LayerPredictor,
    num_used: int,
    settings: PredictorSettings,
) -> PredictorReport:
    """A layer's report from its experts', which `shares` of the tokens chose.

    Shares of neurons are those of all the layer has; others are means over the experts' tokens.
    """
    weights = np.array(shares) / max(sum(shares), 1e-12)
    chosen = sum(shares) / len(shares)

    def mean(name: str) -> float:
        return float(weights @ np.array([getattr(report, name) for report in reports]))

    num_neurons, width = predictor.fc2.shape
    d_model = width if predictor.fc1 is None else predictor.fc1.shape[1]
    scored = (1 + settings.has_up) * num_used * (num_neurons // len(reports)) * width
    return PredictorReport(
        rank=predictor.rank,
        predicted=chosen * mean("predicted"),
        cold_predicted=chosen * mean("cold_predicted"),
        active=chosen * mean("active"),
        recall=mean("recall"),
        kept=mean("kept"),
        precision=mean("precision"),
        num_bytes=predictor_bytes(predictor.rank, (num_neurons, d_model), settings),
        multiply_adds=predictor.rank * d_model + scored,
        alpha=mean("alpha"),
    )
