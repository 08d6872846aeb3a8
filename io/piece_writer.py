"""Writes a file piece by piece from front to back; killed anywhere, it goes on when run again.

Data go to `FILE.partial`, the pieces that are done to a journal beside it. Then the file is synced
and takes its name, so a file of that name is complete.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from polyneuron.errors import ConfigError, DeviceError
from polyneuron.io.file_device import FileDevice, open_device
from polyneuron.io.pack import PackError
from polyneuron.io.staged_file import SECTOR_BYTES, StagedFile
from polyneuron.io.write_journal import PieceRecord, WriteJournal
from polyneuron.kernels.checksum import crc32c

VERIFY_BYTES = 8 << 20


def partial_path(output: Path) -> Path:
    """Where the data are until the file is complete."""
    return output.with_name(output.name + ".partial")


def journal_path(output: Path) -> Path:
    """Where the pieces that are done are noted."""
    return output.with_name(output.name + ".partial.journal")


def check_output(output: Path) -> None:
    """ConfigError unless a file can be written there."""
    if output.is_dir():
        raise ConfigError(f"{output}: a folder; give the name of the file to write")
    if output.exists() and not output.is_file():  # a new file would take a device's place
        raise ConfigError(f"{output}: no plain file; give the name of the file to write")
    if not output.parent.is_dir():
        raise ConfigError(f"{output.parent}: no such folder; make it first")


def check_free_space(wanted: Mapping[Path, int]) -> None:
    """ConfigError unless the file systems have room for these files (path -> bytes).

    What an earlier run has written of one counts.
    """
    needs: dict[int, int] = {}  # device -> bytes
    for output, num_bytes in wanted.items():
        try:
            space, device = os.statvfs(output.parent), output.parent.stat().st_dev
        except OSError as error:
            raise ConfigError(f"{output.parent}: {error.strerror}; make the folder first") from None
        partial = partial_path(output)
        has_been = partial.stat().st_blocks * 512 if partial.exists() else 0
        needs[device] = needs.get(device, 0) + num_bytes - has_been
        has = space.f_bavail * space.f_frsize
        if needs[device] > has:
            raise ConfigError(
                f"{output}: needs {needs[device] / 2**30:.2f} GiB, {output.parent} has "
                f"{has / 2**30:.2f} GiB free; make room or give another place"
            )


class RunningSums(Protocol):
    """Checksums kept of all bytes, in the order of the file."""

    def add(self, data: memoryview) -> None:
        """The next bytes."""

    def mark(self) -> tuple[int, int, int]:
        """A place to go back to."""

    def back_to(self, mark: tuple[int, int, int]) -> None:
        """Forget what was added since."""


class PieceWriter:
    """Takes pieces in the order of the file; the first `num_pieces` ones are there already.

    Pieces fill the file from `start`, a multiple of 4096, to `end`, which is one, too. `key` names
    what is written and how it is cut: another key begins anew.
    """

    def __init__(
        self,
        output: Path,
        extent: tuple[int, int],
        key: bytes,
        on_wait: Callable[[], None] = lambda: None,
        sums: RunningSums | None = None,
    ) -> None:
        self.output = output
        self.start, self.end = extent
        self.num_pieces = 0
        self.num_bytes = 0
        """Of data that are there, from `start`."""
        self.errors: dict[int, PackError] = {}
        """What packing cost, by index of the tensor."""
        self._sums = sums
        self._waiting: list[tuple[int, PieceRecord]] = []
        self._journal = WriteJournal(journal_path(output), key, on_wait)
        try:
            self._file = StagedFile(partial_path(output))
        except DeviceError:
            self._journal.__exit__(None, None, None)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.__exit__(kind, error, trace)
        self._journal.__exit__(kind, error, trace)

    def resume(self, progress: Callable[[int, int], None]) -> None:
        """Take over what an earlier run has written and what still has its checksum."""
        kept = []
        partial = partial_path(self.output)
        if partial.stat().st_size:
            with open_device(partial, VERIFY_BYTES) as device:
                for record in self._journal.records():
                    if not self._is_there(device, record):
                        break
                    kept.append(record)
                    self._count(record)
                    progress(self.num_bytes, self.end - self.start)
        self._journal.restart(kept)
        self._file.seek(self._position // SECTOR_BYTES * SECTOR_BYTES, self._sector_begun())

    def _is_there(self, device: FileDevice, record: PieceRecord) -> bool:
        """Whether the file has a piece's bytes; if so, they have been added to the checksums."""
        mark, crc = self._sums.mark() if self._sums else (0, 0, 0), 0
        try:
            for at in range(0, record.num_bytes, VERIFY_BYTES):
                count = min(VERIFY_BYTES, record.num_bytes - at)
                view = device.read(self._position + at, count)
                crc = crc32c(view, crc)
                if self._sums:
                    self._sums.add(view)
                view.release()
        except DeviceError:  # the file ends before its journal does
            crc = ~record.checksum
        if crc != record.checksum and self._sums:
            self._sums.back_to(mark)
        return crc == record.checksum

    @property
    def _position(self) -> int:
        return self.start + self.num_bytes

    def _sector_begun(self) -> bytes:
        start = self._position // SECTOR_BYTES * SECTOR_BYTES
        if start == self._position:
            return b""
        with open_device(partial_path(self.output), SECTOR_BYTES) as device:
            return bytes(device.read(start, self._position - start))

    def _count(self, record: PieceRecord) -> None:
        self.num_pieces += 1
        self.num_bytes += record.num_bytes
        for index, error in record.errors.items():
            self.errors[index] = self.errors.get(index, PackError()) + error

    def write_piece(self, data: memoryview, errors: dict[int, PackError]) -> None:
        """Add the next piece; `errors` by index of the tensor."""
        record = PieceRecord(len(data), crc32c(data), errors)
        if self._sums:
            self._sums.add(data)
        self._file.append(data)
        self._count(record)
        self._waiting.append((self._position, record))
        self._note_landed()

    def _note_landed(self) -> None:
        """Journal the pieces whose bytes have reached the file."""
        while self._waiting and self._waiting[0][0] <= self._file.num_landed:
            self._journal.add(self._waiting.pop(0)[1])

    def finish(self) -> None:
        """Give the file, whose pieces are all written, its name."""
        raise NotImplementedError

    def _seal(self, file_bytes: int, head: bytes = b"") -> None:
        """Write `head` at the front, cut to `file_bytes`, sync, and give the file its name."""
        self._file.flush()
        self._note_landed()
        if head:
            self._file.write_at(0, head)
        self._file.truncate(file_bytes)
        self._file.sync()
        os.replace(partial_path(self.output), self.output)
        sync_folder(self.output.parent)
        self._journal.remove()

    def give_up(self) -> None:
        """Leave nothing behind."""
        partial_path(self.output).unlink(missing_ok=True)
        self._journal.remove()


def sync_folder(folder: Path) -> None:
    """Wait until a folder's names are on the device."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
