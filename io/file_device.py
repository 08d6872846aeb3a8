"""A model file read in sequence, past the page cache where the file system allows it."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from polyneuron.errors import DeviceError

SECTOR_BYTES = 4096
"""Start, length and buffer of direct reads are multiples of this on every known device."""


class FileDevice:
    """Reads byte ranges of one file into a buffer of its own, `capacity` bytes at most at once.

    Direct I/O is probed with the first read; a file system that refuses it is read through the page
    cache instead, and the pages are given back at once. `is_direct` says which it is.
    """

    def __init__(self, path: Path, capacity: int) -> None:
        self.path = path
        self.capacity = capacity
        self._fd, self.is_direct = self._open(path)
        span = -(-capacity // SECTOR_BYTES) * SECTOR_BYTES + 2 * SECTOR_BYTES
        self._buffer = mmap.mmap(-1, span)
        self.num_bytes = os.fstat(self._fd).st_size

    @staticmethod
    def _open(path: Path) -> tuple[int, bool]:
        try:
            return os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC), True
        except OSError:
            return os.open(path, os.O_RDONLY | os.O_CLOEXEC), False

    def _fall_back(self) -> None:
        os.close(self._fd)
        self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        self.is_direct = False

    def read(self, offset: int, num_bytes: int) -> memoryview:
        """The bytes [offset, offset + num_bytes); valid until the next read.

        Raises DeviceError naming file and place when they cannot be had.
        """
        if num_bytes > self.capacity:
            raise ValueError(f"{num_bytes} bytes asked, the buffer holds {self.capacity}")
        start = offset // SECTOR_BYTES * SECTOR_BYTES
        stop = -(-(offset + num_bytes) // SECTOR_BYTES) * SECTOR_BYTES
        view = memoryview(self._buffer)
        filled = 0
        while filled < offset + num_bytes - start:
            count = self._pread(view[filled : stop - start], start + filled)
            if count == 0:
                raise DeviceError(
                    f"{self.path}: ends at byte {start + filled}, "
                    f"{offset + num_bytes - start - filled} bytes are missing; copy it again"
                )
            # A short direct read may end inside a sector: the next one starts at its beginning.
            filled += count
            if filled < offset + num_bytes - start and self.is_direct:
                filled -= filled % SECTOR_BYTES
                if count < SECTOR_BYTES:
                    self._fall_back()
        if not self.is_direct:
            os.posix_fadvise(self._fd, start, stop - start, os.POSIX_FADV_DONTNEED)
        return view[offset - start : offset - start + num_bytes]

    def _pread(self, view: memoryview, offset: int) -> int:
        try:
            return os.preadv(self._fd, [view], offset)  # EINTR is retried by Python itself
        except OSError as error:
            if self.is_direct:
                self._fall_back()
                return self._pread(view, offset)
            raise DeviceError(
                f"{self.path}: read at byte {offset} failed: {error.strerror}"
            ) from error

    def close(self) -> None:
        """Close the file; views handed out before must be gone."""
        os.close(self._fd)
        with suppress(BufferError):  # an error on its way may hold views in its traceback
            self._buffer.close()


@contextmanager
def open_device(path: Path, capacity: int) -> Iterator[FileDevice]:
    """A `FileDevice`, closed at the end."""
    device = FileDevice(path, capacity)
    try:
        yield device
    finally:
        device.close()
