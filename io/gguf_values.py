"""Bounded reading of the values in a GGUF header; no length is trusted before it is checked."""

import mmap
import struct
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np

from polyneuron.errors import FormatError

MAX_STRING_BYTES = 64 << 20
MAX_ARRAY_STRINGS = 1 << 22  # the largest vocabulary seen has 262 k tokens and 515 k merges
MAX_ARRAY_NUMBERS = 1 << 24

STRING, ARRAY = 8, 9
BOOL = 7
SCALARS = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
DTYPES = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?",
    10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
U32, U64 = SCALARS[4], SCALARS[10]


def quoted(text: str) -> str:
    """`text` as it may stand in a one-line message: ASCII, at most 80 characters."""
    return ascii(text if len(text) <= 80 else text[:77] + "...")


def some_of(names: Sequence[str], most: int) -> str:
    """The first so many of some names, and how many more there are."""
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")


def quoted_value(value: object) -> str:
    """A metadata value as it may stand in a one-line message; of an array only its length."""
    if isinstance(value, np.ndarray | list):
        return f"an array of {len(value)} values"
    return quoted(value if isinstance(value, str) else str(value))


class GgufReader:
    """A cursor over the mapped file; every step is checked against the file's length."""

    def __init__(self, path: str, view: mmap.mmap) -> None:
        self.path = path
        self.view = view
        self.num_bytes = len(view)
        self.position = 0
        self.place = "the header"

    def fail(self, message: str) -> NoReturn:
        """Raise FormatError naming the file."""
        raise FormatError(f"{self.path}: {message}")

    @property
    def num_left(self) -> int:
        """Bytes between the cursor and the end of the file."""
        return self.num_bytes - self.position

    def scalar(self, codec: struct.Struct) -> Any:
        """One number, or FormatError when the file ends inside it."""
        if codec.size > self.num_left:
            self.truncated(codec.size)
        (value,) = codec.unpack_from(self.view, self.position)
        self.position += codec.size
        return value

    def truncated(self, num_wanted: int) -> NoReturn:
        """The file ends inside the header: say where and by how much."""
        self.fail(
            f"cut off inside {self.place}: {num_wanted:,} bytes wanted at byte {self.position:,}, "
            f"the file ends at {self.num_bytes:,}; fetch it again"
        )

    def string(self) -> str:
        """A length-prefixed string; bytes that are not UTF-8 become surrogate escapes."""
        length = self.scalar(U64)
        if length > MAX_STRING_BYTES:
            self.fail(f"{self.place} claims a string of {length:,} bytes; damaged header")
        if length > self.num_left:
            self.truncated(length)
        end = self.position + length
        text = self.view[self.position : end].decode("utf-8", "surrogateescape")
        self.position = end
        return text

    def value(self) -> Any:
        """A metadata value: its type number, then the value."""
        type_id = self.scalar(U32)
        if type_id == STRING:
            return self.string()
        if type_id == ARRAY:
            return self._array()
        if type_id not in SCALARS:
            self.fail(f"{self.place} has the unknown value type {type_id}; damaged header")
        return self.scalar(SCALARS[type_id])

    def _array(self) -> Any:
        type_id = self.scalar(U32)
        count = self.scalar(U64)
        if type_id == STRING:
            return self._strings(count)
        if type_id == ARRAY:
            self.fail(f"{self.place} is an array of arrays, which no GGUF key uses; damaged header")
        if type_id not in DTYPES:
            self.fail(f"{self.place} is an array of unknown type {type_id}; damaged header")
        dtype = np.dtype(DTYPES[type_id])
        self._check_count(count, MAX_ARRAY_NUMBERS, dtype.itemsize)
        array = np.frombuffer(self.view, dtype, count, self.position).copy()
        self.position += count * dtype.itemsize
        return array

    def _check_count(self, count: int, limit: int, min_bytes: int) -> None:
        if count > limit:
            self.fail(f"{self.place} claims {count:,} elements (limit {limit:,}); damaged header")
        if count * min_bytes > self.num_left:
            self.truncated(count * min_bytes)

    def _strings(self, count: int) -> list[str]:
        """The hot loop of a large vocabulary, so without a call per string."""
        self._check_count(count, MAX_ARRAY_STRINGS, U64.size)
        view, position, limit, unpack = self.view, self.position, self.num_bytes, U64.unpack_from
        strings: list[str] = []
        append = strings.append
        for _ in range(count):
            start = position + 8
            if start > limit:
                self.position = position
                self.truncated(8)
            position = start + unpack(view, position)[0]
            if position > limit:
                self.position = start
                self.truncated(position - start)
            append(view[start:position].decode("utf-8", "surrogateescape"))
        self.position = position
        return strings
