"""Devices around another device: they add latency, faults or counters, and are devices themselves.

A wrapper that changes when or how a read ends also stores its done_word, at the changed moment.
"""

from __future__ import annotations

import errno
import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from polyneuron.clock import Clock
from polyneuron.io.block_device import (
    CLOSE_TIMEOUT_NS,
    BlockDevice,
    DeviceInfo,
    ReadCompletion,
    ReadRequest,
)
from polyneuron.kernels._kernels import ffi, lib

WRONG_BYTE = 0xEE


class _EndingDevice:
    """Knows the request behind each completion, and ends requests in the device's stead."""

    def __init__(self, device: BlockDevice) -> None:
        self._device = device
        self._requests: dict[int, ReadRequest] = {}  # tag towards the device -> as submitted to us
        self._next_tag = 0

    def submit(self, requests: Sequence[ReadRequest]) -> int:
        """As `BlockDevice`."""
        first = self._next_tag
        inner = [
            replace(request, tag=first + index, done_word=0)
            for index, request in enumerate(requests)
        ]
        taken = self._device.submit(inner)
        self._requests |= {first + index: requests[index] for index in range(taken)}
        self._next_tag += taken
        return taken

    def _ended(
        self, max_completions: int, min_wait: int, timeout_ns: int
    ) -> list[tuple[ReadRequest, ReadCompletion]]:
        """Completions by the device's own tags, each with its request."""
        found = self._device.reap(max_completions, min_wait, timeout_ns)
        return [(self._requests.pop(completion.tag), completion) for completion in found]

    def info(self) -> DeviceInfo:
        """As `BlockDevice`."""
        return self._device.info()

    def close(self, timeout_ns: int = CLOSE_TIMEOUT_NS) -> None:
        """As `BlockDevice`; requests not reaped end as cancelled."""
        self._device.close(timeout_ns)
        for request in self._requests.values():
            _store_word(request, -errno.ECANCELED)
        self._requests.clear()


def _store_word(request: ReadRequest, status: int) -> None:
    if request.done_word:
        value = request.failed_value if status else request.done_value
        lib.word_store_wake(ffi.cast("void *", request.done_word), value)


class LatencyDevice(_EndingDevice):
    """Every read takes at least as long as `latency_ns` says for it, by the clock given."""

    def __init__(
        self, device: BlockDevice, clock: Clock, latency_ns: Callable[[ReadRequest], int]
    ) -> None:
        super().__init__(device)
        self._clock = clock
        self._latency_ns = latency_ns
        self._start_ns: dict[int, tuple[int, int]] = {}  # our tag -> submitted, due
        self._held: list[tuple[int, int, ReadRequest, ReadCompletion]] = []  # a heap by due time

    def submit(self, requests: Sequence[ReadRequest]) -> int:
        """As `BlockDevice`."""
        first, now_ns = self._next_tag, self._clock.now_ns()
        taken = super().submit(requests)
        for index, request in enumerate(requests[:taken]):
            self._start_ns[first + index] = now_ns, now_ns + self._latency_ns(request)
        return taken

    def reap(self, max_completions: int, min_wait: int, timeout_ns: int) -> list[ReadCompletion]:
        """As `BlockDevice`; the bytes land first, their time is waited for afterwards."""
        end_ns = self._clock.now_ns() + timeout_ns
        self._hold(len(self._requests) if min_wait else 0, timeout_ns)
        wanted = min(min_wait, max_completions, len(self._requests) + len(self._held))
        found: list[ReadCompletion] = []
        while True:
            now_ns = self._clock.now_ns()
            while self._held and self._held[0][0] <= now_ns and len(found) < max_completions:
                found.append(self._release(now_ns))
            if len(found) >= wanted or now_ns >= end_ns:
                return found
            if self._held:
                self._clock.wait_ns(min(self._held[0][0], end_ns) - now_ns)
            else:
                self._hold(1, end_ns - now_ns)

    def info(self) -> DeviceInfo:
        """As `BlockDevice`."""
        inner = super().info()
        return replace(inner, num_outstanding=inner.num_outstanding + len(self._held))

    def close(self, timeout_ns: int = CLOSE_TIMEOUT_NS) -> None:
        """As `BlockDevice`."""
        super().close(timeout_ns)
        for _, _, request, _ in self._held:
            _store_word(request, -errno.ECANCELED)
        self._held.clear()

    def _hold(self, min_wait: int, timeout_ns: int) -> None:
        room = max(len(self._requests), 1)
        for request, completion in self._ended(room, min_wait, timeout_ns):
            due_ns = self._due_ns(completion)
            heapq.heappush(self._held, (due_ns, completion.tag, request, completion))

    def _due_ns(self, completion: ReadCompletion) -> int:
        """When a read that has landed is given back."""
        return self._start_ns[completion.tag][1]

    def _release(self, now_ns: int) -> ReadCompletion:
        _, tag, request, completion = heapq.heappop(self._held)
        start_ns, _ = self._start_ns.pop(tag)
        _store_word(request, completion.status)
        return replace(completion, tag=request.tag, latency_ns=now_ns - start_ns)


class SlowDevice(LatencyDevice):
    """Every read takes `factor` times as long as it did, and at least what `latency_ns` says."""

    def __init__(
        self,
        device: BlockDevice,
        clock: Clock,
        factor: float,
        latency_ns: Callable[[ReadRequest], int] = lambda _: 0,
    ) -> None:
        super().__init__(device, clock, latency_ns)
        self._factor = factor

    def _due_ns(self, completion: ReadCompletion) -> int:
        start_ns, due_ns = self._start_ns[completion.tag]
        return max(due_ns, start_ns + round(self._factor * completion.latency_ns))


class FaultKind(Enum):
    """What goes wrong with a read."""

    EIO = "eio"
    """It fails and leaves wrong bytes."""
    SHORT_READ = "short_read"
    """The file ends half way."""
    TORN = "torn"
    """It succeeds, and the second half of the bytes is wrong: only a checksum can tell."""


@dataclass(frozen=True, slots=True)
class Fault:
    """`count` reads go wrong from the `nth` submitted on, counted from 1; all if persistent."""

    kind: FaultKind
    nth: int
    is_persistent: bool = False
    count: int = 1

    def hits(self, nth: int) -> bool:
        """Whether the read of that number goes wrong."""
        return self.nth <= nth and (self.is_persistent or nth < self.nth + self.count)


class FaultDevice(_EndingDevice):
    """Makes reads go wrong."""

    def __init__(self, device: BlockDevice, fault: Fault) -> None:
        super().__init__(device)
        self._fault = fault
        self._faulty: set[int] = set()  # tags towards the device
        self.num_injected = 0
        """Reads that went wrong so far."""

    def submit(self, requests: Sequence[ReadRequest]) -> int:
        """As `BlockDevice`."""
        first = self._next_tag
        taken = super().submit(requests)
        self._faulty |= {tag for tag in range(first, first + taken) if self._fault.hits(tag + 1)}
        return taken

    def reap(self, max_completions: int, min_wait: int, timeout_ns: int) -> list[ReadCompletion]:
        """As `BlockDevice`."""
        found = []
        for request, completion in self._ended(max_completions, min_wait, timeout_ns):
            ended = replace(completion, tag=request.tag)
            if completion.tag in self._faulty:
                self._faulty.remove(completion.tag)
                self.num_injected += 1
                ended = _break(self._fault.kind, request, ended)
            _store_word(request, ended.status)
            found.append(ended)
        return found


def _break(kind: FaultKind, request: ReadRequest, completion: ReadCompletion) -> ReadCompletion:
    half = completion.num_bytes // 2
    keep = 0 if kind is FaultKind.EIO else half
    memory = ffi.buffer(ffi.cast("char *", request.target), completion.num_bytes)
    memory[keep:] = bytes(byte ^ WRONG_BYTE for byte in memory[keep:])
    if kind is FaultKind.TORN:
        return completion
    status = -errno.EIO if kind is FaultKind.EIO else -errno.ENODATA
    return replace(completion, status=status, num_bytes=keep)


@dataclass(slots=True)
class ReadCounts:
    """What went through a CountingDevice."""

    num_requests: int = 0
    num_bytes: int = 0
    num_failed: int = 0
    num_refused: int = 0
    """Requests that found the device full."""
    max_outstanding: int = 0
    offsets: list[int] = field(default_factory=list)
    """In the order of submission."""


class CountingDevice:
    """Counts what is read."""

    def __init__(self, device: BlockDevice) -> None:
        self._device = device
        self.counts = ReadCounts()

    def submit(self, requests: Sequence[ReadRequest]) -> int:
        """As `BlockDevice`."""
        taken = self._device.submit(requests)
        counts = self.counts
        counts.num_requests += taken
        counts.num_refused += len(requests) - taken
        counts.offsets += [request.offset for request in requests[:taken]]
        counts.max_outstanding = max(counts.max_outstanding, self.info().num_outstanding)
        return taken

    def reap(self, max_completions: int, min_wait: int, timeout_ns: int) -> list[ReadCompletion]:
        """As `BlockDevice`."""
        found = self._device.reap(max_completions, min_wait, timeout_ns)
        self.counts.num_bytes += sum(completion.num_bytes for completion in found)
        self.counts.num_failed += sum(completion.status != 0 for completion in found)
        return found

    def info(self) -> DeviceInfo:
        """As `BlockDevice`."""
        return self._device.info()

    def close(self, timeout_ns: int = CLOSE_TIMEOUT_NS) -> None:
        """As `BlockDevice`."""
        self._device.close(timeout_ns)
