"""Performs the reads that executors order when a neuron is missing (neuron_reads_api.h)."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from polyneuron.errors import ConfigError, DeviceError, ProtocolError
from polyneuron.io.block_device import (
    MAX_ATTEMPTS,
    STALL_TIMEOUT_NS,
    BlockDevice,
    DeviceInfo,
    ReadCompletion,
    ReadRequest,
    stall_error,
)
from polyneuron.io.file_device import DeviceOptions, FileDevice, open_device
from polyneuron.kernels.arena import Arena, NeuronRead, monotonic_ns
from polyneuron.kernels.neuron_cache import NeuronCache
from polyneuron.kernels.trace import put_read

SLICE_NS = 200_000_000
BATCH = 64


class NeuronReader:
    """Takes orders from the ring at `offset` of the arena and reads them through `device`.

    A FileDevice is read by a loop in C; any other, such as a wrapper of tests and scenarios, by the
    same protocol here. A ring has one reader, and the thread that runs it owns the device.
    """

    def __init__(self, device: BlockDevice, arena: Arena, offset: int) -> None:
        self._device, self._arena, self._offset = device, arena, offset
        self._reads = arena.neuron_reads(offset)
        self._queue_depth = device.info().queue_depth
        self._under_way: dict[int, tuple[NeuronRead, int]] = {}
        """tag -> the order, and which attempt its read is"""
        self._next_tag = 0
        self._error = 0
        self._progress_ns = 0

    def run(self) -> int:
        """Perform orders until the ring stops (0) or a read fails for good: then its errno.

        Begins with what a reader before it took and did not end, as one whose process was lost.
        A neuron that failed is absent again and the ring's `error` is set. Nothing is under way
        afterwards, unless the device hangs (ETIMEDOUT); what was not taken waits for the next call.
        """
        self._resume()
        if isinstance(self._device, FileDevice):
            return self._run_in_c(self._device)
        try:
            return self._run()
        except DeviceError as error:
            self._reads.error = error.errno or errno.EIO
            return int(self._reads.error)

    def _resume(self) -> None:
        cache = NeuronCache(self._arena.address + self._reads.cache)
        while not self._reads.stop:
            # A holder that was lost keeps the lock until the cache is formatted.
            with suppress(ProtocolError), cache.locked(SLICE_NS):
                self._arena.resume_neuron_reads(self._offset)
                return

    def _run_in_c(self, device: FileDevice) -> int:
        while True:
            status = self._arena.run_neuron_reader(self._offset, device.engine, SLICE_NS)
            if status != 0:
                return max(-status, 0)

    def _run(self) -> int:
        self._error = 0
        while True:
            if not self._error:
                self._take_orders(0 if self._under_way else SLICE_NS)
            if self._under_way:
                self._take_ended()
            elif self._error or self._reads.stop:
                return self._error

    def _take_orders(self, timeout_ns: int) -> None:
        room = min(BATCH, self._queue_depth - len(self._under_way))
        for order in self._arena.pop_neuron_reads(self._offset, room, timeout_ns):
            self._submit(order, 1)

    def _submit(self, order: NeuronRead, attempt: int) -> None:
        if not self._under_way:
            self._progress_ns = monotonic_ns()
        tag, self._next_tag = self._next_tag, self._next_tag + 1
        try:
            taken = self._device.submit([self._request(order, tag)])
            error = 0 if taken else errno.EBUSY
        except ValueError:  # a place that the file does not have
            error = errno.EINVAL
        if error:
            self._end(order, error)
        else:
            self._under_way[tag] = order, attempt

    def _request(self, order: NeuronRead, tag: int) -> ReadRequest:
        file = self._reads.file
        layer, index = divmod(order.neuron, file.neurons_per_layer)
        layers = self._arena.view(file.layer_offsets, (file.num_layers,), "u8")
        return ReadRequest(
            offset=int(layers[layer]) + index * file.bundle_bytes + file.read_begin,
            num_bytes=file.read_bytes,
            target=self._arena.address + file.slots + order.slot * file.slot_bytes,
            tag=tag,
        )

    def _take_ended(self) -> None:
        ended = self._device.reap(BATCH, 1, SLICE_NS)
        for completion in ended:
            self._take_end(completion)
        if ended:
            self._progress_ns = monotonic_ns()
        elif monotonic_ns() - self._progress_ns > STALL_TIMEOUT_NS:
            raise stall_error(self._device.info())

    def _take_end(self, completion: ReadCompletion) -> None:
        order, attempt = self._under_way.pop(completion.tag)
        if self._reads.trace:
            self._trace(order, completion)
        self._reads.reads += 1
        self._reads.bytes_read += completion.num_bytes
        self._reads.latency_ns += completion.latency_ns
        error = -completion.status
        if not error and completion.num_bytes < self._reads.file.read_bytes:
            error = errno.ENODATA
        if error and attempt < MAX_ATTEMPTS:
            self._submit(order, attempt + 1)
        else:
            self._end(order, error)

    def _trace(self, order: NeuronRead, completion: ReadCompletion) -> None:
        layer, neuron = divmod(order.neuron, self._reads.file.neurons_per_layer)
        put_read(
            self._arena, self._reads.trace, latency_ns=completion.latency_ns, layer=layer,
            neuron=neuron, num_bytes=completion.num_bytes, status=-completion.status,
        )  # fmt: skip

    def _end(self, order: NeuronRead, error: int) -> None:
        self._arena.end_neuron_read(self._offset, order.neuron, error)
        self._error = error or self._error


def can_read_directly(info: DeviceInfo, arena: Arena, offset: int) -> bool:
    """Whether every read the ring's file needs begins and ends where the device's sectors do."""
    file = arena.neuron_reads(offset).file
    layers = arena.view(file.layer_offsets, (file.num_layers,), "u8")
    places = (*layers.tolist(), file.bundle_bytes, file.read_begin, file.read_bytes)
    targets = (arena.address + file.slots, file.slot_bytes)
    return not (
        any(place % info.offset_alignment for place in places)
        or any(target % info.memory_alignment for target in targets)
    )


@contextmanager
def open_neuron_device(
    path: Path,
    arena: Arena,
    offset: int,
    options: DeviceOptions | None = None,
    registered_slots: int = 0,
) -> Iterator[FileDevice]:
    """The file behind the ring at `offset`, closed at the end.

    Direct where bundles lie as the disk's sectors do, else through the page cache, as of bundles of
    512 bytes on a disk of 4096: `info().is_direct` tells. ConfigError where neither can be.

    So many slots, from the first on, are kept mapped by the kernel if it allows it
    (`info().registered_bytes`): reads into them take a tenth to a quarter less CPU. Their pages
    must stay where they are: who gives some back to the system closes the device first.
    """
    options = options or DeviceOptions()
    with open_device(path, options=options) as device:
        if can_read_directly(device.info(), arena, offset):
            _register(device, arena, offset, registered_slots)
            yield device
            return
    with open_device(path, options=replace(options, is_buffered=True)) as device:
        if not can_read_directly(device.info(), arena, offset):
            raise ConfigError(f"{path}: bundles do not lie at multiples of 512; convert it again")
        _register(device, arena, offset, registered_slots)
        yield device


def _register(device: FileDevice, arena: Arena, offset: int, num_slots: int) -> None:
    if num_slots:
        file = arena.neuron_reads(offset).file
        device.register_memory(arena.address + file.slots, num_slots * file.slot_bytes)
