"""One table of a scenario, read key by key: every slip is named with its file, key and cure."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NoReturn, TypeVar

from polyneuron.errors import ConfigError
from polyneuron.sizes import parse_size

NS_PER_MS = 1_000_000
Choice = TypeVar("Choice", bound=StrEnum)


def near_match(word: str, known: Iterable[str]) -> str:
    """What the user is told about a word that is not known: the nearest one, or all."""
    names = sorted(known)
    begun = [name for name in names if word and name.startswith(word)]
    near = difflib.get_close_matches(word, names, n=1) or begun
    return f"did you mean {near[0]}?" if near else f"known: {', '.join(names)}"


@dataclass(frozen=True, slots=True)
class ScriptTable:
    """Values under one heading; `where` begins every message: the file, and the key's path."""

    values: Mapping[str, Any]
    where: str
    path: str = ""
    """Dotted, empty for the file's top."""

    def key_path(self, key: str) -> str:
        """A key of this table as a user would look for it."""
        return f"{self.path}.{key}" if self.path else key

    def refuse(self, key: str, complaint: str) -> NoReturn:
        """Raise the one-line ConfigError about a key."""
        raise ConfigError(f"{self.where}: {self.key_path(key)}: {complaint}")

    def only(self, known: Iterable[str]) -> None:
        """Refuse keys that mean nothing here, with the near match of a typo."""
        names = list(known)
        for key in self.values:
            if key not in names:
                self.refuse(key, f"not a key here; {near_match(key, names)}")

    def has(self, key: str) -> bool:
        """Whether the key is there."""
        return key in self.values

    def need(self, key: str, expected: str) -> Any:
        """The value of a key that must be there."""
        if key not in self.values:
            self.refuse(key, f"missing; give {expected}")
        return self.values[key]

    def _wrong(self, key: str, expected: str) -> NoReturn:
        self.refuse(key, f"is {self.values[key]!r}: give {expected}")

    def text(self, key: str, default: str | None = None) -> str:
        """A string that is not empty; required when there is no default."""
        value = self.values.get(key, default)
        if value is None:
            self.need(key, "a string")
        if not isinstance(value, str) or (key in self.values and not value.strip()):
            self._wrong(key, "a string")
        return value

    def whole(self, key: str, default: int | None, low: int = 0, high: int | None = None) -> int:
        """A whole number between bounds; required when the default is None."""
        expected = f"a whole number, {_bounds(low, high)}"
        value = self.need(key, expected) if default is None else self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            self._wrong(key, expected)
        if key in self.values and (value < low or (high is not None and value > high)):
            self._wrong(key, expected)
        return value

    def number(
        self, key: str, default: float | None, low: float = 0.0, high: float | None = None
    ) -> float:
        """A finite number between bounds; required when the default is None."""
        expected = f"a number, {_bounds(low, high)}"
        value = self.need(key, expected) if default is None else self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            self._wrong(key, expected)
        if key in self.values and not (math.isfinite(value) and value >= low):
            self._wrong(key, expected)
        if key in self.values and high is not None and value > high:
            self._wrong(key, expected)
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """true or false."""
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            self._wrong(key, "true or false")
        return value

    def choice(self, key: str, kind: type[Choice], default: Choice | None = None) -> Choice:
        """A word of an enumeration; required when there is no default."""
        names = [str(word) for word in kind]
        if default is None:
            self.need(key, f"one of {', '.join(names)}")
        word = self.values.get(key, default)
        if not isinstance(word, str):
            self._wrong(key, f"one of {', '.join(names)}")
        if word not in names:
            self.refuse(key, f"is {word!r}; {near_match(word, names)}")
        return kind(word)

    def size(self, key: str) -> int:
        """Bytes of a size: 7GiB, 3000MB or a whole number; 0 when the key is absent."""
        value = self.values.get(key, 0)
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return value
        if not isinstance(value, str):
            self._wrong(key, "a size: 3GiB, 3000MB or bytes")
        return parse_size(value, f"{self.where}: {self.key_path(key)}")

    def ns(self, key: str, default_ms: float | None) -> int:
        """Nanoseconds of a key in milliseconds."""
        return round(self.number(key, default_ms) * NS_PER_MS)

    def table(self, key: str) -> ScriptTable:
        """A table inside this one; empty when it is absent."""
        value = self.values.get(key, {})
        if not isinstance(value, dict):
            self._wrong(key, f"a table [{self.key_path(key)}]")
        return ScriptTable(value, self.where, self.key_path(key))

    def tables(self, key: str) -> list[ScriptTable]:
        """Tables under [[key]]; each knows its place in the list."""
        value = self.values.get(key, [])
        if not isinstance(value, list) or not all(isinstance(row, dict) for row in value):
            self._wrong(key, f"tables, each under [[{self.key_path(key)}]]")
        return [
            ScriptTable(row, self.where, f"{self.key_path(key)}[{index}]")
            for index, row in enumerate(value)
        ]

    def words(self, key: str) -> list[Any]:
        """A list of values; empty when it is absent."""
        value = self.values.get(key, [])
        if not isinstance(value, list):
            self._wrong(key, "a list in brackets")
        return value


def _bounds(low: float, high: float | None) -> str:
    lowest, highest = (
        bound if isinstance(bound, int) else f"{bound:g}" for bound in (low, high or 0)
    )
    return f"{lowest} or more" if high is None else f"{lowest} to {highest}"
