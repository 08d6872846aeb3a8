"""Profiles of devices and shapes of models that scenarios name instead of spelling out."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polyneuron.errors import ConfigError
from polyneuron.scenarios.script_table import ScriptTable, near_match
from polyneuron.synth.shapes import SHAPES

SCENARIOS = Path(__file__).parent
HERE = "here"
"""The device a program runs on, measured."""
_FILELESS = {"devices": {HERE}, "models": set(SHAPES)}
"""Names that need no file: they are known otherwise."""


def known_names(folder: str) -> list[str]:
    """What stands in `scenarios/<folder>`, and what is known without a file."""
    return sorted({path.stem for path in (SCENARIOS / folder).glob("*.toml")} | _FILELESS[folder])


def included(folder: str, key: str, table: ScriptTable, script: Path) -> Mapping[str, Any]:
    """The table of a scenario, over the tables of the file that its `key` names.

    A name stands for a file of the package; .toml is a path from the scenario's folder.
    """
    if not table.has(key):
        return dict(table.values)
    name = table.text(key)
    path = _path(folder, name, script)
    if not path.is_file():
        if name in _FILELESS[folder]:
            return dict(table.values)
        table.refuse(
            key, f"is {name!r}, and {path} is no file; {near_match(name, known_names(folder))}"
        )
    return merged(_read(path), table.values)


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` laid over `base`, table by table; lists are replaced whole."""
    found = dict(base)
    for key, value in over.items():
        below = found.get(key)
        if isinstance(below, dict) and isinstance(value, dict):
            found[key] = merged(below, value)
        else:
            found[key] = value
    return found


def _path(folder: str, name: str, script: Path) -> Path:
    if name.endswith(".toml"):
        return script.parent / name
    return SCENARIOS / folder / f"{name}.toml"


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not TOML: {error}") from None
