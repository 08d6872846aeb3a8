"""The kinds of predictors behind one interface: a layer's sample in, `Fitted` out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from polyneuron.errors import ConfigError
from polyneuron.io.predictor_file import PredictorInput
from polyneuron.io.predictor_import import PredictorImport
from polyneuron.kernels.gemv import FeedForwardKind
from polyneuron.kernels.quant import StorageType
from polyneuron.profiling.imported_fit import check_threshold, fit_imported
from polyneuron.profiling.low_rank_fit import fit_low_rank
from polyneuron.profiling.mlp_fit import check_trainable, fit_mlp
from polyneuron.profiling.oracle_fit import fit_oracle
from polyneuron.profiling.predictors import DEFAULT_KEPT, Fitted, PredictorSettings
from polyneuron.profiling.sample import LayerSample
from polyneuron.profiling.sign_fit import fit_sign

Fit = Callable[[LayerSample, PredictorSettings], Fitted]

FITS: Mapping[str, Fit] = {
    "low-rank": fit_low_rank,
    "sign": fit_sign,
    "mlp": fit_mlp,
    "oracle": fit_oracle,
}
"""And `imported`, which needs a file."""
RANKED = ("low-rank", "mlp")
"""Kinds whose rank may be given."""
OF_EXPERTS = ("low-rank", "sign", "oracle")
"""Kinds that are made for each expert of a mixture."""
BEHIND_ATTENTION = ("imported", "oracle")
"""Kinds that read feed forward's input and no other."""


def fit_of(settings: PredictorSettings, found: PredictorImport | None) -> Fit:
    """What makes a layer's predictor of these settings; `found` for imported ones."""
    if settings.kind != "imported":
        return FITS[settings.kind]
    assert found is not None
    return partial(fit_imported, found=found)


def settings_of(
    kind: str,
    feed_forward: FeedForwardKind,
    deciding: StorageType,
    *,
    input: PredictorInput | None = None,
    kept: float | None = None,
    rank: int = 0,
    alpha: float = 0.0,
    found: PredictorImport | None = None,
    has_experts: bool = False,
) -> PredictorSettings:
    """Settings of a kind for a model, where a user gave some of them.

    `deciding` is how the model stores the rows that decide; `input`, `kept` None and 0 are the
    kind's own. Raises ConfigError naming the flag that does not go with the kind, and whatever
    keeps the kind from being made here.
    """
    _check_flags(kind, input, rank, alpha, found)
    if has_experts:
        _check_experts(kind, input)
    is_behind = has_experts or kind in BEHIND_ATTENTION
    usual = PredictorInput.FFN if is_behind else PredictorInput.ATTENTION
    fc1_type, fc2_type = _storage(kind, deciding, found)
    settings = PredictorSettings(
        kind, input or usual, DEFAULT_KEPT if kept is None else kept, rank, fc1_type, fc2_type,
        is_relu=kind in ("mlp", "imported"),
        keeps_threshold=found is not None and kept is None,
        alpha=alpha,
        has_up=kind == "sign" and feed_forward is FeedForwardKind.DRELU,
        source="" if found is None else f"{found.path} {found.key}",
    )  # fmt: skip
    if kind == "mlp":
        check_trainable()
    if found is not None and settings.keeps_threshold:
        check_threshold(found)
    return settings


def _storage(
    kind: str, deciding: StorageType, found: PredictorImport | None
) -> tuple[StorageType, StorageType]:
    """How a kind's matrices are stored: fc1 and fc2."""
    if kind == "sign":
        return StorageType.Q8, StorageType.Q1
    if kind == "oracle":
        return StorageType.Q8, deciding
    if found is not None:  # fc1 may be divided by the norm, whose weights differ within a block
        return StorageType.Q8, found.fc2_type
    return StorageType.Q4, StorageType.Q4


def _check_experts(kind: str, input: PredictorInput | None) -> None:
    if kind not in OF_EXPERTS:
        raise ConfigError(
            f"--predictor {kind}: not made for experts; give one of {', '.join(OF_EXPERTS)}"
        )
    if input is PredictorInput.ATTENTION:
        raise ConfigError(
            "--input attention: experts are chosen behind attention, so nothing is named before; "
            "--input ffn"
        )


def _check_flags(
    kind: str, input: PredictorInput | None, rank: int, alpha: float, found: PredictorImport | None
) -> None:
    if rank and kind not in RANKED:
        raise ConfigError(f"--rank {rank}: only low-rank and mlp predictors have one to choose")
    if alpha and kind != "sign":
        raise ConfigError(f"--alpha {alpha:g}: only sign predictors have one; --predictor sign")
    if kind in BEHIND_ATTENTION and input is PredictorInput.ATTENTION:
        raise ConfigError(f"--input attention: {kind} predictors read feed forward's; --input ffn")
    if kind == "imported" and found is None:
        raise ConfigError("--predictor imported: name the file or folder with --import")
    if kind != "imported" and found is not None:
        raise ConfigError(f"--import {found.path}: only with --predictor imported")
