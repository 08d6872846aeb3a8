"""Columns of whole numbers in few bytes, for a page that unpacks them with what browsers have.

A column is told as differences where that is smaller, each number's sign moved to its lowest bit,
then byte by byte: first all lowest bytes, then all second ones. Deflate finds what repeats in that.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_PLANES = 7
"""Bytes of a number: what a page's floats count exactly is below 2^53."""


@dataclass(frozen=True, slots=True)
class PackedColumn:
    """One column: its name, how many bytes each number has, and those."""

    name: str
    count: int
    planes: int
    is_delta: bool
    content: bytes

    def facts(self) -> dict[str, Any]:
        """What a page must know to unpack it."""
        return {"name": self.name, "count": self.count, "planes": self.planes,
                "delta": self.is_delta}  # fmt: skip


def pack_column(name: str, values: NDArray[np.int64]) -> PackedColumn:
    """Pack numbers between -2^52 and 2^52."""
    deltas = np.diff(values, prepend=0)
    is_delta = bool(np.abs(deltas).sum(dtype=float) < np.abs(values).sum(dtype=float))
    numbers = deltas if is_delta else values
    unsigned = ((numbers << 1) ^ (numbers >> 63)).astype("<u8")
    planes = (int(unsigned.max(initial=0)).bit_length() + 7) // 8
    assert planes <= MAX_PLANES, "the collector lets no such number through"
    content = unsigned.view(np.uint8).reshape(-1, 8)[:, :planes].T.tobytes()
    return PackedColumn(name, len(values), planes, is_delta, content)


def pack_payload(head: dict[str, Any], columns: Sequence[PackedColumn]) -> str:
    """A JSON object and columns as one text of letters, digits, + / and =.

    Beneath: deflate of the object's length (4 bytes, little-endian), the object with the columns'
    facts under `columns`, and their bytes.
    """
    facts = json.dumps({**head, "columns": [column.facts() for column in columns]}).encode()
    parts = [len(facts).to_bytes(4, "little"), facts, *(column.content for column in columns)]
    packer = zlib.compressobj(6)
    packed = b"".join([*(packer.compress(part) for part in parts), packer.flush()])
    return base64.b64encode(packed).decode()
