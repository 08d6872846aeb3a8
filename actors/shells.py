"""The actors' shells: Ray methods around the states, without decisions of their own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import ray

from polyneuron.actors.arena import format_neuron_cache, resize_neuron_cache
from polyneuron.actors.cache_actor import CacheState
from polyneuron.actors.messages import ExecutorStatus, PlaceExecutor
from polyneuron.backends.backend import Backend
from polyneuron.backends.choice import open_backend
from polyneuron.backends.op_server import give_up, open_server
from polyneuron.backends.spec import parse_npu
from polyneuron.clock import MonotonicClock
from polyneuron.io.arena_loader import Reads, read_all
from polyneuron.io.device_faults import DeviceFaults
from polyneuron.io.expert_pieces import ExpertPieces
from polyneuron.io.file_device import DeviceOptions, open_device
from polyneuron.io.layer_reader import LayerReader
from polyneuron.io.ncf_format import NcfSection
from polyneuron.io.neuron_reader import NeuronReader, open_neuron_device
from polyneuron.io.weight_reader import ReadReport
from polyneuron.kernels import isa
from polyneuron.kernels.arena import Arena, ServeStatus, Unit, prefer_short_slices
from polyneuron.kernels.backend_calls import BackendCalls
from polyneuron.planning.layout import ArenaLayout

SERVE_SLICE_NS = 1_000_000_000
READER_SLICE_NS = 100_000
"""The least there is: workers keep every core busy, and a read that begins late ends late."""


def attach_arena(refs: list[Any]) -> Arena:
    """Map the arena an ObjectRef stands for; the view keeps it mapped."""
    arena = Arena.over(ray.get(refs[0]), keep=refs)
    arena.check()
    return arena


def keep_to(cores: list[int]) -> None:
    """Have this thread, and those it makes, run on these cores; none: anywhere allowed."""
    if cores:  # called after all imports: some of them set affinity
        os.sched_setaffinity(0, cores)


class ExecutorShell:
    """Walks step programs in C: a CPU worker has one place, the NPU executor one per thread."""

    def __init__(self, places: list[bytes]) -> None:
        self._isa = isa.select()
        self._places = {p.executor: p for p in map(PlaceExecutor.unpack, places)}
        self._generations: dict[int, int] = {}
        self._cores: dict[int, list[int]] = {}

    @ray.method(concurrency_group="control")
    def attach(self, refs: list[Any]) -> list[bytes]:
        """Map the arena and take the places; executors of an earlier process leave them."""
        self._arena = attach_arena(refs)
        self._prepare()
        for place in self._places.values():
            self._generations[place.executor] = self._arena.attach(
                place.executor, Unit(place.unit), os.getpid()
            )
        return self._statuses()

    @ray.method(concurrency_group="loop")
    def serve(self, executor: int) -> str:
        """Run steps until the arena stops; the thread stays on its core."""
        keep_to(self._cores_for(executor))
        self._cores[executor] = sorted(os.sched_getaffinity(0))
        status, calls = ServeStatus.SLICE, self._calls_of(executor)
        while status is ServeStatus.SLICE:
            generation = self._generations[executor]
            status = self._arena.serve(executor, generation, SERVE_SLICE_NS, calls)
        return status.name

    def _prepare(self) -> None:
        """What must be there before an executor of this process serves."""

    def _cores_for(self, executor: int) -> list[int]:
        """Cores of the executor's thread and of those that it makes."""
        return self._places[executor].cores

    def _calls_of(self, executor: int) -> BackendCalls | None:
        """Who computes ops in the place of this executor's kernels."""
        return None

    @ray.method(concurrency_group="control")
    def status(self) -> list[bytes]:
        """One `ExecutorStatus` a place."""
        return self._statuses()

    def _statuses(self) -> list[bytes]:
        return [
            ExecutorStatus(
                index, os.getpid(), self._generations.get(index, 0), self._isa,
                self._cores.get(index, []),
            ).pack()
            for index in self._places
        ]  # fmt: skip


class CpuWorkerShell(ExecutorShell):
    """One compute core: attention heads, decode rows, cold clusters."""


class NpuExecutorShell(ExecutorShell):
    """Dense work: a back end's at its first place, else dense C kernels on CPU cores.

    `npu` is what `--npu` names; `waits`: a step waits for its graphs to be compiled.
    """

    def __init__(self, places: list[bytes], npu: str, waits: bool) -> None:
        super().__init__(places)
        self._npu, self._waits = parse_npu(npu), waits
        self._backend: Backend | None = None
        self._calls: BackendCalls | None = None

    @ray.method(concurrency_group="control")
    def open_backend(self) -> None:
        """Open the back end before anything else; ConfigError when it is not here."""
        self._open()

    def _open(self) -> Backend | None:
        if self._npu.has_graphs and self._backend is None:
            self._backend = open_backend(self._npu, len(self._places))
        return self._backend

    def _prepare(self) -> None:
        if not self._npu.has_graphs or self._calls is not None:
            return
        first = min(self._places)
        try:
            backend = self._open()  # of a lost process's successor
        except Exception as error:  # noqa: BLE001  whatever a back end raises, native goes on
            give_up(self._arena, first, str(error))
            return
        server = open_server(self._arena, first, backend, waits=self._waits)
        self._calls = BackendCalls(server) if server else None

    def _cores_for(self, executor: int) -> list[int]:
        if self._calls_of(executor) is None:
            return super()._cores_for(executor)
        cores = [place.cores for place in self._places.values()]  # the back end's threads need all
        return sorted({core for each in cores for core in each}) if all(cores) else []

    def _calls_of(self, executor: int) -> BackendCalls | None:
        return self._calls if executor == min(self._places) else None


class IoShell:
    """The only reader of the model file; what reads while tokens are computed keeps to `cores`."""

    def __init__(self, path: str, cores: list[int]) -> None:
        isa.select()
        self._path, self._cores = Path(path), cores

    @ray.method(concurrency_group="control")
    def attach(self, refs: list[Any], bytes_read: int) -> int:
        """Map the arena; `bytes_read` is where the count of bytes goes. Returns this process."""
        self._arena = attach_arena(refs)
        self._bytes_read = bytes_read
        return os.getpid()

    @ray.method(concurrency_group="control")
    def read(self, reads: Reads) -> ReadReport:
        """Bring weights to their places; the count of bytes read grows in the arena."""
        counter = self._arena.view(self._bytes_read, (1,), np.uint64)

        def progress(num_bytes: int) -> None:
            counter[0] = num_bytes

        return read_all(self._path, reads, self._arena, progress)

    @ray.method(concurrency_group="loop")
    def stream(
        self,
        offset: int,
        schedules: list[list[NcfSection]],
        trace: int,
        experts: ExpertPieces | None,
        faults: DeviceFaults,
    ) -> None:
        """Keep the stage buffers filled until the stream stops or a read fails for good.

        `trace` is where the ring for records of its reads lies, 0: none are kept; `experts` are
        what the loads of prompts are made up of.
        """
        keep_to(self._cores)
        prefer_short_slices(READER_SLICE_NS)
        with open_device(self._path) as file:
            device = faults.wrap(file, MonotonicClock())
            LayerReader(device, self._arena, offset, schedules, trace, experts).run()

    @ray.method(concurrency_group="loop")
    def read_neurons(
        self, offset: int, num_slots: int, queue_depth: int, faults: DeviceFaults
    ) -> int:
        """Perform the reads executors order until the ring stops (0) or one fails: its errno.

        The first `num_slots` slots stay mapped in the kernel where it allows that; at most
        `queue_depth` reads are under way.
        """
        keep_to(self._cores)
        prefer_short_slices(READER_SLICE_NS)
        options = DeviceOptions(queue_depth, max(queue_depth, DeviceOptions().max_requests))
        place = (self._path, self._arena, offset)
        with open_neuron_device(*place, options, registered_slots=num_slots) as file:
            device = faults.wrap(file, MonotonicClock())
            return NeuronReader(device, self._arena, offset).run()


class CacheShell:
    """Residency: of the model's sections, and of single neurons by the cache in the arena."""

    @ray.method(concurrency_group="control")
    def attach(self, refs: list[Any], layout: ArenaLayout) -> int:
        """Map the arena; returns this process."""
        self._arena, self._layout = attach_arena(refs), layout
        return os.getpid()

    @ray.method(concurrency_group="control")
    def reset_neurons(self, num_slots: int) -> None:
        """Forget every cached neuron: who changed the cache was lost in the midst of it."""
        format_neuron_cache(self._arena, self._layout, num_slots)

    @ray.method(concurrency_group="control")
    def resize_neurons(self, num_slots: int) -> None:
        """Let the cold region hold so many slots; memory behind them goes back to the system."""
        resize_neuron_cache(self._arena, self._layout, num_slots)

    @ray.method(concurrency_group="control")
    def plan(self, region_bytes: int, section_bytes: dict[str, int]) -> None:
        """Take charge of these sections."""
        self._state = CacheState(region_bytes, section_bytes)

    @ray.method(concurrency_group="control")
    def admit_fixed(self) -> list[str]:
        """Names to be read, in order."""
        return self._state.admit_fixed()

    @ray.method(concurrency_group="control")
    def landed(self, names: list[str]) -> int:
        """These are resident now; returns all resident bytes."""
        self._state.landed(names)
        return self._state.resident_bytes()

    @ray.method(concurrency_group="control")
    def read_failed(self, names: list[str]) -> None:
        """These could not be read."""
        self._state.read_failed(names)
