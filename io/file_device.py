"""A file read by the C engine: io_uring or threads, past the page cache where that works."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from polyneuron.errors import ConfigError, ProtocolError
from polyneuron.io.block_device import (
    CLOSE_TIMEOUT_NS,
    MAX_ATTEMPTS,
    STALL_TIMEOUT_NS,
    Backend,
    ByteRange,
    DeviceInfo,
    ReadCompletion,
    ReadRequest,
    aligned_bytes,
    device_error,
    read_error,
    stall_error,
    whole_sectors,
)
from polyneuron.kernels._kernels import ffi, lib

if TYPE_CHECKING:
    from polyneuron.kernels._kernels import CData

BATCH = 64
"""Requests and completions passed to C in one call."""
IO_BUFFERED = 1


@dataclass(frozen=True, slots=True)
class DeviceOptions:
    """How a file is read."""

    queue_depth: int = 32
    """Reads in flight; requests of more than 1 MiB are split to use it."""
    max_requests: int = 256
    """Requests taken and not yet reaped."""
    backend: Backend = Backend.AUTO
    is_buffered: bool = False
    """Through the page cache even where direct reads work."""

    def __post_init__(self) -> None:
        if not 1 <= self.queue_depth <= 1024:
            raise ConfigError(f"queue_depth={self.queue_depth}: needs 1 to 1024")
        if not self.queue_depth <= self.max_requests <= 1 << 20:
            raise ConfigError(
                f"max_requests={self.max_requests}: needs queue_depth ({self.queue_depth}) to 2^20"
            )


class FileDevice:
    """`BlockDevice` over one regular file.

    `read` serves who wants one range at a time, `capacity` bytes at most.
    """

    def __init__(self, path: Path, options: DeviceOptions | None = None, capacity: int = 0) -> None:
        self.path = path
        self._engine = _open(path, options or DeviceOptions())
        self._requests = ffi.new("struct read_request[]", BATCH)
        self._completions = ffi.new("struct read_completion[]", BATCH)
        self._capacity = capacity
        self._buffer: NDArray[np.uint8] | None = None
        self._is_open = True

    @property
    def engine(self) -> CData:
        """`struct io_engine *`, for C code that reads through it; valid until `close`."""
        if not self._is_open:
            raise ProtocolError(f"{self.path}: the device is closed")
        return self._engine

    def register_memory(self, address: int, num_bytes: int) -> bool:
        """Let the kernel keep this memory mapped, so that reads into it cost less.

        Once, before the first `submit`. False when RLIMIT_MEMLOCK or the back end does not allow
        it: everything works as without.
        """
        base = ffi.cast("void *", address)
        return bool(lib.io_register_memory(self.engine, base, num_bytes) == 0)

    def submit(self, requests: Sequence[ReadRequest]) -> int:
        """As `BlockDevice`."""
        info = self._info()
        for request in requests:
            self._check(info, request)
        total = 0
        while total < len(requests):
            batch = requests[total : total + BATCH]
            for index, request in enumerate(batch):
                _fill(self._requests[index], request)
            taken = self._checked(lib.io_submit(self.engine, self._requests, len(batch)))
            total += taken
            if taken < len(batch):
                break
        return total

    def reap(self, max_completions: int, min_wait: int, timeout_ns: int) -> list[ReadCompletion]:
        """As `BlockDevice`."""
        found: list[ReadCompletion] = []
        end_ns = lib.monotonic_ns() + timeout_ns
        while len(found) < max_completions:
            room = min(BATCH, max_completions - len(found))
            missing = max(min_wait - len(found), 0)
            left_ns = max(end_ns - lib.monotonic_ns(), 0) if missing else 0
            count = self._checked(
                lib.io_reap(self.engine, self._completions, room, missing, left_ns)
            )
            found += [_completion(self._completions[index]) for index in range(count)]
            if count < room:
                break
        return found

    def read(self, offset: int, num_bytes: int) -> memoryview:
        """The bytes [offset, offset + num_bytes), anywhere; valid until the next `read`.

        Not while requests are outstanding. Raises DeviceError naming file and place.
        """
        if num_bytes > self._capacity:
            raise ValueError(f"{num_bytes} bytes asked, the buffer holds {self._capacity}")
        info = self.info()
        span = whole_sectors(info, ByteRange(offset, num_bytes))
        if self._buffer is None:
            alignment = max(info.offset_alignment, info.memory_alignment)
            self._buffer = aligned_bytes(self._capacity + 2 * alignment, alignment)
        if num_bytes:
            self._read_now(info, span, int(self._buffer.ctypes.data))
        return self._buffer.data[offset - span.offset : offset - span.offset + num_bytes]

    def _read_now(self, info: DeviceInfo, span: ByteRange, target: int) -> None:
        request = ReadRequest(span.offset, span.num_bytes, target)
        for _ in range(MAX_ATTEMPTS):
            self.submit([request])
            completions = self.reap(1, 1, STALL_TIMEOUT_NS)
            if not completions:
                raise stall_error(info)
            if completions[0].status == 0:
                return
        raise read_error(info, request, completions[0])

    def info(self) -> DeviceInfo:
        """As `BlockDevice`."""
        info = self._info()
        return DeviceInfo(
            path=self.path,
            file_bytes=info.file_bytes,
            backend=Backend(info.backend),
            uring_status=info.uring_status,
            is_direct=bool(info.is_direct),
            offset_alignment=info.offset_alignment,
            memory_alignment=info.memory_alignment,
            queue_depth=info.queue_depth,
            max_requests=info.max_requests,
            has_registered_file=bool(info.has_registered_file),
            registered_bytes=info.registered_bytes,
            num_outstanding=info.num_outstanding,
            num_reads=info.num_reads,
            num_continued=info.num_continued,
            bytes_read=info.bytes_read,
        )

    def close(self, timeout_ns: int = CLOSE_TIMEOUT_NS) -> None:
        """As `BlockDevice`; nothing happens when it is closed already."""
        if self._is_open:
            self._checked(lib.io_close(self._engine, timeout_ns))
            self._is_open = False

    def _info(self) -> Any:
        info = ffi.new("struct io_info *")
        lib.io_get_info(self.engine, info)
        return info

    def _check(self, info: Any, request: ReadRequest) -> None:
        """Say which field is wrong; C refuses the same and could not."""
        align, memory_align = info.offset_alignment, info.memory_alignment
        if not 0 <= request.offset < info.file_bytes or request.offset % align:
            raise ValueError(
                f"offset {request.offset}: needs a multiple of {align} below {info.file_bytes}"
            )
        if request.num_bytes <= 0 or request.num_bytes % align:
            raise ValueError(f"num_bytes {request.num_bytes}: needs a positive multiple of {align}")
        if request.target <= 0 or request.target % memory_align:
            raise ValueError(f"target {request.target:#x}: needs a multiple of {memory_align}")
        if request.done_word % 4:
            raise ValueError(f"done_word {request.done_word:#x}: needs a multiple of 4")

    def _checked(self, result: int) -> int:
        if result >= 0:
            return result
        if result == -errno.EPERM:
            raise ProtocolError(f"{self.path}: used by a thread that is not the device's owner")
        if result == -errno.ETIMEDOUT:
            raise device_error(f"{self.path}: reads are still in flight; the disk hangs", result)
        reason = os.strerror(-result)
        raise device_error(f"{self.path}: reading failed: {reason}", result)


def _open(path: Path, options: DeviceOptions) -> CData:
    c_options: Any = ffi.new("struct io_options *")
    c_options.queue_depth = options.queue_depth
    c_options.max_requests = options.max_requests
    c_options.backend = options.backend
    c_options.flags = IO_BUFFERED if options.is_buffered else 0
    engine = ffi.new("struct io_engine **")
    status = lib.io_open(os.fsencode(path), c_options, engine)
    if status == -errno.ESPIPE:
        raise device_error(f"{path}: is not a regular file; copy it to a disk", status)
    if status != 0:
        raise device_error(f"{path}: cannot be opened: {os.strerror(-status)}", status)
    opened: CData = engine[0]
    return opened


def _fill(c_request: Any, request: ReadRequest) -> None:
    c_request.offset = request.offset
    c_request.num_bytes = request.num_bytes
    c_request.target = ffi.cast("void *", request.target)
    c_request.tag = request.tag
    c_request.done_word = ffi.cast("uint32_t *", request.done_word)
    c_request.done_value = request.done_value
    c_request.failed_value = request.failed_value


def _completion(c_completion: Any) -> ReadCompletion:
    return ReadCompletion(
        tag=c_completion.tag,
        status=c_completion.status,
        num_bytes=c_completion.num_bytes,
        latency_ns=c_completion.latency_ns,
    )


@contextmanager
def open_device(
    path: Path, capacity: int = 0, options: DeviceOptions | None = None
) -> Iterator[FileDevice]:
    """A `FileDevice` whose `read` takes `capacity` bytes at most, closed at the end."""
    device = FileDevice(path, options, capacity)
    try:
        yield device
    finally:
        device.close()
