"""The journal beside a file that is being written: which pieces are done, and their checksums.

A record counts only when it is whole, and its piece only when the file's bytes match: a journal may
say too little or too much after a crash and nothing wrong comes of it.
"""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import msgpack

from polyneuron.errors import DeviceError
from polyneuron.io.pack import PackError
from polyneuron.kernels.checksum import crc32c

KEY_BYTES = 32
FRAME = struct.Struct("<II")  # length and CRC-32C of a record
MAX_RECORD_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class PieceRecord:
    """One piece: its length, its CRC-32C and what packing it cost, by index of the tensor."""

    num_bytes: int
    checksum: int
    errors: dict[int, PackError] = field(default_factory=dict)

    def encode(self) -> bytes:
        """The record in its frame."""
        errors = [
            [index, error.max_abs, error.squared_error, error.squared_values]
            for index, error in self.errors.items()
        ]
        body: bytes = msgpack.packb([self.num_bytes, self.checksum, errors])
        return FRAME.pack(len(body), crc32c(body)) + body

    @classmethod
    def decode(cls, body: bytes) -> PieceRecord:
        """A record whose checksum was right."""
        num_bytes, checksum, errors = msgpack.unpackb(body)
        return cls(num_bytes, checksum, {index: PackError(*parts) for index, *parts in errors})


class WriteJournal:
    """Holds the lock of the file it belongs to, from opening to `remove` or `close`."""

    def __init__(self, path: Path, key: bytes, on_wait: Callable[[], None]) -> None:
        self.path = path
        self._key = key
        self._fd = open_locked(path, on_wait)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self._fd)

    def records(self) -> Iterator[PieceRecord]:
        """Whole records of an earlier run with the same key, in order."""
        raw = os.pread(self._fd, os.fstat(self._fd).st_size, 0)
        if raw[:KEY_BYTES] != self._key:
            return
        at = KEY_BYTES
        while at + FRAME.size <= len(raw):
            length, checksum = FRAME.unpack_from(raw, at)
            body = raw[at + FRAME.size : at + FRAME.size + length]
            if length > MAX_RECORD_BYTES or len(body) != length or crc32c(body) != checksum:
                return
            yield PieceRecord.decode(body)
            at += FRAME.size + length

    def restart(self, records: list[PieceRecord]) -> None:
        """Keep only these records; later ones are added behind them."""
        os.ftruncate(self._fd, 0)
        os.lseek(self._fd, 0, os.SEEK_SET)
        self._append(self._key + b"".join(record.encode() for record in records))

    def add(self, record: PieceRecord) -> None:
        """Note a piece whose bytes are in the file."""
        self._append(record.encode())

    def _append(self, data: bytes) -> None:
        try:
            while data:
                data = data[os.write(self._fd, data) :]
        except OSError as error:
            raise DeviceError(f"{self.path}: cannot be written: {error.strerror}") from error

    def remove(self) -> None:
        """The file is complete."""
        self.path.unlink(missing_ok=True)


def remove_stale(journal: Path, partial: Path) -> None:
    """Remove what a run left that was killed when all was done; nothing while one is at work."""
    try:
        fd = os.open(journal, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_at(fd, journal):
            partial.unlink(missing_ok=True)
            journal.unlink(missing_ok=True)
    except OSError:  # another process has the lock, or the folder cannot be changed
        return
    finally:
        os.close(fd)


def open_locked(path: Path, on_wait: Callable[[], None]) -> int:
    """Open and lock; a lock on a file that was removed meanwhile is not the lock."""
    while True:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise DeviceError(f"{path}: cannot be written: {error.strerror}") from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(fd, fcntl.LOCK_EX)
        if _is_at(fd, path):
            return fd
        os.close(fd)


def _is_at(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False
