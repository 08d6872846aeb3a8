"""Writes a neuron-cluster file from front to back; killed anywhere, it goes on when run again.

Data go to `FILE.partial`, the pieces that are done to a journal beside it. The head is written
last; then the file is synced and takes its name, so a file of that name is complete.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from polyneuron.errors import ConfigError, DeviceError
from polyneuron.io.file_device import FileDevice, open_device
from polyneuron.io.file_kind import NCF_MAGIC
from polyneuron.io.ncf_format import HEADER, PAGE_BYTES, VERSION, NcfManifest, NcfSection
from polyneuron.io.ncf_manifest import encode_manifest
from polyneuron.io.pack import PackError
from polyneuron.io.staged_file import StagedFile
from polyneuron.io.write_journal import PieceRecord, WriteJournal
from polyneuron.kernels.checksum import crc32c

VERIFY_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class NcfPlan:
    """A manifest with checksums and errors still zero, and where the data begin."""

    manifest: NcfManifest
    data_offset: int
    file_bytes: int

    def key(self, recipe: str) -> bytes:
        """Names what will be written; `recipe` says what else decides how it is cut into pieces."""
        packed = encode_manifest(self.manifest, self.data_offset)
        return hashlib.sha256(packed + recipe.encode()).digest()


def partial_path(output: Path) -> Path:
    """Where the data are until the file is complete."""
    return output.with_name(output.name + ".partial")


def journal_path(output: Path) -> Path:
    """Where the pieces that are done are noted."""
    return output.with_name(output.name + ".partial.journal")


def check_free_space(output: Path, num_bytes: int) -> None:
    """ConfigError unless the file system has room for what is still to be written."""
    try:
        space = os.statvfs(output.parent)
    except OSError as error:
        raise ConfigError(f"{output.parent}: {error.strerror}; make the folder first") from None
    partial = partial_path(output)
    has_been = partial.stat().st_blocks * 512 if partial.exists() else 0
    needs, has = num_bytes - has_been, space.f_bavail * space.f_frsize
    if needs > has:
        raise ConfigError(
            f"{output}: needs {needs / 2**30:.2f} GiB, {output.parent} has {has / 2**30:.2f} GiB "
            "free; make room or give another place"
        )


class ExtentSums:
    """Checksums of all sections' extents, of bytes that come in the order of the file."""

    def __init__(self, sections: tuple[NcfSection, ...]) -> None:
        self._sections = sections
        self._lengths = [
            section.extent(index)[1] for section in sections for index in range(section.num_extents)
        ]
        self._sums: list[int] = []
        self._crc = 0
        self._left = self._lengths[0] if self._lengths else 0

    def add(self, data: memoryview) -> None:
        """The next bytes."""
        while data:
            part = data[: self._left]
            self._crc = crc32c(part, self._crc)
            self._left -= len(part)
            data = data[len(part) :]
            if self._left == 0:
                self._sums.append(self._crc)
                self._crc = 0
                done = len(self._sums)
                self._left = self._lengths[done] if done < len(self._lengths) else 0

    def mark(self) -> tuple[int, int, int]:
        """A place to go back to."""
        return len(self._sums), self._crc, self._left

    def back_to(self, mark: tuple[int, int, int]) -> None:
        """Forget what was added since."""
        num_sums, self._crc, self._left = mark
        del self._sums[num_sums:]

    def finished(self) -> tuple[NcfSection, ...]:
        """The sections with their checksums."""
        if len(self._sums) != len(self._lengths):
            raise ValueError(f"{len(self._sums)} of {len(self._lengths)} extents were written")
        sections, at = [], 0
        for section in self._sections:
            sums = np.array(self._sums[at : at + section.num_extents], np.uint32)
            sections.append(replace(section, checksums=sums))
            at += section.num_extents
        return tuple(sections)


class NcfWriter:
    """Takes pieces in the order of the file; the first `num_pieces` ones are there already."""

    def __init__(
        self,
        output: Path,
        plan: NcfPlan,
        recipe: str,
        on_wait: Callable[[], None] = lambda: None,
    ) -> None:
        self.output = output
        self.plan = plan
        self.num_pieces = 0
        self.num_bytes = 0
        """Of data that are there, from the data offset."""
        self._sums = ExtentSums(plan.manifest.sections)
        self._errors: dict[int, PackError] = {}
        self._waiting: list[tuple[int, PieceRecord]] = []
        self._journal = WriteJournal(journal_path(output), plan.key(recipe), on_wait)
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
                    progress(self.num_bytes, self._data_bytes)
        self._journal.restart(kept)
        self._file.seek(self._position // PAGE_BYTES * PAGE_BYTES, self._page_begun())

    def _is_there(self, device: FileDevice, record: PieceRecord) -> bool:
        """Whether the file has a piece's bytes; if so, they have been added to the checksums."""
        mark, crc = self._sums.mark(), 0
        try:
            for at in range(0, record.num_bytes, VERIFY_BYTES):
                count = min(VERIFY_BYTES, record.num_bytes - at)
                view = device.read(self._position + at, count)
                crc = crc32c(view, crc)
                self._sums.add(view)
                view.release()
        except DeviceError:  # the file ends before its journal does
            crc = ~record.checksum
        if crc != record.checksum:
            self._sums.back_to(mark)
        return crc == record.checksum

    @property
    def _position(self) -> int:
        return self.plan.data_offset + self.num_bytes

    @property
    def _data_bytes(self) -> int:
        return self.plan.file_bytes - self.plan.data_offset

    def _page_begun(self) -> bytes:
        start = self._position // PAGE_BYTES * PAGE_BYTES
        if start == self._position:
            return b""
        with open_device(partial_path(self.output), PAGE_BYTES) as device:
            return bytes(device.read(start, self._position - start))

    def _count(self, record: PieceRecord) -> None:
        self.num_pieces += 1
        self.num_bytes += record.num_bytes
        for index, error in record.errors.items():
            self._errors[index] = self._errors.get(index, PackError()) + error

    def write_piece(self, data: memoryview, errors: dict[int, PackError]) -> None:
        """Add the next piece; `errors` by index of the tensor in the manifest."""
        record = PieceRecord(len(data), crc32c(data), errors)
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
        """Write the head, sync, and give the file its name."""
        self._file.flush()
        self._note_landed()
        head = encode_head(self._finished_manifest(), self.plan.data_offset, self.plan.file_bytes)
        self._file.write_at(0, head)
        self._file.truncate(self.plan.file_bytes)
        self._file.sync()
        os.replace(partial_path(self.output), self.output)
        _sync_folder(self.output.parent)
        self._journal.remove()

    def give_up(self) -> None:
        """Leave nothing behind."""
        partial_path(self.output).unlink(missing_ok=True)
        self._journal.remove()

    def _finished_manifest(self) -> NcfManifest:
        tensors = list(self.plan.manifest.tensors)
        for index, error in self._errors.items():
            tensors[index] = replace(
                tensors[index], max_abs_error=error.max_abs, rms_error=error.relative_rms
            )
        return replace(self.plan.manifest, sections=self._sums.finished(), tensors=tuple(tensors))


def stripped(manifest: NcfManifest) -> NcfManifest:
    """The manifest as it was planned: without checksums and errors."""
    return replace(
        manifest,
        sections=tuple(
            replace(section, checksums=np.zeros_like(section.checksums))
            for section in manifest.sections
        ),
        tensors=tuple(
            replace(tensor, max_abs_error=0.0, rms_error=0.0) for tensor in manifest.tensors
        ),
    )


def encode_head(manifest: NcfManifest, data_offset: int, file_bytes: int) -> bytes:
    """Header, manifest and zeros up to the data."""
    packed = encode_manifest(manifest, data_offset)
    body = packed.ljust(data_offset - HEADER.size - 4, b"\0")
    header = HEADER.pack(NCF_MAGIC, VERSION, len(packed), data_offset, file_bytes, crc32c(body))
    head = header + crc32c(header).to_bytes(4, "little") + body
    if len(head) != data_offset:
        raise ValueError(f"the head takes {len(head)} bytes, {data_offset} were planned")
    return head


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
