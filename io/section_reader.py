"""Reads sections of a neuron-cluster file straight into the arena, as they are stored.

Direct I/O where the file system allows it; several requests of a MiB or more are in flight at once.
"""

from __future__ import annotations

import errno
import mmap
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from polyneuron.errors import ChecksumError, DeviceError
from polyneuron.io.ncf_format import EXTENT_BYTES, NcfSection
from polyneuron.io.weight_reader import ReadReport
from polyneuron.kernels.arena import Arena
from polyneuron.kernels.checksum import crc32c

REQUEST_BYTES = 2 * EXTENT_BYTES
QUEUE_DEPTH = 4
MAX_TRIES = 3
PROBE_BYTES = 512 << 20


@dataclass(frozen=True, slots=True)
class SectionRead:
    """One section to be brought to `offset` in the arena."""

    section: NcfSection
    offset: int

    @property
    def file_bytes(self) -> int:
        """Bytes to be read from the file."""
        return self.section.num_bytes


class Landing(Protocol):
    """Memory that reads land in."""

    def bytes_at(self, offset: int, num_bytes: int) -> memoryview:
        """The writable bytes at an offset."""


class SectionReader:
    """One open neuron-cluster file and the threads that read it."""

    def __init__(self, path: Path, arena: Landing) -> None:
        self._path, self._arena = path, arena
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
            self.is_direct = True
        except OSError:
            self._open_buffered()
        self._pool = ThreadPoolExecutor(QUEUE_DEPTH, thread_name_prefix="read")

    def _open_buffered(self) -> None:
        self._fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        self.is_direct = False

    def submit(self, section: NcfSection, offset: int, *, verify: bool) -> list[Future[int]]:
        """Order a section's bytes to arena `offset`; the futures give bytes read, in order."""
        return [
            self._pool.submit(self._read, section, start, offset + start, verify)
            for start in range(0, section.num_bytes, REQUEST_BYTES)
        ]

    def _read(self, section: NcfSection, start: int, target: int, verify: bool) -> int:
        num_bytes = min(REQUEST_BYTES, section.num_bytes - start)
        view = self._arena.bytes_at(target, num_bytes)
        for attempt in range(1, MAX_TRIES + 1):
            try:
                self._fill(view, section.offset + start)
                if verify:
                    self._verify(section, start, view)
                return num_bytes
            except OSError as error:
                if attempt == MAX_TRIES:
                    raise DeviceError(
                        error.errno,
                        f"{self._path}: read of {num_bytes} bytes at {section.offset + start} "
                        f"failed {MAX_TRIES} times: {error.strerror or error}",
                    ) from None
        raise AssertionError("the loop returns or raises")

    def _fill(self, view: memoryview, position: int) -> None:
        done = 0
        while done < len(view):
            try:
                count = os.preadv(self._fd, [view[done:]], position + done)
            except OSError as error:
                if not self.is_direct or error.errno != errno.EINVAL:
                    raise
                self._open_buffered()
                continue
            if count == 0:
                raise DeviceError(f"{self._path}: ends at byte {position + done}; copy it again")
            done += count
        if not self.is_direct:
            os.posix_fadvise(self._fd, position, len(view), os.POSIX_FADV_DONTNEED)

    def _verify(self, section: NcfSection, start: int, view: memoryview) -> None:
        first = start // EXTENT_BYTES
        for index in range(first, first + -(-len(view) // EXTENT_BYTES)):
            at = index * EXTENT_BYTES - start
            if crc32c(view[at : at + EXTENT_BYTES]) != int(section.checksums[index]):
                raise ChecksumError(
                    f"{self._path}: section {section.name}, MiB {index}: checksum does not match: "
                    f"the file is damaged; fetch or convert it again"
                )

    def close(self) -> None:
        """Wait for reads in flight and close the file."""
        self._pool.shutdown(cancel_futures=True)
        os.close(self._fd)


class _Scratch:
    """A buffer of a few requests in which later reads overwrite earlier ones."""

    def __init__(self) -> None:
        self._map = mmap.mmap(-1, QUEUE_DEPTH * REQUEST_BYTES)

    def bytes_at(self, offset: int, num_bytes: int) -> memoryview:
        start = offset % (QUEUE_DEPTH * REQUEST_BYTES)
        return memoryview(self._map)[start : start + num_bytes]


def sequential_rate(path: Path, sections: Sequence[NcfSection]) -> float:
    """Bytes a second at which layers can be read, measured on the first of them."""
    reader, total, started = SectionReader(path, _Scratch()), 0, time.perf_counter()
    try:
        for section in sections:
            if total >= PROBE_BYTES:
                break
            parts = reader.submit(section, 0, verify=False)
            total += sum(part.result() for part in parts)
        return total / (time.perf_counter() - started)
    finally:
        reader.close()


def read_sections(
    path: Path, reads: list[SectionRead], arena: Arena, progress: Callable[[int], None]
) -> ReadReport:
    """Bring sections to their places, verified; `progress` gets the bytes so far.

    Raises DeviceError or ChecksumError naming file and place.
    """
    reader = SectionReader(path, arena)
    total = 0
    try:
        for read in reads:
            for part in reader.submit(read.section, read.offset, verify=True):
                total += part.result()
                progress(total)
        return ReadReport(total, reader.is_direct, {})
    finally:
        reader.close()
