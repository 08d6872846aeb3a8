"""A file written from front to back in large aligned pieces, past the page cache where possible."""

from __future__ import annotations

import errno
import mmap
import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self

from polyneuron.errors import DeviceError

SECTOR_BYTES = 4096
STAGE_BYTES = 8 << 20


class StagedFile:
    """Appends go into one of two buffers; a full one is written by a thread of its own meanwhile.

    `num_landed` is the offset up to which the file has been written. With direct I/O refused, data
    go through the page cache, are synced buffer by buffer and given back at once.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stage_bytes = STAGE_BYTES
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        try:
            self._fd, self.is_direct = os.open(path, flags | os.O_DIRECT, 0o666), True
        except OSError:
            self._fd, self.is_direct = self._open(flags), False
        self._stages = [mmap.mmap(-1, self._stage_bytes) for _ in range(2)]
        self._fill = 0
        self._start = 0
        self._pending: Future[None] | None = None
        self._pending_end = 0
        self.num_landed = 0
        self._thread = ThreadPoolExecutor(1, "file-writer")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close; what has not been flushed is dropped."""
        self._thread.shutdown(wait=True)
        os.close(self._fd)

    def _open(self, flags: int) -> int:
        try:
            return os.open(self.path, flags, 0o666)
        except OSError as error:
            raise DeviceError(f"{self.path}: cannot be written: {error.strerror}") from error

    def truncate(self, num_bytes: int) -> None:
        """Cut the file to `num_bytes` or let it grow to them."""
        os.ftruncate(self._fd, num_bytes)

    def seek(self, offset: int, already: bytes = b"") -> None:
        """Go on at `offset`, a multiple of 4096; `already`: bytes there that stay as they are."""
        if offset % SECTOR_BYTES or len(already) >= SECTOR_BYTES:
            raise ValueError(f"{offset}: appends begin at a multiple of {SECTOR_BYTES}")
        self.flush()
        self._start = self.num_landed = offset
        self._stages[0][: len(already)] = already
        self._fill = len(already)

    def append(self, data: memoryview) -> None:
        """Add bytes at the end."""
        while data:
            count = min(len(data), self._stage_bytes - self._fill)
            self._stages[0][self._fill : self._fill + count] = data[:count]
            self._fill += count
            data = data[count:]
            if self._fill == self._stage_bytes:
                self._hand_over()

    def flush(self) -> None:
        """Write what has been appended, a multiple of 4096 bytes, and wait for it."""
        if self._fill:
            self._hand_over()
        self._wait()

    def write_at(self, offset: int, data: bytes) -> None:
        """Write aligned bytes somewhere else in the file; appends must have been flushed."""
        stage = mmap.mmap(-1, len(data))
        stage[:] = data
        self._write(stage, len(data), offset)

    def sync(self) -> None:
        """Wait until everything written is on the device."""
        try:
            os.fsync(self._fd)
        except OSError as error:
            raise self._failed(error, 0) from error

    def _hand_over(self) -> None:
        self._wait()
        full, count, start = self._stages[0], self._fill, self._start
        self._pending = self._thread.submit(self._write, full, count, start)
        self._pending_end = start + count
        self._stages.reverse()
        self._start, self._fill = start + count, 0

    def _wait(self) -> None:
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.result()
            self.num_landed = self._pending_end

    def _write(self, stage: mmap.mmap, num_bytes: int, offset: int) -> None:
        view, done = memoryview(stage), 0
        while done < num_bytes:
            done += self._pwrite(view[done:num_bytes], offset + done)
        if not self.is_direct:
            os.fdatasync(self._fd)
            os.posix_fadvise(self._fd, offset, num_bytes, os.POSIX_FADV_DONTNEED)

    def _pwrite(self, view: memoryview, offset: int) -> int:
        try:
            count = os.pwrite(self._fd, view, offset)  # EINTR is retried by Python itself
        except OSError as error:
            if not self.is_direct or error.errno != errno.EINVAL:
                raise self._failed(error, offset) from error
            self._fall_back()
            return self._pwrite(view, offset)
        if count == 0:
            raise DeviceError(errno.EIO, f"{self.path}: nothing was written at byte {offset}")
        if self.is_direct and count % SECTOR_BYTES and count < len(view):
            self._fall_back()  # it ended inside a sector: the rest cannot be direct
        return count

    def _fall_back(self) -> None:
        fd = self._open(os.O_RDWR | os.O_CLOEXEC)
        os.dup2(fd, self._fd, inheritable=False)
        os.close(fd)
        self.is_direct = False

    def _failed(self, error: OSError, offset: int) -> DeviceError:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return DeviceError(
                f"{self.path}: no space left at byte {offset:,}; make room and run it again: it "
                "goes on where it stopped"
            )
        return DeviceError(f"{self.path}: write at byte {offset:,} failed: {error.strerror}")
