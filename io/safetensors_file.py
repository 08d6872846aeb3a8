"""Reads single matrices out of safetensors files: a JSON header, then plain little-endian arrays.

An own reader: the package of that name gives numpy no BF16, which is what checkpoints are kept in.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from polyneuron.errors import FormatError
from polyneuron.io.gguf_values import quoted

F32 = NDArray[np.float32]

LENGTH = struct.Struct("<Q")
MAX_HEADER_BYTES = 100 << 20  # the format's own bound
MAX_DIMS = 64
MAX_EXTENT = 1 << 40
"""Of a dimension; an array without values may have any others."""
DTYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}
SHIFT_BF16 = np.uint32(16)


@dataclass(frozen=True, slots=True)
class SafeTensor:
    """Where one tensor's values lie, in bytes from the file's start."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True, eq=False)
class SafetensorsFile:
    """An open-and-close reader: only the header stays in memory."""

    path: Path
    tensors: Mapping[str, SafeTensor] = field(repr=False)

    def matrix(self, name: str) -> F32:
        """A matrix's values (rows, cols); FormatError naming file and tensor."""
        num_dims = len(self.tensors[name].shape)
        if num_dims != 2:
            _fail(self.path, f"{quoted(name)} has {num_dims} dimensions: is no matrix")
        return self.values(name)

    def values(self, name: str) -> F32:
        """A tensor's values in its shape; FormatError naming file and tensor."""
        tensor = self.tensors[name]
        if tensor.dtype not in DTYPES:
            known = " ".join(DTYPES)
            _fail(self.path, f"{quoted(name)} has type {quoted(tensor.dtype)}; supported: {known}")
        with self.path.open("rb") as file:
            file.seek(tensor.begin)
            raw = file.read(tensor.end - tensor.begin)
        if len(raw) != tensor.end - tensor.begin:
            _fail(self.path, f"cut off inside {quoted(name)}; fetch it again")
        values = np.frombuffer(raw, DTYPES[tensor.dtype]).reshape(tensor.shape)
        if tensor.dtype == "BF16":
            return (values.astype(np.uint32) << SHIFT_BF16).view(np.float32)
        return values.astype(np.float32)


def read_safetensors(path: Path) -> SafetensorsFile:
    """Read and check a header; FormatError in one line when it is none."""
    try:
        file_bytes = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(LENGTH.size)
            length = LENGTH.unpack(head)[0] if len(head) == LENGTH.size else 0
            if not 2 <= length <= min(MAX_HEADER_BYTES, file_bytes - LENGTH.size):
                _fail(path, "not a safetensors file, or cut off; fetch it again")
            text = file.read(length)
    except OSError as error:
        _fail(path, error.strerror or str(error))
    try:
        entries = json.loads(text)
    except (ValueError, RecursionError):
        entries = None
    if not isinstance(entries, dict):
        _fail(path, "its header is no JSON object; not a safetensors file, or damaged")
    data = LENGTH.size + length
    return SafetensorsFile(
        path,
        {
            name: _place(path, name, entry, data, file_bytes)
            for name, entry in entries.items()
            if name != "__metadata__"
        },
    )


def _place(path: Path, name: str, entry: Any, data: int, file_bytes: int) -> SafeTensor:
    """One entry of the header, checked against the file's length."""
    try:
        dtype, (begin, end) = entry["dtype"], entry["data_offsets"]
        shape = tuple(entry["shape"])
        is_whole = all(type(value) is int and value >= 0 for value in (*shape, begin, end))
        is_whole = is_whole and len(shape) <= MAX_DIMS and max(shape, default=0) < MAX_EXTENT
    except (KeyError, TypeError, ValueError):
        is_whole = False
    if not is_whole or not isinstance(dtype, str):
        _fail(path, f"the entry of {quoted(name)} is not as it must be; damaged header")
    item = np.dtype(DTYPES[dtype]).itemsize if dtype in DTYPES else 0
    if end < begin or data + end > file_bytes or (item and end - begin != item * math.prod(shape)):
        _fail(path, f"{quoted(name)} lies beyond the file or has another size than its shape says")
    return SafeTensor(dtype, shape, data + begin, data + end)


def _fail(path: Path, message: str) -> NoReturn:
    raise FormatError(f"{path}: {message}")
