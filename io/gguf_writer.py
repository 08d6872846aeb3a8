"""Writes a GGUF piece by piece: its head first, then tensor after tensor."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from polyneuron.errors import DeviceError
from polyneuron.io.gguf_tensors import GgufTensor
from polyneuron.io.gguf_values import ARRAY, BOOL, DTYPES, STRING, U32, U64
from polyneuron.io.ncf_format import PAGE_BYTES, round_up
from polyneuron.io.piece_writer import PieceWriter

MAGIC, VERSION = b"GGUF", 3
ALIGNMENT = 32
UINT32, FLOAT32 = 4, 6
ARRAY_KINDS = {np.dtype(name): kind for kind, name in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class GgufPlan:
    """A file's head, and where the tensors behind it lie."""

    head: bytes = field(repr=False)
    """Header, metadata, tensor table, and zeros up to the first tensor."""
    tensors: tuple[GgufTensor, ...] = field(repr=False)
    file_bytes: int

    def end_of(self, index: int) -> int:
        """Where what follows a tensor begins; the file's end is that of a page."""
        if index + 1 < len(self.tensors):
            return self.tensors[index + 1].offset
        return round_up(self.file_bytes, PAGE_BYTES)


def plan_gguf_file(metadata: Mapping[str, Any], tensors: Iterable[GgufTensor]) -> GgufPlan:
    """Lay a file out; the tensors' own offsets do not count.

    Values may be booleans, whole numbers below 2^32, floats (kept as float32), strings, lists of
    strings, and arrays of numbers.
    """
    tensors = tuple(tensors)
    parts = [MAGIC, U32.pack(VERSION), U64.pack(len(tensors)), U64.pack(len(metadata))]
    for key, value in metadata.items():
        parts += [_string(key), _value(value)]
    relative, ends = [], 0
    for tensor in tensors:
        relative.append(ends)
        ends = round_up(ends + tensor.num_bytes, ALIGNMENT)
        parts.append(_table_row(tensor, relative[-1]))
    head = b"".join(parts)
    head = head.ljust(round_up(len(head), ALIGNMENT), b"\0")
    placed = tuple(
        replace(tensor, offset=len(head) + offset)
        for tensor, offset in zip(tensors, relative, strict=True)
    )
    return GgufPlan(head, placed, placed[-1].offset + placed[-1].num_bytes)


def _table_row(tensor: GgufTensor, offset: int) -> bytes:
    shape = tensor.shape[::-1]
    sizes = b"".join(U64.pack(size) for size in shape)
    place = U32.pack(tensor.type_id) + U64.pack(offset)
    return _string(tensor.name) + U32.pack(len(shape)) + sizes + place


def _string(text: str) -> bytes:
    raw = text.encode()
    return U64.pack(len(raw)) + raw


def _value(value: Any) -> bytes:
    if isinstance(value, bool):
        return U32.pack(BOOL) + bytes([value])
    if isinstance(value, int):
        return U32.pack(UINT32) + U32.pack(value)
    if isinstance(value, float):
        return U32.pack(FLOAT32) + struct.pack("<f", value)
    if isinstance(value, str):
        return U32.pack(STRING) + _string(value)
    count = U64.pack(len(value))
    if isinstance(value, np.ndarray):
        kind = ARRAY_KINDS[value.dtype]
        little = value.astype(value.dtype.newbyteorder("<"))
        return U32.pack(ARRAY) + U32.pack(kind) + count + little.tobytes()
    return U32.pack(ARRAY) + U32.pack(STRING) + count + b"".join(map(_string, value))


def is_planned(output: Path, plan: GgufPlan) -> bool:
    """Whether a file is what a plan would give, as far as its head and its length tell."""
    try:
        with output.open("rb") as file:
            found = file.read(len(plan.head))
        return found == plan.head and output.stat().st_size == plan.file_bytes
    except OSError as error:
        raise DeviceError(f"{output}: cannot be read: {error.strerror}") from error


class GgufWriter(PieceWriter):
    """Takes the pieces of a planned file, the head among them."""

    def __init__(
        self, output: Path, plan: GgufPlan, recipe: str, on_wait: Callable[[], None]
    ) -> None:
        self.plan = plan
        key = hashlib.sha256(plan.head + recipe.encode()).digest()
        super().__init__(output, (0, round_up(plan.file_bytes, PAGE_BYTES)), key, on_wait)

    def finish(self) -> None:
        """Give the file its name."""
        self._seal(self.plan.file_bytes)
