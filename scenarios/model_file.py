"""The model file that a scenario names."""

from __future__ import annotations

from pathlib import Path

from polyneuron.errors import ConfigError
from polyneuron.model.locate import PACKAGED_MODELS, locate_model
from polyneuron.scenarios.recorded_activity import KEY
from polyneuron.scenarios.script import Script

BESIDE_FILE = ("file", "about", "source")
"""Keys of `[model]` where a file tells all others."""


def model_path(script: Script) -> Path | None:
    """The file that `[model]` names: a path from the scenario's folder, or a word that stands for
    one; None where it names a shape.

    ConfigError when there is no such file, or when the scenario tells what the file tells.
    """
    name, where = script.model.get("file"), script.where("model")
    if name is None:
        return None
    if not isinstance(name, str):
        raise ConfigError(f"{where}.file is {name!r}: give a text")
    for key in [*sorted(set(script.model) - set(BESIDE_FILE))]:
        raise ConfigError(f"{where}.{key}: the file that file names has its own; leave one out")
    for key in sorted(script.activity.keys() - {KEY}):
        raise ConfigError(
            f"{script.where('activity')}.{key}: it was counted of the file that model.file names; "
            f"leave one out"
        )
    if name in PACKAGED_MODELS:
        return locate_model(name)
    path = script.path.parent / Path(name).expanduser()
    if not path.exists():
        words = ", ".join(PACKAGED_MODELS)
        raise ConfigError(
            f"{where}.file: {path}: no such file; give a path from the scenario's folder to a "
            f".gguf or .ncf file or a Hugging Face folder, or the word {words}"
        )
    return path
