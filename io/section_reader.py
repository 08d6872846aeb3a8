"""Reads sections of a neuron-cluster file straight into the arena, as they are stored."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from polyneuron.errors import ChecksumError
from polyneuron.io.block_device import (
    MAX_ATTEMPTS,
    STALL_TIMEOUT_NS,
    BlockDevice,
    ReadCompletion,
    ReadRequest,
    read_error,
    stall_error,
)
from polyneuron.io.ncf_format import EXTENT_BYTES, NcfSection
from polyneuron.io.weight_reader import ReadReport
from polyneuron.kernels.arena import Arena
from polyneuron.kernels.checksum import crc32c

REQUEST_BYTES = 2 * EXTENT_BYTES
MAX_REAPED = 16


@dataclass(frozen=True, slots=True)
class SectionRead:
    """One section to be brought to `offset` in the arena."""

    section: NcfSection
    offset: int
    path: Path | None = None
    """Of the file it lies in; None: the model's."""

    @property
    def file_bytes(self) -> int:
        """Bytes to be read from the file."""
        return self.section.num_bytes


@dataclass(slots=True)
class Part:
    """A piece of a section on its way to memory."""

    key: int
    """What the piece was ordered for."""
    section: NcfSection
    start: int
    """From the section's start."""
    num_bytes: int
    target: int
    """Address."""
    attempts: int = 0

    def request(self, tag: int) -> ReadRequest:
        """The read that brings it."""
        return ReadRequest(self.section.offset + self.start, self.num_bytes, self.target, tag)


class SectionReader:
    """Keeps a device busy with the pieces of the sections that were ordered, in order.

    `on_end` is told of every read that ended, a failed one too.
    """

    def __init__(
        self,
        device: BlockDevice,
        on_end: Callable[[Part, ReadCompletion], None] = lambda _part, _completion: None,
    ) -> None:
        self._device, self._on_end = device, on_end
        self._waiting: deque[Part] = deque()
        self._in_flight: dict[int, Part] = {}
        self._next_tag = 0

    @property
    def num_outstanding(self) -> int:
        """Pieces ordered and not landed."""
        return len(self._waiting) + len(self._in_flight)

    def order(self, section: NcfSection, target: int, key: int) -> int:
        """Queue a section's pieces for memory at address `target`; returns how many."""
        parts = [
            Part(key, section, start, min(REQUEST_BYTES, section.num_bytes - start), target + start)
            for start in range(0, section.num_bytes, REQUEST_BYTES)
        ]
        self._waiting.extend(parts)
        self._submit()
        return len(parts)

    def _submit(self) -> None:
        while self._waiting:
            part, tag = self._waiting[0], self._next_tag
            if self._device.submit([part.request(tag)]) == 0:
                return
            self._in_flight[tag] = self._waiting.popleft()
            self._next_tag += 1

    def reap(self, timeout_ns: int) -> list[Part]:
        """Pieces that have landed, after waiting for one; failed reads are tried again.

        Raises DeviceError naming file and place when one failed `MAX_ATTEMPTS` times.
        """
        landed = []
        for completion in self._device.reap(MAX_REAPED, 1, timeout_ns):
            part = self._in_flight.pop(completion.tag)
            self._on_end(part, completion)
            if completion.status == 0:
                landed.append(part)
            else:
                self._try_again(part, completion)
        self._submit()
        return landed

    def _try_again(self, part: Part, completion: ReadCompletion) -> None:
        part.attempts += 1
        if part.attempts == MAX_ATTEMPTS:
            request = part.request(completion.tag)
            raise read_error(self._device.info(), request, completion)
        self._waiting.appendleft(part)

    def parts(self) -> Iterable[Part]:
        """All pieces ordered, as they land; DeviceError when the device hangs."""
        while self.num_outstanding:
            landed = self.reap(STALL_TIMEOUT_NS)
            if not landed and self._in_flight and not self._waiting:
                raise stall_error(self._device.info())
            yield from landed


def damaged(path: Path, section: NcfSection, index: int) -> ChecksumError:
    """What to raise when the checksum of a section's extent `index` does not match."""
    return ChecksumError(
        f"{path}: section {section.name}, MiB {index}: checksum does not match: "
        f"the file is damaged; fetch or convert it again"
    )


def verify_part(path: Path, part: Part, view: memoryview) -> None:
    """Compare a landed piece with its section's checksums."""
    first = part.start // EXTENT_BYTES
    for index in range(first, first + -(-part.num_bytes // EXTENT_BYTES)):
        at = index * EXTENT_BYTES - part.start
        if crc32c(view[at : at + EXTENT_BYTES]) != int(part.section.checksums[index]):
            raise damaged(path, part.section, index)


def read_sections(
    device: BlockDevice,
    reads: Sequence[SectionRead],
    arena: Arena,
    progress: Callable[[int], None],
) -> ReadReport:
    """Bring sections to their places, verified; `progress` gets the bytes so far.

    Raises DeviceError or ChecksumError naming file and place.
    """
    reader, total = SectionReader(device), 0
    for key, read in enumerate(reads):
        reader.order(read.section, arena.address + read.offset, key)
    for part in reader.parts():
        view = arena.bytes_at(part.target - arena.address, part.num_bytes)
        verify_part(device.info().path, part, view)
        total += part.num_bytes
        progress(total)
    return ReadReport(total, device.info().is_direct, {})
