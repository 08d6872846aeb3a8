"""Plain data with numpy arrays in it as msgpack, for files of our own."""

from __future__ import annotations

from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray

from polyneuron.errors import FormatError

ARRAY_CODE = 1
DTYPES = ("<u4", "<f4", "<i8")


def pack_arrays(value: Any) -> bytes:
    """Mappings, lists, numbers, strings and arrays of the types above."""
    packed: bytes = msgpack.packb(value, default=_pack_array)
    return packed


def unpack_arrays(path: object, packed: bytes) -> Any:
    """The value; FormatError naming the file when it is none."""
    try:
        return msgpack.unpackb(packed, ext_hook=_unpack_array)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise FormatError(f"{path}: its contents are no msgpack ({error}); damaged") from None


def _pack_array(value: Any) -> msgpack.ExtType:
    if not isinstance(value, np.ndarray):
        raise TypeError(f"{type(value).__name__} cannot be packed")
    little = np.ascontiguousarray(value, value.dtype.newbyteorder("<"))
    if little.dtype.str not in DTYPES:
        raise TypeError(f"arrays of {little.dtype} cannot be packed")
    head = msgpack.packb([little.dtype.str, list(little.shape)])
    return msgpack.ExtType(ARRAY_CODE, len(head).to_bytes(4, "little") + head + little.tobytes())


def _unpack_array(code: int, data: bytes) -> NDArray[Any]:
    end = 4 + int.from_bytes(data[:4], "little")
    dtype, shape = msgpack.unpackb(data[4:end])
    if code != ARRAY_CODE or dtype not in DTYPES:
        raise ValueError("an array of an unknown kind")
    return np.frombuffer(data, dtype, offset=end).reshape(shape).copy()  # aligned
