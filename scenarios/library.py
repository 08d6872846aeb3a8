"""The scenarios that come with the package, and how one is found by what a user typed."""

from __future__ import annotations

from pathlib import Path

from polyneuron.errors import ConfigError
from polyneuron.scenarios.included import SCENARIOS
from polyneuron.scenarios.script_table import near_match

LIBRARY = SCENARIOS / "library"


def library_names() -> list[str]:
    """All scenarios of the library; those in folders as folder/name."""
    return sorted(
        str(path.relative_to(LIBRARY).with_suffix("")) for path in LIBRARY.rglob("*.toml")
    )


def find_scenario(word: str) -> Path:
    """The file that `word` names: a path, or a scenario of the library.

    ConfigError with the near match when it is neither.
    """
    path = Path(word)
    if path.suffix == ".toml" or path.is_file():
        if not path.is_file():
            raise ConfigError(f"{word}: no such file; --list shows the scenarios that come along")
        return path
    if word not in library_names():
        cure = near_match(word, library_names()) if library_names() else "the library is empty"
        raise ConfigError(f"scenario {word!r}: neither a file nor in the library; {cure}")
    return LIBRARY / f"{word}.toml"
