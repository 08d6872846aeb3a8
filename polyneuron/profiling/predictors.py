"""What all predictors have in common: settings, scores as the engine computes them, evaluation."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyneuron.errors import ConfigError
from polyneuron.io.ncf_format import stored_bytes
from polyneuron.io.predictor_file import LayerPredictor, PredictorInput
from polyneuron.kernels.quant import StorageType, pack_tiles_from_f32
from polyneuron.profiling.layer_weights import TiledMatrix
from polyneuron.profiling.sample import LayerSample

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]

CALIBRATION_SHARE = 0.75
"""Of the tokens; the others judge."""
COLD_COST = 10.0
"""A neuron read from flash against one that is in memory."""
HOT_SHARE = 0.5
"""Of a layer's neurons, hottest first: what is taken to be in memory."""
DEFAULT_KEPT = 0.998
RANK_STEP = 32
LEAST_ALPHA, MOST_ALPHA = 0.1, 10.0


@dataclass(frozen=True, slots=True)
class PredictorSettings:
    """What is to be fitted."""

    kind: str = "low-rank"
    input: PredictorInput = PredictorInput.ATTENTION
    kept: float = DEFAULT_KEPT
    """Share of all |activation| times length of the down row that is to be kept, 0 to 1."""
    rank: int = 0
    """Of every layer, a multiple of 32; 0: each layer's own."""
    fc1_type: StorageType = StorageType.Q4
    fc2_type: StorageType = StorageType.Q4
    is_relu: bool = False
    keeps_threshold: bool = False
    """Imported ones: whether their own threshold holds, in place of one from the text."""
    alpha: float = 0.0
    """Signs: how often a vote for the neuron counts beside one against it; 0: from the text."""
    has_up: bool = False
    """Signs: whether up's vote, too, in a matrix of their own."""
    seed: int = 0
    """Of what is drawn at random in training."""
    source: str = ""
    """Imported ones: what names the files and their state."""

    def __post_init__(self) -> None:
        if not 0.0 < self.kept < 1.0:
            raise ConfigError(f"--recall {self.kept}: give more than 0 and less than 1, as 0.998")
        if self.rank < 0 or self.rank % RANK_STEP:
            raise ConfigError(f"--rank {self.rank}: give a multiple of {RANK_STEP}, or 0")
        if self.alpha and not LEAST_ALPHA <= self.alpha <= MOST_ALPHA:
            raise ConfigError(
                f"--alpha {self.alpha}: give {LEAST_ALPHA} to {MOST_ALPHA}, as 1.1; more names more"
            )


@dataclass(frozen=True, slots=True)
class PredictorReport:
    """What one layer's predictor does on tokens it was not made with; shares are 0 to 1."""

    rank: int
    predicted: float
    """Share of neurons named."""
    cold_predicted: float
    """Share of the less active half that is named: those are read from flash."""
    active: float
    """Share of neurons that contribute."""
    recall: float
    """Share of the active neurons that are named."""
    kept: float
    """Share of the sum of |activation| times length of the down row that is kept."""
    precision: float
    """Share of the named neurons that are active."""
    num_bytes: int
    """Of matrices and thresholds as stored."""
    multiply_adds: int
    """A token."""
    alpha: float = 0.0
    """Of sign predictors: the conservativeness that their thresholds come to; else 0."""

    def plain(self) -> dict[str, Any]:
        """For msgpack and JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True, eq=False)
class Fitted:
    """A layer's predictor and what it does."""

    predictor: LayerPredictor
    report: PredictorReport
    named: F32
    """For each neuron (d_ff) the share of the text's tokens that it is named for."""


def predictor_input(sample: LayerSample, at: PredictorInput) -> F32:
    """The normed rows (tokens, d_model) that a predictor reads there."""
    return sample.attention_input if at is PredictorInput.ATTENTION else sample.ffn_input


def contributions(sample: LayerSample) -> F32:
    """|activation| times the length of the down row (tokens, d_ff)."""
    return np.abs(sample.hidden) * sample.weights.down_norm


def num_calibration(num_tokens: int) -> int:
    """Tokens that predictors are made with; those after them judge."""
    return max(1, int(num_tokens * CALIBRATION_SHARE))


def neuron_costs(contribution: F32) -> F64:
    """What computing each neuron (d_ff) costs: 1 in memory, more where it has to be read."""
    counts = np.count_nonzero(contribution, axis=0)
    costs = np.full(len(counts), COLD_COST)
    costs[np.argsort(-counts, kind="stable")[: int(HOT_SHARE * len(counts))]] = 1.0
    return costs


def quantised(values: F32, storage: StorageType) -> TiledMatrix:
    """A matrix (rows, cols) as the file will hold it."""
    tiles = pack_tiles_from_f32(storage, np.ascontiguousarray(values))
    return TiledMatrix(storage, tiles, *values.shape)


def scores(
    fc1: F32 | None, fc2: F32, x: F32, settings: PredictorSettings, up: F32 | None = None
) -> F32:
    """x (tokens, d_model) -> scores (tokens, d_ff) by the engine's kernels and roundings."""
    if fc1 is not None:
        x = quantised(fc1, settings.fc1_type).product(x)
        x = np.ascontiguousarray(np.maximum(x, 0) if settings.is_relu else x)
    found = quantised(fc2, settings.fc2_type).product(x)
    return found if up is None else found + quantised(up, settings.fc2_type).product(x)


def predictor_bytes(rank: int, shape: tuple[int, int], settings: PredictorSettings) -> int:
    """Bytes of one layer's predictor as stored; shape is (d_ff, d_model)."""
    d_ff, d_model = shape
    fc1 = stored_bytes(settings.fc1_type, rank, d_model) if rank else 0
    fc2 = (1 + settings.has_up) * stored_bytes(settings.fc2_type, d_ff, rank or d_model)
    return fc1 + fc2 + stored_bytes(None, 1, d_ff)


def names(predictor: LayerPredictor, x: F32, settings: PredictorSettings) -> NDArray[np.bool_]:
    """Which neurons are named for inputs (tokens, d_model): (tokens, d_ff), as the engine does it.

    A score that is no number names its neuron.
    """
    found = scores(predictor.fc1, predictor.fc2, x, settings, predictor.up)
    return ~(found <= predictor.threshold)


def judged(predictor: LayerPredictor, sample: LayerSample, settings: PredictorSettings) -> Fitted:
    """A predictor with its report, by the tokens that were kept apart: the way of every kind."""
    x = np.ascontiguousarray(predictor_input(sample, settings.input))
    named = names(predictor, x, settings)
    report = _report(predictor, named, sample, settings)
    return Fitted(predictor, report, named.mean(axis=0, dtype=np.float32))


def _report(
    predictor: LayerPredictor,
    named: NDArray[np.bool_],
    sample: LayerSample,
    settings: PredictorSettings,
) -> PredictorReport:
    known = num_calibration(len(sample.hidden))
    contribution, named = contributions(sample), named[known:]
    cold = neuron_costs(contribution[:known]) > 1.0
    contribution = contribution[known:]
    active = contribution > 0
    both = int(np.count_nonzero(named & active))
    total = float(contribution.sum(dtype=np.float64))
    d_ff, d_model = len(predictor.fc2), sample.ffn_input.shape[1]
    rank = predictor.rank
    return PredictorReport(
        rank=rank,
        predicted=float(named.mean()),
        cold_predicted=float(named[:, cold].mean()),
        active=float(active.mean()),
        recall=both / max(1, int(np.count_nonzero(active))),
        kept=float(contribution[named].sum(dtype=np.float64)) / total if total else 1.0,
        precision=both / max(1, int(np.count_nonzero(named))),
        num_bytes=predictor_bytes(rank, (d_ff, d_model), settings),
        multiply_adds=rank * d_model + (1 + settings.has_up) * d_ff * (rank or d_model),
    )
