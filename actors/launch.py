"""Creates the actors on a running private cluster and ends them again."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray

from polyneuron.actors.arena import format_arena, object_bytes
from polyneuron.actors.coordinator_shell import CoordinatorShell, Crew
from polyneuron.actors.messages import ExecutorStatus, PlaceExecutor
from polyneuron.actors.shells import CacheShell, CpuWorkerShell, IoShell, NpuExecutorShell
from polyneuron.actors.supervisor import LOST_STATES, process_state
from polyneuron.config import EngineConfig
from polyneuron.core_use import CoreUse, Places
from polyneuron.errors import EngineError, PolyneuronError
from polyneuron.io.arena_loader import Reads
from polyneuron.io.weight_reader import ReadReport
from polyneuron.kernels.arena import Arena, Unit
from polyneuron.model.spec import ModelSpec
from polyneuron.planning.layout import ArenaLayout, num_executors

STOP_TIMEOUT_S = 10.0
CALL_TIMEOUT_S = 60.0
CALL_SLICE_S = 0.5


def _actor(shell: type, name: str, loops: int, args: tuple[Any, ...]) -> Any:
    """Make an actor of a shell: `loops` threads for its endless methods, two for control calls."""
    groups = {"loop": max(1, loops), "control": 2}
    decorate: Any = ray.remote  # its stubs know neither concurrency groups nor names
    remote = decorate(concurrency_groups=groups, num_cpus=0, max_restarts=-1, name=name)(shell)
    return remote.remote(*args)


def _places(first: int, unit: Unit, places: Places) -> list[bytes]:
    """Executor places of one unit, numbered from `first` on."""
    return [PlaceExecutor(first + i, unit, list(cores)).pack() for i, cores in enumerate(places)]


@dataclass(frozen=True, slots=True)
class Staff:
    """The actors before they have an arena: what they take is measured first."""

    coordinator: Any
    crew: Crew


@dataclass(slots=True)
class Actors:
    """The actors of one engine, and the arena they share (owned by this process)."""

    ref: Any
    arena: Arena
    coordinator: Any
    crew: Crew
    loop: Any
    """The coordinator's running loop: ready only when it has ended."""

    pids: dict[str, int]
    """Processes that are not executors, by what they are: nobody else watches them."""
    npu_notice: str = ""
    """Why the NPU executor's back end gave up, once that has been said."""

    def stop(self) -> None:
        """Let every loop end; Ray's own shutdown ends the processes."""
        if not lost_processes(self):
            ray.wait([self.coordinator.stop.remote()], timeout=STOP_TIMEOUT_S)
            ray.wait([self.loop], timeout=STOP_TIMEOUT_S)
        self.arena.stop()


def put_arena(layout: ArenaLayout) -> tuple[Any, Arena]:
    """Put the arena into Ray's object store, format it, and map it here.

    The source array is never touched, so it costs address space and no memory. The copy has pages
    of zeros: those of the KV cache go back to the system and come again as contexts grow.
    """
    ref = ray.put(np.zeros(object_bytes(layout), dtype=np.uint8))
    arena = Arena.over(ray.get(ref), keep=ref)
    format_arena(arena, layout, num_executors(layout.config))
    kv = layout.spans["kv"]
    arena.release(kv.offset, kv.offset + kv.num_bytes)
    return ref, arena


def hire(path: Path, use: CoreUse, config: EngineConfig) -> Staff:
    """Create all actors and wait until they are there: CPU workers first, then the NPU executor.

    ConfigError when the NPU executor's back end is not here.
    """
    executors: dict[int, Any] = {}
    for index, place in enumerate(_places(0, Unit.CPU, use.workers)):
        executors[index] = _actor(CpuWorkerShell, f"cpu_worker_{index}", 1, ([place],))
    npu_places = _places(len(use.workers), Unit.NPU, use.prefill)
    npu = _actor(
        NpuExecutorShell,
        "npu_executor",
        len(npu_places),
        (npu_places, config.npu, config.deterministic),
    )
    for index in range(len(npu_places)):
        executors[len(use.workers) + index] = npu
    io_actor = _actor(IoShell, "io_actor", 2, (str(path), list(use.reader)))
    cache_actor = _actor(CacheShell, "cache_actor", 1, ())
    coordinator = _actor(CoordinatorShell, "coordinator", 1, ())
    everybody = {*executors.values(), npu, io_actor, cache_actor, coordinator}
    _get([actor.__ray_ready__.remote() for actor in everybody], CALL_TIMEOUT_S)
    _get(npu.open_backend.remote(), CALL_TIMEOUT_S)
    return Staff(coordinator, Crew(io_actor, cache_actor, executors, str(path)))


def launch(staff: Staff, spec: ModelSpec, layout: ArenaLayout) -> Actors:
    """Give the actors their arena and start the coordinator; weights are not read yet."""
    ref, arena = put_arena(layout)
    coordinator, io_actor = staff.coordinator, staff.crew.io_actor
    attached = [
        coordinator.attach.remote([ref], spec, layout),
        io_actor.attach.remote([ref], layout.at("inputs.bytes_read")),
        staff.crew.cache_actor.attach.remote([ref], layout),
    ]
    names = ("coordinator", "I/O actor", "cache actor")
    pids = dict(zip(names, _get(attached, CALL_TIMEOUT_S), strict=True))
    return Actors(ref, arena, coordinator, staff.crew, coordinator.run.remote(), pids)


def load(actors: Actors, reads: Reads) -> Any:
    """Order the weights to be read; the ref gives a `ReadReport`."""
    return actors.coordinator.start.remote(actors.crew, reads)


def take_report(ref: Any, timeout_s: float) -> ReadReport | None:
    """The report when the weights are there, None when the time is over first."""
    done, _ = ray.wait([ref], timeout=timeout_s)
    return _get(ref) if done else None


def _get(ref: Any, timeout_s: float | None = None) -> Any:
    """An answer; what an actor raised on purpose comes out as itself, all else as EngineError."""
    try:
        return ray.get(ref, timeout=timeout_s)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, PolyneuronError):
            raise error.cause from None
        raise EngineError(f"an actor failed: {error.cause!r}") from error
    except ray.exceptions.RayError as error:
        raise EngineError(f"an actor was lost: {type(error).__name__}") from error


def ask_coordinator(actors: Actors, method: str, *args: Any) -> Any:
    """Call the coordinator and wait for the answer; EngineError as soon as its process is lost."""
    check_processes(actors, "coordinator")
    ref = getattr(actors.coordinator, method).remote(*args)
    while not ray.wait([ref], timeout=CALL_SLICE_S)[0]:
        check_processes(actors, "coordinator")
    return _get(ref)


def lost_processes(actors: Actors) -> list[str]:
    """Those of `pids` that are gone or stopped."""
    return [name for name, pid in actors.pids.items() if process_state(pid) in LOST_STATES]


def check_processes(actors: Actors, *needed: str) -> None:
    """Raise EngineError when a process is gone or stopped; all are needed unless named."""
    lost = [name for name in lost_processes(actors) if not needed or name in needed]
    if lost:
        raise EngineError(f"the process of the {lost[0]} was lost: close this engine, open another")


def check_running(actors: Actors) -> None:
    """Raise when the coordinator's loop has ended, with what ended it, or its process is lost."""
    check_processes(actors, "coordinator")
    ended, _ = ray.wait([actors.loop], timeout=0)
    if ended:
        _get(actors.loop)
        raise EngineError("the coordinator has stopped")


def executor_statuses(actors: Actors) -> list[ExecutorStatus]:
    """What every executor says of itself, in order of their places."""
    handles = list(dict.fromkeys(actors.crew.executors.values()))
    packed = [_get(handle.status.remote(), CALL_TIMEOUT_S) for handle in handles]
    statuses = [ExecutorStatus.unpack(status) for group in packed for status in group]
    return sorted(statuses, key=lambda status: status.executor)
