"""Typed reading of a manifest's fields; whatever is not as it must be is a FormatError."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any, NoReturn, TypeVar

import numpy as np
from numpy.typing import NDArray

from polyneuron.errors import FormatError
from polyneuron.io.gguf_values import quoted, quoted_value

MAX_COUNT = 1 << 48
MAX_TEXT = 1 << 16

Choice = TypeVar("Choice", bound=Enum)


class Fields:
    """The fields of one mapping; `place` says in messages where in the file it is, `cure` what to
    do about a damaged one."""

    def __init__(self, path: str, place: str, values: Any, cure: str = "convert it again") -> None:
        self.path = path
        self.place = place
        self.cure = cure
        if not isinstance(values, dict):
            self.fail("is not a mapping")
        self._values = values

    def fail(self, message: str) -> NoReturn:
        """FormatError naming file and place."""
        raise FormatError(f"{self.path}: {self.place} {message}; damaged, {self.cure}")

    def _wrong(self, key: str, wanted: str) -> NoReturn:
        found = quoted_value(self._values.get(key))
        self.fail(f"has {quoted(key)} = {found}, {wanted} is expected")

    def has(self, key: str) -> bool:
        """Whether the field is there and not nil."""
        return self._values.get(key) is not None

    def text(self, key: str) -> str:
        """A string."""
        value = self._values.get(key)
        if not isinstance(value, str) or len(value) > MAX_TEXT:
            self._wrong(key, "a string")
        return value

    def count(self, key: str, limit: int = MAX_COUNT, least: int = 0) -> int:
        """A whole number in least..limit."""
        value = self._values.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= limit:
            self._wrong(key, f"a whole number in {least}..{limit}")
        return value

    def optional_count(self, key: str, limit: int = MAX_COUNT) -> int | None:
        """A whole number, or None where it is nil."""
        return self.count(key, limit) if self.has(key) else None

    def number(self, key: str) -> float:
        """A finite number of at least 0."""
        value = self._values.get(key)
        number = math.nan
        if isinstance(value, int | float) and not isinstance(value, bool):
            number = float(value)
        if not math.isfinite(number) or number < 0:
            self._wrong(key, "a finite number")
        return number

    def flag(self, key: str) -> bool:
        """True or false."""
        value = self._values.get(key)
        if not isinstance(value, bool):
            self._wrong(key, "true or false")
        return value

    def optional_flag(self, key: str) -> bool:
        """True or false; false where it is left out."""
        return self.has(key) and self.flag(key)

    def choice(self, key: str, kind: type[Choice]) -> Choice:
        """A member of an enumeration by its name in small letters."""
        value = self._values.get(key)
        names = {member.name.lower(): member for member in kind}
        if not isinstance(value, str) or value not in names:
            self._wrong(key, "one of " + ", ".join(names))
        return names[value]

    def mapping(self, key: str) -> Mapping[str, Any]:
        """A mapping with strings as keys."""
        value = self._values.get(key)
        if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
            self._wrong(key, "a mapping")
        return value

    def part(self, key: str) -> Fields:
        """A mapping, to be read field by field."""
        return Fields(self.path, f"{self.place}, {key},", self._values.get(key))

    def parts(self, key: str, what: str) -> Iterator[Fields]:
        """The mappings of a list, each called `what` and its index in messages."""
        value = self._values.get(key)
        if not isinstance(value, list):
            self._wrong(key, "a list")
        for index, entry in enumerate(value):
            yield Fields(self.path, f"{self.place}, {what} {index},", entry)

    def numbers(self, key: str) -> tuple[float, ...]:
        """A list of positive finite numbers."""
        value = self._values.get(key)
        if not isinstance(value, list):
            self._wrong(key, "a list of numbers")
        if not all(isinstance(x, float) and math.isfinite(x) and x > 0 for x in value):
            self._wrong(key, "a list of positive numbers")
        return tuple(value)

    def words(self, key: str) -> NDArray[np.uint32]:
        """Little-endian 32-bit words kept as bytes."""
        value = self._values.get(key)
        if not isinstance(value, bytes) or len(value) % 4:
            self._wrong(key, "bytes, four a word")
        return np.frombuffer(value, "<u4").astype(np.uint32)

    def array(self, key: str, dtype: str, shape: tuple[int, ...]) -> NDArray[Any]:
        """An array of that type and shape."""
        value = self._values.get(key)
        if not isinstance(value, np.ndarray) or value.dtype.str != dtype or value.shape != shape:
            self.fail(f"has no array {dtype} of shape {shape} in {quoted(key)}")
        return value
