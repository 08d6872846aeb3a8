"""The recording that a scenario plays, and what must fit it: the model, and nothing beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from polyneuron.errors import ConfigError
from polyneuron.io.activation_trace import ActivationTrace, read_trace
from polyneuron.io.file_kind import is_ncf
from polyneuron.io.predictor_file import model_key
from polyneuron.planning.source import open_source
from polyneuron.scenarios.disturbance import Deed
from polyneuron.scenarios.engine_plan import EnginePlan
from polyneuron.scenarios.model_file import model_path
from polyneuron.scenarios.model_shape import ModelShape
from polyneuron.scenarios.recorded_activity import KEY, RecordedActivity
from polyneuron.scenarios.script import Script


def stated_activity(script: Script) -> Mapping[str, Any]:
    """The statistics under `[activity]`; none where it names a recording, which refuses them."""
    if KEY not in script.activity:
        return script.activity
    others = sorted(script.activity.keys() - {KEY})
    if others:
        raise ConfigError(
            f"{script.where('activity')}.{others[0]}: the recording that {KEY} names says how "
            "neurons behave; leave one out"
        )
    return {}


def with_recording(script: Script, shape: ModelShape, own: EnginePlan | None) -> ModelShape:
    """The model as the scenario plays it: with the recording that it names, if it names one.

    ConfigError or FormatError names the file and the key.
    """
    if KEY not in script.activity:
        return shape
    where, word = f"{script.where('activity')}.{KEY}", script.activity[KEY]
    if not isinstance(word, str) or not word.strip():
        raise ConfigError(f"{where} is {word!r}: give a file that profile --record wrote")
    if any(event.deed is Deed.SHIFT_HOT_SET for event in script.events):
        raise ConfigError(
            f"{script.where('events')}: {Deed.SHIFT_HOT_SET} changes what is drawn, and a "
            "recording is played as it is; leave one out"
        )
    trace = read_trace(path := script.path.parent / word)
    _check_shape(where, path, trace, shape)
    _check_model(where, path, trace, script, own)
    return replace(shape, activity=RecordedActivity(trace))


def _check_shape(where: str, path: Path, trace: ActivationTrace, shape: ModelShape) -> None:
    if shape.experts > 1:
        raise ConfigError(
            f"{where}: {shape.name} has experts, and a recording has none; leave it out"
        )
    recorded = (trace.head.num_layers, trace.head.num_neurons)
    if recorded != (shape.layers, shape.neurons):
        raise ConfigError(
            f"{where}: {path} is of a model of {recorded[0]} layers of {recorded[1]} neurons, "
            f"{shape.name} has {shape.layers} of {shape.neurons}: record that model with "
            "polyneuron profile --record"
        )


def _check_model(
    where: str, path: Path, trace: ActivationTrace, script: Script, own: EnginePlan | None
) -> None:
    """The file that `[model]` names is the one that was run, its neurons in the same order."""
    model = own.source.path if own else model_path(script)
    if model is None or not is_ncf(model):
        return
    source = own.source if own else open_source(model)
    if trace.head.model_key != model_key(source.manifest):
        raise ConfigError(
            f"{where}: {path} is of another file than {model}, or of one with its neurons in "
            "another order: record it with polyneuron profile --record"
        )
