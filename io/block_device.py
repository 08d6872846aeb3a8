"""What every device can do: take read requests, give completions, many in flight.

One owner a device: the thread that submits first. Bytes land in the memory a request names.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from polyneuron.errors import DeviceError

CLOSE_TIMEOUT_NS = 30_000_000_000
STALL_TIMEOUT_NS = 30_000_000_000
"""A device that gives nothing for so long hangs."""
HUGE_PAGE_BYTES = 2 << 20
MAX_ATTEMPTS = 3
"""Reads of one range before its error is the caller's."""


class Backend(IntEnum):
    """How reads reach the kernel; AUTO: io_uring where the kernel allows it, else threads."""

    AUTO = 0
    URING = 1
    POOL = 2


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """Bytes [offset, offset + num_bytes) of the file, cut at its end, to memory."""

    offset: int
    """A multiple of the device's offset_alignment, before the file's end."""
    num_bytes: int
    """A multiple of offset_alignment; what lies behind the file's end is undefined."""
    target: int
    """Address of num_bytes that stay where they are until the completion is reaped."""
    tag: int = 0
    """Comes back with the completion."""
    done_word: int = 0
    """Address of a 32-bit word in shared memory, stored and woken when the read ends; 0: none."""
    done_value: int = 1
    """What the word becomes when every byte has landed."""
    failed_value: int = 2
    """What it becomes when not."""


@dataclass(frozen=True, slots=True)
class ReadCompletion:
    """How a request ended."""

    tag: int
    status: int
    """0, or a negative errno: -ENODATA when the file has become shorter since it was opened."""
    num_bytes: int
    """Landed without a gap from the request's start."""
    latency_ns: int


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """What a device is, and what it has done so far."""

    path: Path
    file_bytes: int
    backend: Backend
    uring_status: int
    """Why io_uring is not in use, a negative errno; 0 when it is or was not asked for."""
    is_direct: bool
    """False: reads go through the page cache, whose pages are given back at once."""
    offset_alignment: int
    memory_alignment: int
    queue_depth: int
    max_requests: int
    has_registered_file: bool
    registered_bytes: int
    num_outstanding: int
    """Requests taken and not reaped."""
    num_reads: int
    """Handed to the kernel."""
    num_continued: int
    """Of them, those that went on after a short or interrupted read."""
    bytes_read: int


class BlockDevice(Protocol):
    """A file whose bytes are read into memory; `tests/storage/block_device_suite.py` defines it."""

    def submit(self, requests: Sequence[ReadRequest]) -> int:
        """Take requests in order; returns how many, fewer than all when full.

        Raises ValueError, and takes none, when one of them is unaligned, empty or behind the end.
        """

    def reap(self, max_completions: int, min_wait: int, timeout_ns: int) -> list[ReadCompletion]:
        """Completions in the order of their end, at most `max_completions`.

        Waits, without the GIL, until `min_wait` of them are there or as many as are outstanding, at
        most `timeout_ns`. Reads make progress only in here and in `submit`.
        """

    def info(self) -> DeviceInfo:
        """What the device is and has done."""

    def close(self, timeout_ns: int = CLOSE_TIMEOUT_NS) -> None:
        """Drop what is not in flight, wait for the rest and close the file.

        Raises DeviceError when reads are still in flight after `timeout_ns`; their memory may still
        be written.
        """


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Bytes [offset, offset + num_bytes) of a file, anywhere."""

    offset: int
    num_bytes: int


def whole_sectors(info: DeviceInfo, wanted: ByteRange) -> ByteRange:
    """The range a device can read that holds the wanted one; DeviceError behind the file's end."""
    stop = wanted.offset + wanted.num_bytes
    if stop > info.file_bytes:
        raise _short_file(info, info.file_bytes, stop - info.file_bytes)
    start = wanted.offset // info.offset_alignment * info.offset_alignment
    return ByteRange(start, -(-(stop - start) // info.offset_alignment) * info.offset_alignment)


def aligned_bytes(num_bytes: int, alignment: int) -> NDArray[np.uint8]:
    """A byte array that begins at a multiple of `alignment`, in huge pages if it is large.

    A large read into scattered small pages is so many pieces for the disk that it takes up to
    twice as long.
    """
    if num_bytes < HUGE_PAGE_BYTES:
        memory = np.empty(num_bytes + alignment, np.uint8)
    else:
        alignment = max(alignment, HUGE_PAGE_BYTES)
        mapped = mmap.mmap(-1, num_bytes + alignment, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):  # a kernel without huge pages
            mapped.madvise(mmap.MADV_HUGEPAGE)
        memory = np.frombuffer(mapped, np.uint8)
    start = -int(memory.ctypes.data) % alignment
    return memory[start : start + num_bytes]


def device_error(message: str, status: int) -> DeviceError:
    """A DeviceError that carries the errno of a negative status."""
    error = DeviceError(message)
    error.errno = -status
    return error


def read_error(info: DeviceInfo, request: ReadRequest, completion: ReadCompletion) -> DeviceError:
    """The error for a request that failed, naming file and place."""
    at = request.offset + completion.num_bytes
    if completion.status == -errno.ENODATA:
        return _short_file(info, at, min(request.offset + request.num_bytes, info.file_bytes) - at)
    reason = os.strerror(-completion.status)
    text = f"{info.path}: read at byte {at} failed: {reason}; check the disk"
    return device_error(text, completion.status)


def stall_error(info: DeviceInfo) -> DeviceError:
    """The error for a device that hangs."""
    text = f"{info.path}: no read has ended for {STALL_TIMEOUT_NS // 10**9} s; the disk hangs"
    return device_error(text, -errno.ETIMEDOUT)


def _short_file(info: DeviceInfo, end: int, missing: int) -> DeviceError:
    text = f"{info.path}: ends at byte {end}, {missing} bytes are missing; copy it again"
    return device_error(text, -errno.ENODATA)
