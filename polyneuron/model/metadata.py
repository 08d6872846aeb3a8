"""Typed reading of `<architecture>.*` keys; missing ones are gathered, then named at once."""

import math
from typing import Any, NoReturn

import numpy as np

from polyneuron.errors import FormatError, UnsupportedError
from polyneuron.io.gguf_file import GgufHeader
from polyneuron.io.gguf_values import quoted_value

MAX_COUNT = 1 << 31


class ModelKeys:
    """The keys of one architecture in one file."""

    def __init__(self, header: GgufHeader, architecture: str) -> None:
        self.header = header
        self.architecture = architecture
        self.missing: list[str] = []

    def fail(self, message: str) -> NoReturn:
        """FormatError naming the file."""
        raise FormatError(f"{self.header.path}: {message}")

    def unsupported(self, message: str) -> NoReturn:
        """UnsupportedError naming the file."""
        raise UnsupportedError(f"{self.header.path}: {message}")

    def get(self, key: str) -> Any:
        """The value of `<architecture>.<key>` or None."""
        return self.header.metadata.get(f"{self.architecture}.{key}")

    def raise_if_missing(self) -> None:
        """FormatError listing every required key that was asked for and is absent."""
        if self.missing:
            self.fail(f"metadata keys missing: {', '.join(self.missing)}")

    def count(self, key: str, default: int | None = None) -> int:
        """A positive integer; without a default its absence is noted and 1 returned."""
        value = self.get(key)
        if isinstance(value, np.ndarray) and value.size and (value == value.flat[0]).all():
            value = value.flat[0].item()  # one value a layer, all equal: as good as one value
        if value is None and default is not None:
            return default
        if value is None:
            self.missing.append(f"{self.architecture}.{key}")
            return 1
        if isinstance(value, np.ndarray):
            self.unsupported(f"{self.architecture}.{key} differs between layers")
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < MAX_COUNT:
            shown = quoted_value(value)
            self.fail(f"{self.architecture}.{key} is {shown}; a positive whole number is expected")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive finite number; without a default its absence is noted and 1 returned."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if value is None:
            self.missing.append(f"{self.architecture}.{key}")
            return 1.0
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or value <= 0:
            shown = quoted_value(value)
            self.fail(f"{self.architecture}.{key} is {shown}; a positive number is expected")
        return float(value)

    def text(self, key: str) -> str | None:
        """A string, or None when the key is absent."""
        value = self.get(key)
        if value is not None and not isinstance(value, str):
            self.fail(f"{self.architecture}.{key} is {quoted_value(value)}; a string is expected")
        return value

    def refuse_unless(self, key: str, *neutral: object) -> None:
        """UnsupportedError when a key that would change the arithmetic has another value."""
        value = self.get(key)
        is_array = isinstance(value, np.ndarray | list)
        if value is not None and (is_array or value not in neutral):
            self.unsupported(f"{self.architecture}.{key} = {quoted_value(value)} is not supported")
