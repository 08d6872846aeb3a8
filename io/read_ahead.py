"""Byte ranges of a device in order, the next ones already being read while one is used."""

from __future__ import annotations

from collections.abc import Generator, Sequence

import numpy as np
from numpy.typing import NDArray

from polyneuron.io.block_device import (
    MAX_ATTEMPTS,
    STALL_TIMEOUT_NS,
    BlockDevice,
    ByteRange,
    ReadCompletion,
    ReadRequest,
    aligned_bytes,
    read_error,
    stall_error,
    whole_sectors,
)

NUM_BUFFERS = 3


def read_ahead(
    device: BlockDevice, ranges: Sequence[ByteRange], num_buffers: int = NUM_BUFFERS
) -> Generator[memoryview, None, None]:
    """The bytes of each range in turn; a view is valid until the next one is asked for.

    Memory: `num_buffers` times the longest range. The device serves nobody else meanwhile. A failed
    read is tried again before DeviceError names file and place.
    """
    window = _Window(device, ranges, num_buffers)
    try:
        for index in range(len(ranges)):
            window.submit_until(index + num_buffers)
            window.wait_for(index)
            yield window.view(index)
    finally:
        window.drain()


class _Window:
    """Buffers in a ring: range i is read into buffer i modulo their number."""

    def __init__(self, device: BlockDevice, ranges: Sequence[ByteRange], num_buffers: int) -> None:
        self._device = device
        self._info = device.info()
        self._ranges = ranges
        self._spans = [whole_sectors(self._info, wanted) for wanted in ranges]
        self._memory = [
            aligned_bytes(
                max((span.num_bytes for span in self._spans[first::num_buffers]), default=0),
                max(self._info.memory_alignment, self._info.offset_alignment),
            )
            for first in range(num_buffers)
        ]
        self._num_submitted = 0
        self._num_outstanding = 0
        self._num_attempts: dict[int, int] = {}
        self._landed: set[int] = set()
        self._failed: dict[int, ReadCompletion] = {}  # told when their turn comes

    def submit_until(self, stop: int) -> None:
        """Submit ranges up to `stop`, or as many as the device takes."""
        while self._num_submitted < min(stop, len(self._spans)):
            if not self._submit(self._num_submitted):
                break
            self._num_submitted += 1

    def wait_for(self, index: int) -> None:
        """Return when a range has landed."""
        while index not in self._landed:
            if index in self._failed:
                raise read_error(self._info, self._request(index), self._failed[index])
            for completion in self._reap():
                self._take(completion)
            if index == self._num_submitted:  # the device was full
                self.submit_until(index + 1)
        self._landed.remove(index)

    def view(self, index: int) -> memoryview:
        """The bytes of a range that has landed."""
        wanted, span = self._ranges[index], self._spans[index]
        skip = wanted.offset - span.offset
        return self._buffer(index).data[skip : skip + wanted.num_bytes]

    def drain(self) -> None:
        """Wait for what is in flight: nothing may land in memory that has been given back."""
        while self._num_outstanding:
            self._reap()

    def _buffer(self, index: int) -> NDArray[np.uint8]:
        return self._memory[index % len(self._memory)]

    def _request(self, index: int) -> ReadRequest:
        span = self._spans[index]
        return ReadRequest(
            span.offset, span.num_bytes, int(self._buffer(index).ctypes.data), tag=index
        )

    def _submit(self, index: int) -> bool:
        if self._spans[index].num_bytes == 0:
            self._landed.add(index)
            return True
        taken = self._device.submit([self._request(index)])
        self._num_outstanding += taken
        return taken == 1

    def _reap(self) -> list[ReadCompletion]:
        completions = self._device.reap(len(self._memory), 1, STALL_TIMEOUT_NS)
        if not completions:
            raise stall_error(self._info)
        self._num_outstanding -= len(completions)
        return completions

    def _take(self, completion: ReadCompletion) -> None:
        index = completion.tag
        if completion.status == 0:
            self._landed.add(index)
            return
        attempts = self._num_attempts[index] = self._num_attempts.get(index, 1) + 1
        if attempts > MAX_ATTEMPTS or not self._submit(index):
            self._failed[index] = completion
