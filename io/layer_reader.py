"""Keeps a ring of stage buffers filled with the layers a forward pass will need next."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from dataclasses import replace

from polyneuron.errors import DeviceError
from polyneuron.io.block_device import (
    STALL_TIMEOUT_NS,
    BlockDevice,
    ReadCompletion,
    stall_error,
)
from polyneuron.io.expert_pieces import ExpertPieces
from polyneuron.io.ncf_format import NcfSection
from polyneuron.io.section_reader import Part, SectionReader
from polyneuron.kernels.arena import Arena, monotonic_ns
from polyneuron.kernels.routes import read_routes
from polyneuron.kernels.trace import put_read

WAIT_SLICE_NS = 200_000_000


class LayerReader:
    """Reads streamed layers in order, over and over, as far ahead as buffers are free.

    `schedules` are the lists of loads the coordinator may want, by their numbers; `trace` is where
    the ring for records of its reads lies in the arena, 0: none are kept. With `experts` (of the
    first list) a load of a layer whose experts are chosen by then is read as far as they lie in it.
    """

    def __init__(
        self,
        device: BlockDevice,
        arena: Arena,
        stream: int,
        schedules: Sequence[Sequence[NcfSection]],
        trace: int = 0,
        experts: ExpertPieces | None = None,
    ) -> None:
        self._device, self._arena, self._schedules = device, arena, schedules
        self._stream, self._trace, self._experts = stream, trace, experts
        self._state = arena.layer_stream(stream)
        self._reader = SectionReader(device, self._trace_read)
        self._next_load = int(self._state.landed)
        self._missing: dict[int, int] = {}
        """load -> pieces of it that have not landed, in the order of loads"""
        self._landed_ns = monotonic_ns()
        self._sections = schedules[int(self._state.serving)]

    def run(self) -> None:
        """Read until the stream stops, or until a read fails for good (its error is set)."""
        try:
            while not self._state.stop:
                if self._state.schedule != self._state.serving and not self._reader.num_outstanding:
                    self._begin_schedule()
                self._order_free()
                self._hand_over()
                if self._reader.num_outstanding:
                    self._take_landed()
        except DeviceError as error:
            self._arena.fail_stream(self._stream, error.errno or errno.EIO)

    def _begin_schedule(self) -> None:
        """Forget what was read ahead and begin the list that is wanted."""
        self._sections = self._schedules[int(self._state.schedule)]
        self._missing.clear()
        self._next_load = 0
        self._arena.begin_stream(self._stream)

    def _order_free(self) -> None:
        """Order loads while buffers are free; with nothing to read, wait for one."""
        timeout_ns = 0 if self._reader.num_outstanding else WAIT_SLICE_NS
        while self._arena.wait_free_buffer(self._stream, self._next_load, timeout_ns):
            load, timeout_ns = self._next_load, 0
            buffer = load % int(self._state.num_buffers)
            offset = int(self._state.buffers) + buffer * int(self._state.buffer_bytes)
            self._missing[load] = self._order(load, self._arena.address + offset)
            self._next_load = (load + 1) % (1 << 32)
            self._landed_ns = monotonic_ns()

    def _order(self, load: int, target: int) -> int:
        """Order what is needed of a load; returns how many reads that are."""
        section = self._sections[load % len(self._sections)]
        return sum(
            self._reader.order(part, target + part.offset - section.offset, load)
            for part in self._needed(load, section)
        )

    def _needed(self, load: int, section: NcfSection) -> list[NcfSection]:
        """All of a load, or its chosen experts once they are known."""
        ahead = (self._arena.routed_loads(self._stream) - load) % (1 << 32)
        if self._experts is None or self._state.serving or not 0 < ahead < 1 << 31:
            return [section]
        chosen = read_routes(self._arena, int(self._state.routes)).chosen
        place = load % len(self._sections)
        return [
            replace(section, offset=section.offset + part.offset, num_bytes=part.num_bytes)
            for part in self._experts.chosen_ranges(place, section.num_bytes, chosen)
        ]

    def _trace_read(self, part: Part, completion: ReadCompletion) -> None:
        if self._trace:
            put_read(
                self._arena, self._trace, latency_ns=completion.latency_ns,
                layer=part.section.layer, neuron=-1, num_bytes=completion.num_bytes,
                status=-completion.status,
            )  # fmt: skip

    def _take_landed(self) -> None:
        """Count what has landed."""
        for part in self._reader.reap(WAIT_SLICE_NS):
            self._missing[part.key] -= 1
            self._state.bytes_read += part.num_bytes
            self._state.reads += 1
            self._landed_ns = monotonic_ns()
        self._hand_over()
        if monotonic_ns() - self._landed_ns > STALL_TIMEOUT_NS:
            raise stall_error(self._device.info())

    def _hand_over(self) -> None:
        """Land the loads that are complete, as all before them are."""
        while self._missing and not next(iter(self._missing.values())):
            del self._missing[next(iter(self._missing))]
            self._arena.land_layer(self._stream)
