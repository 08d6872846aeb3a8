"""Which neurons tokens activate, and how much of the gates a predictor of low rank explains."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyneuron.kernels.quant import BLOCK_COLS
from polyneuron.model.spec import LayerTensors
from tests.support.neuron_traces import Trace, lru_hit_rate
from tests.support.reference_model import Floats, ReferenceModel

Bools = NDArray[np.bool_]

LEAST_VARIANCE = 1e-6
"""Directions of less, as a share of the largest, are left out of a fit."""
RECALL = 0.95


@dataclass(frozen=True, slots=True)
class Activity:
    """Which neurons were active in one layer: (tokens, d_ff)."""

    active: Bools
    gate_positive: Bools

    @property
    def rates(self) -> NDArray[np.float64]:
        """Of each neuron, hottest first."""
        return np.sort(self.active.mean(axis=0))[::-1]

    def after(self, num_tokens: int) -> Activity:
        """Without the first tokens."""
        return Activity(self.active[num_tokens:], self.gate_positive[num_tokens:])

    def carried_by(self, share: float) -> float:
        """The part of all activations that the hottest neurons carry."""
        rates = self.rates
        return float(rates[: int(share * len(rates))].sum() / rates.sum())

    def overlap(self, distance: int) -> float:
        """The part of a token's active neurons that was active so many tokens before."""
        both = self.active[distance:] & self.active[:-distance]
        return float(both.sum() / self.active[distance:].sum())

    def in_any_of(self, num_tokens: int) -> float:
        """The share of neurons active in any of so many consecutive tokens."""
        whole = self.active[: len(self.active) // num_tokens * num_tokens]
        return float(whole.reshape(-1, num_tokens, whole.shape[1]).any(axis=1).mean())

    def cached(self, share: float) -> float:
        """The part of active neurons that an LRU of this share of the layer holds, warmed up by
        the first half of the tokens."""
        trace: Trace = [
            (i, np.flatnonzero(row).astype(np.uint32)) for i, row in enumerate(self.active)
        ]
        half = len(trace) // 2
        return lru_hit_rate(int(share * self.active.shape[1]), trace[:half], trace[half:])


@dataclass(slots=True)
class LayerRecord:
    """What one layer saw, a sequence each."""

    activity: list[Activity] = field(default_factory=list)
    attention_inputs: list[Floats] = field(default_factory=list)
    inputs: list[Floats] = field(default_factory=list)
    """Of feed forward, normed as attention's are."""


class RecordingModel(ReferenceModel):
    """Keeps which neurons were active, and the inputs."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, np.float32)
        self.seen = [LayerRecord() for _ in range(self.spec.num_layers)]

    def gate_and_up(self, layer_id: int, x: Floats) -> tuple[Floats | None, Floats]:
        """The base's, recorded."""
        gate, up = super().gate_and_up(layer_id, x)
        assert gate is not None
        self.seen[layer_id].activity.append(Activity((gate > 0) & (up > 0), gate > 0))
        self.seen[layer_id].inputs.append(x)
        return gate, up

    def _attention(self, layer_id: int, layer: LayerTensors, x: Floats) -> Floats:
        self.seen[self.names.layers.index(layer)].attention_inputs.append(x)
        return super()._attention(layer_id, layer, x)


def activity_of(path: Path, tokens: NDArray[np.integer[Any]]) -> list[Activity]:
    """Of every layer."""
    model = RecordingModel(path)
    model.logits(tokens)
    return [record.activity[0] for record in model.seen]


@dataclass(frozen=True, slots=True)
class GateFit:
    """The best linear predictors of a layer's gates, of every rank: gate ~ decode @ encode @ x."""

    encode: Floats
    """(max rank, d_model)."""
    decode: Floats
    """(d_ff, max rank)."""

    def predict(self, inputs: Floats, rank: int) -> Floats:
        """inputs (tokens, d_model) without their mean -> gates (tokens, d_ff) without theirs."""
        predicted: Floats = (inputs @ self.encode[:rank].T) @ self.decode[:, :rank].T
        return predicted


def block_covariance(inputs: Floats) -> Floats:
    """(d_model, d_model), diagonal: of inputs (tokens, d_model) whose columns vary independently,
    those of a block of 32 alike. A few hundred tokens tell it."""
    by_block = inputs.var(axis=0).reshape(-1, BLOCK_COLS).mean(axis=1)
    return np.diag(np.repeat(by_block, BLOCK_COLS))


def fit_gates(weights: Floats, covariance: Floats) -> GateFit:
    """For gates = weights (d_ff, d_model) @ x and the covariance of x: the principal components
    of the gates."""
    variances, directions = np.linalg.eigh(covariance)
    kept = variances > LEAST_VARIANCE * variances[-1]
    sizes, basis = np.sqrt(variances[kept]), directions[:, kept]
    whitened = (weights @ basis) * sizes
    _, turn = np.linalg.eigh(whitened.T @ whitened)
    turn = turn[:, ::-1]
    return GateFit(turn.T @ (basis / sizes).T, whitened @ turn)


@dataclass(frozen=True, slots=True)
class Prediction:
    """How well gates (tokens, d_ff) were predicted."""

    variance_share: float
    recall: float
    """Of positive gates, by predicted ones above 0."""
    precision: float
    predicted: float
    """Share of neurons predicted where all thresholds fall so that 95 % of positive gates are."""


def judge(predicted: Floats, gates: Floats, means: Floats) -> Prediction:
    """Both with their means, which are (d_ff)."""
    error, varying = predicted - gates, gates - means
    positive, chosen = gates > 0, predicted > 0
    both = np.count_nonzero(positive & chosen)
    margins = predicted / varying.std(axis=0)
    lowest = np.quantile(margins[positive], 1 - RECALL)
    return Prediction(
        1 - float(np.square(error).sum() / np.square(varying).sum()),
        both / np.count_nonzero(positive),
        both / np.count_nonzero(chosen),
        float((margins > lowest).mean()),
    )
