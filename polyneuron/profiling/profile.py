"""Makes a model's profile and predictors; broken off and run again, it goes on where it stopped."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyneuron.errors import ConfigError
from polyneuron.io.layer_journal import LayerJournal
from polyneuron.io.ncf_fields import Fields
from polyneuron.io.ncf_format import Layout
from polyneuron.io.ncf_reader import NcfFile, read_ncf
from polyneuron.io.packed_arrays import pack_arrays, unpack_arrays
from polyneuron.io.piece_writer import check_output
from polyneuron.io.predictor_file import (
    LayerPredictor,
    PredictorInfo,
    model_key,
    predictor_path,
    write_predictors,
)
from polyneuron.io.predictor_import import PredictorImport
from polyneuron.io.profile_file import (
    ActivationBounds,
    LayerProfile,
    Profile,
    layer_of,
    profile_path,
    write_profile,
)
from polyneuron.kernels.quant import BLOCK_COLS
from polyneuron.model.ncf_spec import spec_of
from polyneuron.model.spec import ModelSpec
from polyneuron.profiling.activation_bounds import check_bounds_wanted, find_bounds
from polyneuron.profiling.calibration import (
    Calibration,
    check_sparse,
    cut_sequences,
)
from polyneuron.profiling.expert_fit import fit_experts
from polyneuron.profiling.expert_statistics import expert_layer_profile
from polyneuron.profiling.kinds import Fit, fit_of
from polyneuron.profiling.predictors import Fitted, PredictorSettings
from polyneuron.profiling.recorded import (
    Recorded,
    layer_block,
    recording_head,
    write_recording,
)
from polyneuron.profiling.statistics import layer_profile

RECIPE = "profile-2"
"""Changes whenever the same text gives another profile or other predictors."""
PREDICTOR_ARRAYS = ("fc1", "fc2", "threshold", "up")


@dataclass(frozen=True, slots=True)
class Made:
    """What a run came to."""

    profile: Profile
    profile_path: Path
    predictors_path: Path | None
    report: Mapping[str, Any]
    """Of the predictors: their means under `mean`, each layer's figures under `layers`."""
    resumed_layers: int
    recorded: Recorded | None = None


def check_predictable(ncf: NcfFile, spec: ModelSpec) -> None:
    """ConfigError for a file that predicted mode cannot run."""
    if ncf.manifest.layout is not Layout.BUNDLES:
        raise ConfigError(
            f"{ncf.path}: predictors need bundles, and it keeps its feed-forward weights as tiles; "
            "convert its source with --layout bundles, or give --predictor none"
        )
    if spec.d_model % BLOCK_COLS:
        raise ConfigError(
            f"{ncf.path}: predictors need a width that is a multiple of {BLOCK_COLS}, and this one "
            f"is {spec.d_model}; give --predictor none"
        )


def make_profile(
    path: Path,
    tokens: Sequence[int],
    settings: PredictorSettings | None,
    *,
    imported: PredictorImport | None = None,
    record: Path | None = None,
    max_cost: float | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
    on_wait: Callable[[], None] = lambda: None,
) -> Made:
    """Profile a neuron-cluster file over a text; `settings` None: without predictors.

    Writes MODEL.profile and MODEL.predictors beside it, replacing older ones. `imported` are the
    matrices for settings of that kind; `max_cost`: what bounds for threshold mode, found first, may
    cost of perplexity, then neurons beyond them are counted; `record`: where activations are
    recorded, replacing what is there. `progress` gets tokens times layers done and in all;
    `on_wait` is called while another process does the same.
    Raises ConfigError, FormatError or DeviceError naming file or flag.
    """
    ncf = read_ncf(path)
    spec = spec_of(ncf)
    _check_wanted(ncf, spec, settings, needs_bounds=max_cost is not None)
    if imported is not None:
        imported.check(spec.num_layers)
    sequences = cut_sequences(tokens)
    output = profile_path(path)
    bounds = None if max_cost is None else find_bounds(ncf, spec, sequences, max_cost, progress)
    head = None
    if record is not None:
        head = recording_head(ncf, spec, sequences, _text_key(sequences), record)
    is_recorded = head is not None
    key = _work_key(ncf, sequences, settings, bounds, is_recorded=is_recorded)
    with LayerJournal(output, key, on_wait) as journal:
        resumed = journal.num_layers
        calibration = _begin(ncf, spec, sequences, journal)
        calibration.bounds = bounds.values if bounds else ()
        fit = None if settings is None else fit_of(settings, imported)
        for found in _layer_records(calibration, settings, fit, progress, is_recorded=is_recorded):
            journal.add(pack_arrays(found), calibration.stream.tobytes())
        made = _write(ncf, spec, sequences, settings, journal, resumed, bounds)
        if record is not None and head is not None:
            blocks = (found["needed"] for found in _records(journal))
            made = replace(made, recorded=write_recording(record, head, blocks))
        journal.remove()
    return made


def _check_wanted(
    ncf: NcfFile, spec: ModelSpec, settings: PredictorSettings | None, *, needs_bounds: bool
) -> None:
    """ConfigError for what this file cannot have, or what cannot be written beside it."""
    if needs_bounds:
        check_bounds_wanted(ncf, spec)
    else:
        check_sparse(ncf.path, spec)
    check_output(profile_path(ncf.path))
    if settings is not None:
        check_predictable(ncf, spec)
        check_output(predictor_path(ncf.path))


def _work_key(
    ncf: NcfFile,
    sequences: list[list[int]],
    settings: PredictorSettings | None,
    bounds: ActivationBounds | None,
    *,
    is_recorded: bool,
) -> bytes:
    """A run that records does not go on with one that did not."""
    text = f"{RECIPE} {model_key(ncf.manifest)} {_text_key(sequences)} {settings!r} {bounds!r}"
    text += " recorded" if is_recorded else ""
    return hashlib.sha256(text.encode()).digest()


def _text_key(sequences: list[list[int]]) -> str:
    return hashlib.sha256(repr(sequences).encode()).hexdigest()


def _begin(
    ncf: NcfFile, spec: ModelSpec, sequences: list[list[int]], journal: LayerJournal
) -> Calibration:
    if not journal.num_layers:
        return Calibration.begin(ncf, spec, sequences)
    stream = np.frombuffer(journal.state, np.float32).reshape(-1, spec.d_model).copy()
    return Calibration(ncf, spec, sequences, stream, journal.num_layers)


def _layer_records(
    calibration: Calibration,
    settings: PredictorSettings | None,
    fit: Fit | None,
    progress: Callable[[int, int], None],
    *,
    is_recorded: bool,
) -> Iterator[dict[str, Any]]:
    """What is kept of each layer; a mixture's is counted and fitted expert by expert."""
    if calibration.spec.experts is None:
        for sample in calibration.layers(progress):
            fitted = fit(sample, settings) if fit and settings else None
            needed = {"needed": layer_block(sample)} if is_recorded else {}
            yield _record(layer_profile(sample), fitted) | needed
        return
    for layer in calibration.expert_layers(progress):
        profile = expert_layer_profile(layer)
        yield _record(profile, fit_experts(layer, settings, fit) if fit and settings else None)


def _record(profile: LayerProfile, fitted: Fitted | None) -> dict[str, Any]:
    record: dict[str, Any] = {"profile": profile.plain()}
    if fitted is not None:
        found = fitted.predictor
        record["predictor"] = {name: getattr(found, name) for name in PREDICTOR_ARRAYS}
        record["report"] = fitted.report.plain()
        record["named"] = fitted.named
    return record


def _write(
    ncf: NcfFile,
    spec: ModelSpec,
    sequences: list[list[int]],
    settings: PredictorSettings | None,
    journal: LayerJournal,
    resumed: int,
    bounds: ActivationBounds | None,
) -> Made:
    key = model_key(ncf.manifest)
    layers, reports = [], []
    named: list[NDArray[np.float32]] = []
    for record in _records(journal):
        plain = Fields(str(journal.path), "a layer", record["profile"])
        layers.append(layer_of(plain, spec.num_neurons))
        reports.append(record.get("report", {}))
        named += [record["named"]] if "named" in record else []
    report: dict[str, Any] = {}
    predictors = None
    if settings is not None:
        report = {"mean": mean_report(reports), "layers": reports}
        predictors = predictor_path(ncf.path)
        info = PredictorInfo(
            settings.kind, settings.input, settings.is_relu, settings.fc1_type, settings.fc2_type,
            report, settings.has_up,
        )  # fmt: skip
        ranks = [int(layer["rank"]) for layer in reports]
        made = (LayerPredictor(**record["predictor"]) for record in _records(journal))
        shape = (spec.num_neurons, spec.d_model)
        write_predictors(
            predictors, key, info, ranks, made, shape, named=np.stack(named), force=True
        )
    num_tokens = sum(len(sequence) for sequence in sequences)
    profile = Profile(key, num_tokens, _text_key(sequences), tuple(layers), bounds)
    write_profile(profile_path(ncf.path), profile)
    return Made(profile, profile_path(ncf.path), predictors, report, resumed)


def _records(journal: LayerJournal) -> Iterator[dict[str, Any]]:
    for body in journal.records():
        yield unpack_arrays(journal.path, body)


def mean_report(layers: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Means over layers of every figure; bytes and multiply-adds are sums."""
    sums = ("num_bytes", "multiply_adds")
    return {
        name: float(sum(layer[name] for layer in layers))
        if name in sums
        else fmean(float(layer[name]) for layer in layers)
        for name in layers[0]
    }
