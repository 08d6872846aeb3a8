"""Checked pointers to numpy arrays: a wrong array is a ValueError here, never a fault in C."""

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from polyneuron.kernels._kernels import ffi

if TYPE_CHECKING:
    from polyneuron.kernels._kernels import CData

Array = npt.NDArray[Any]
F32 = npt.NDArray[np.float32]

ACT_BLOCK = np.dtype([("quants", np.int8, (32,)), ("scale", np.float32), ("sum", np.int32)])
assert ACT_BLOCK.itemsize == ffi.sizeof("struct act_block")

_C_NAMES: dict[Any, str] = {
    np.dtype(np.float32): "float[]",
    np.dtype(np.uint8): "uint8_t[]",
    np.dtype(np.uint16): "uint16_t[]",
    np.dtype(np.uint32): "uint32_t[]",
    np.dtype(np.int32): "int32_t[]",
    ACT_BLOCK: "struct act_block[]",
}


def read_pointer(
    name: str, array: Array, dtype: npt.DTypeLike, shape: tuple[int, ...] | None = None
) -> "CData":
    """Pointer to an array that C only reads, checked for type, layout and (if given) shape."""
    wanted = np.dtype(dtype)
    if not isinstance(array, np.ndarray) or array.dtype != wanted:
        found = array.dtype if isinstance(array, np.ndarray) else type(array).__name__
        raise ValueError(f"{name}: dtype is {found}, needs {wanted}")
    if not array.flags.c_contiguous:
        raise ValueError(f"{name}: is not C-contiguous; pass numpy.ascontiguousarray of it")
    if not array.flags.aligned:
        raise ValueError(f"{name}: is not aligned to its element; pass a copy")
    if shape is not None and array.shape != shape:
        raise ValueError(f"{name}: shape is {array.shape}, needs {shape}")
    return ffi.from_buffer(_C_NAMES[wanted], array)


def write_pointer(
    name: str, array: Array, dtype: npt.DTypeLike, shape: tuple[int, ...] | None = None
) -> "CData":
    """Pointer to an array that C writes: as `read_pointer`, and writeable."""
    pointer = read_pointer(name, array, dtype, shape)
    if not array.flags.writeable:
        raise ValueError(f"{name}: is read-only; pass a writeable array")
    return pointer


def weight_pointer(name: str, array: Array, unit_bytes: int) -> "tuple[CData, int]":
    """Pointer to stored weights (uint8, at a multiple of 4 bytes) and how many units they hold."""
    pointer = read_pointer(name, array, np.uint8)
    if array.ctypes.data % 4:
        raise ValueError(f"{name}: begins at an address that is no multiple of 4; pass a copy")
    if unit_bytes <= 0 or array.size % unit_bytes:
        raise ValueError(f"{name}: {array.size} bytes, needs a multiple of {unit_bytes}")
    return pointer, array.size // unit_bytes


def last_axis(name: str, array: Array, *, multiple_of: int = 1) -> int:
    """Length of the last axis of an array of one or more axes, a multiple of `multiple_of`."""
    if not isinstance(array, np.ndarray) or array.ndim == 0:
        raise ValueError(f"{name}: needs an array of at least one axis")
    length: int = array.shape[-1]
    if length == 0 or length % multiple_of:
        raise ValueError(
            f"{name}: last axis is {length}, needs a positive multiple of {multiple_of}"
        )
    return length
