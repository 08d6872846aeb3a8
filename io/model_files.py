"""The bytes of one model in several files, as one run of addresses.

A tensor lies at addresses, wherever its bytes are: in a part of a split GGUF, in shards of a
checkpoint expert by expert, in rows of another order, or nowhere, when they are made from other
keys. Who reads by address need not know. Through the page cache, whose pages are given back at
once: shards begin anywhere, so direct reads would have to be copied anyway.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from polyneuron.errors import DeviceError, FormatError
from polyneuron.io.block_device import MAX_ATTEMPTS, ByteRange

Bytes = NDArray[np.uint8]

NUM_BUFFERS = 3
MAX_OPEN = 8


@dataclass(frozen=True, slots=True)
class RowSwap:
    """Rows that lie half after half and are wanted in turn: 0, n/2, 1, n/2 + 1, ..."""

    num_rows: int
    row_bytes: int

    @property
    def num_bytes(self) -> int:
        """Bytes within which rows change places."""
        return self.num_rows * self.row_bytes

    def apply(self, raw: Bytes) -> Bytes:
        """Whole groups of rows in the order in which they are wanted."""
        halves = raw.reshape(-1, 2, self.num_rows // 2, self.row_bytes)
        return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(-1)


@dataclass(frozen=True, slots=True)
class Extent:
    """Addresses [begin, begin + num_bytes), whose bytes lie together."""

    begin: int
    num_bytes: int
    path: Path | None = None
    """None: the bytes are `made`."""
    offset: int = 0
    """In the file."""
    swap: RowSwap | None = None
    made: bytes = field(default=b"", repr=False)

    @property
    def end(self) -> int:
        """The first address behind it."""
        return self.begin + self.num_bytes


@dataclass(frozen=True, slots=True, eq=False)
class ModelFiles:
    """Where every address of a model lies; extents follow each other without a gap."""

    extents: tuple[Extent, ...] = field(repr=False)
    paths: tuple[Path, ...]
    """Every file that what was read depends on, those without tensors too."""

    @classmethod
    def of_file(cls, path: Path, num_bytes: int) -> Self:
        """One file as it lies."""
        return cls((Extent(0, num_bytes, path),), (path,))

    @property
    def is_plain(self) -> bool:
        """Whether an address is a place in the one file there is."""
        return len(self.paths) == 1 and len(self.extents) == 1

    @property
    def num_bytes(self) -> int:
        """Addresses there are."""
        return self.extents[-1].end if self.extents else 0

    def stamp(self) -> tuple[tuple[int, int], ...]:
        """Length and time of the last change of each file: another one means another content."""
        try:
            found = [os.stat(path) for path in self.paths]
        except OSError as error:
            raise FormatError(f"{error.filename}: {error.strerror}; fetch it again") from None
        return tuple((status.st_size, status.st_mtime_ns) for status in found)


class FilesReader:
    """Reads at addresses; of one thread. Closed at the end of `with`."""

    def __init__(self, files: ModelFiles) -> None:
        self._files = files
        self._begins = [extent.begin for extent in files.extents]
        self._fds: dict[Path, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close every file."""
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()

    def read(self, address: int, out: Bytes) -> None:
        """Fill `out` from `address` on; DeviceError naming the file when it cannot be filled."""
        done = 0
        for extent, skip, count in self._pieces(address, len(out)):
            self._read_extent(extent, skip, out[done : done + count])
            done += count
        if done < len(out):
            raise DeviceError(
                f"{self._files.paths[0]}: no byte at {address + done}; fetch it again"
            )

    def forget(self, address: int, num_bytes: int) -> None:
        """Give the pages of what was read back to the system."""
        for extent, skip, count in self._pieces(address, num_bytes):
            if extent.path is not None:
                fd, start = self._fd(extent.path), extent.offset + skip
                os.posix_fadvise(fd, start, count, os.POSIX_FADV_DONTNEED)

    def _pieces(self, address: int, num_bytes: int) -> Iterator[tuple[Extent, int, int]]:
        """Extent, first byte in it, bytes."""
        stop = address + num_bytes
        first = max(bisect_right(self._begins, address) - 1, 0)
        for index in range(first, len(self._begins)):
            extent = self._files.extents[index]
            if extent.begin >= stop:
                return
            start = max(address, extent.begin)
            if start < extent.end:
                yield extent, start - extent.begin, min(stop, extent.end) - start

    def _read_extent(self, extent: Extent, skip: int, out: Bytes) -> None:
        if extent.path is None:
            out[:] = np.frombuffer(extent.made, np.uint8, len(out), skip)
        elif extent.swap is None:
            self._read_file(extent.path, extent.offset + skip, out)
        else:
            group = extent.swap.num_bytes
            first = skip // group * group
            end = -(-(skip + len(out)) // group) * group
            raw = np.empty(end - first, np.uint8)
            self._read_file(extent.path, extent.offset + first, raw)
            out[:] = extent.swap.apply(raw)[skip - first : skip - first + len(out)]

    def _read_file(self, path: Path, offset: int, out: Bytes) -> None:
        view, done, attempts = out.data, 0, 0
        fd = self._fd(path)
        while done < len(view):
            try:
                count = os.preadv(fd, [view[done:]], offset + done)
            except OSError as error:
                attempts += 1
                if attempts < MAX_ATTEMPTS:
                    continue
                failed = DeviceError(
                    f"{path}: read at byte {offset + done} failed: {error.strerror}; check the disk"
                )
                failed.errno = error.errno
                raise failed from error
            if count == 0:
                raise DeviceError(
                    f"{path}: ends at byte {offset + done}, {len(view) - done} bytes are missing; "
                    "fetch it again"
                )
            done += count

    def _fd(self, path: Path) -> int:
        fd = self._fds.get(path)
        if fd is None:
            if len(self._fds) >= MAX_OPEN:
                os.close(self._fds.pop(next(iter(self._fds))))
            try:
                fd = self._fds[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise DeviceError(f"{path}: cannot be opened: {error.strerror}") from error
        return fd


def views_of(files: ModelFiles, ranges: Sequence[ByteRange]) -> Generator[memoryview, None, None]:
    """The bytes of each range in turn, as `read_ahead` gives them; one thread reads ahead."""
    longest = max((wanted.num_bytes for wanted in ranges), default=0)
    buffers = [np.empty(longest, np.uint8) for _ in range(NUM_BUFFERS)]

    def fetch(index: int) -> None:
        wanted = ranges[index]
        reader.read(wanted.offset, buffers[index % NUM_BUFFERS][: wanted.num_bytes])
        reader.forget(wanted.offset, wanted.num_bytes)

    with FilesReader(files) as reader, ThreadPoolExecutor(1, "read-ahead") as thread:
        first = range(min(NUM_BUFFERS, len(ranges)))
        waiting: list[Future[None]] = [thread.submit(fetch, index) for index in first]
        for index, wanted in enumerate(ranges):
            waiting[index].result()
            yield buffers[index % NUM_BUFFERS].data[: wanted.num_bytes]
            if index + NUM_BUFFERS < len(ranges):
                waiting.append(thread.submit(fetch, index + NUM_BUFFERS))
