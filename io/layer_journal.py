"""What work that goes layer by layer keeps of the layers it has done, to go on when broken off.

Two files beside the output: FILE.partial has a record for each layer that is done,
FILE.partial.state what the next layer needs. A record counts when it is whole, and only if the
state is that after it.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from polyneuron.errors import DeviceError
from polyneuron.io.piece_writer import partial_path
from polyneuron.io.whole_file import write_whole
from polyneuron.io.write_journal import open_locked
from polyneuron.kernels.checksum import crc32c

KEY_BYTES = 32
FRAME = struct.Struct("<QI")
"""Length and CRC-32C of a record."""
STATE = struct.Struct("<32sIIQ")
"""Key, layers done, CRC-32C and bytes of the state."""


class LayerJournal:
    """Holds the lock of the output it belongs to while it is open.

    `key` (32 bytes) names the work: what another key left is forgotten.
    """

    def __init__(self, output: Path, key: bytes, on_wait: Callable[[], None]) -> None:
        self.path = partial_path(output)
        self._state_path = self.path.with_name(self.path.name + ".state")
        self._key = key
        self._fd = open_locked(self.path, on_wait)
        self._ends: list[int] = []
        self.state = b""
        """What was kept with the last record; empty at the start."""
        self._take_over()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._ends:  # nothing to go on with
            self.remove()
        os.close(self._fd)

    @property
    def num_layers(self) -> int:
        """Layers that are done."""
        return len(self._ends)

    def _take_over(self) -> None:
        """Find the records of an earlier run; more than the state knows of are cut off."""
        num_done, state = self._read_state()
        ends = [end for _, end in self._scan()]
        if num_done <= len(ends):
            self._ends, self.state = ends[:num_done], state
        if not self._ends:
            self.state = b""
            os.ftruncate(self._fd, 0)
            self._write(0, self._key)
        os.ftruncate(self._fd, self._end)

    @property
    def _end(self) -> int:
        return self._ends[-1] if self._ends else KEY_BYTES

    def _scan(self) -> Iterator[tuple[bytes, int]]:
        """Whole records and where each ends."""
        if os.pread(self._fd, KEY_BYTES, 0) != self._key:
            return
        at = KEY_BYTES
        while len(head := os.pread(self._fd, FRAME.size, at)) == FRAME.size:
            length, checksum = FRAME.unpack(head)
            if at + FRAME.size + length > os.fstat(self._fd).st_size:
                return
            body = os.pread(self._fd, length, at + FRAME.size)
            if len(body) != length or crc32c(body) != checksum:
                return
            at += FRAME.size + length
            yield body, at

    def _read_state(self) -> tuple[int, bytes]:
        try:
            raw = self._state_path.read_bytes()
        except OSError:
            return 0, b""
        if len(raw) < STATE.size:
            return 0, b""
        key, num_done, checksum, num_bytes = STATE.unpack_from(raw)
        state = raw[STATE.size :]
        whole = key == self._key and len(state) == num_bytes and crc32c(state) == checksum
        return (num_done, state) if whole else (0, b"")

    def records(self) -> Iterator[bytes]:
        """The records of all layers that are done, in order, read one by one."""
        for index, (body, _) in enumerate(self._scan()):
            if index < self.num_layers:
                yield body

    def add(self, record: bytes, state: bytes) -> None:
        """A layer is done; DeviceError when it cannot be kept."""
        head = FRAME.pack(len(record), crc32c(record))
        self._write(self._end, head + record)
        os.fsync(self._fd)
        self._ends.append(self._end + FRAME.size + len(record))
        head = STATE.pack(self._key, len(self._ends), crc32c(state), len(state))
        write_whole(self._state_path, head + state)

    def _write(self, offset: int, data: bytes) -> None:
        view = memoryview(data)
        try:
            while view:
                count = os.pwrite(self._fd, view, offset)
                view, offset = view[count:], offset + count
        except OSError as error:
            raise DeviceError(f"{self.path}: cannot be written: {error.strerror}") from error

    def remove(self) -> None:
        """The work is complete, or nothing of it is worth keeping."""
        self._state_path.unlink(missing_ok=True)
        self.path.unlink(missing_ok=True)
