"""CRC-32C, the checksum of model files; the GIL is free while it runs."""

from typing import Any

from polyneuron.kernels._kernels import ffi, lib


def crc32c(data: Any, crc: int = 0) -> int:
    """CRC-32C of a contiguous buffer, going on from `crc`."""
    return lib.crc32c(crc, ffi.from_buffer(data), memoryview(data).nbytes)


def crc32c_portable(data: Any, crc: int = 0) -> int:
    """The same by tables, as a CPU without the instruction computes it."""
    return lib.crc32c_portable(crc, ffi.from_buffer(data), memoryview(data).nbytes)
