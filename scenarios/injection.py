"""Does to a running engine what a scenario says: real pressure, real faults, real losses."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from polyneuron.actors.process_stats import identify, kill, process_name
from polyneuron.errors import ConfigError
from polyneuron.io.device_faults import DeviceFaults
from polyneuron.io.device_wrappers import Fault, FaultKind
from polyneuron.scenarios.disturbance import Deed, Disturbance, ReadFault
from polyneuron.scenarios.step_timeline import FAULTS
from polyneuron.timeline_events import Event

if TYPE_CHECKING:
    from polyneuron.engine import Engine

READER = -1
READER_TITLE = "IoShell"
"""Part of what the process of the I/O actor calls itself."""
FAULT_KINDS = {ReadFault.EIO: FaultKind.EIO, ReadFault.SHORT: FaultKind.SHORT_READ}


@dataclass(slots=True)
class Injector:
    """Disturbs one engine."""

    engine: Engine
    _faults: DeviceFaults = field(default_factory=DeviceFaults)
    _readers: set[int] = field(default_factory=set)
    """Processes of the I/O actor that were seen."""
    _held_at: int | None = None
    _lost: dict[int, int] = field(default_factory=dict)
    """Place of an executor -> the process that was ended there; READER: the I/O actor's."""

    def __post_init__(self) -> None:
        self._readers.add(self._reader())

    def begin(self, event: Disturbance) -> None:
        """Do it now."""
        if self.engine.timeline is not None and not event.is_loss:  # who finds it lost tells it
            actor, word, target = FAULTS[event.deed]
            self.engine.timeline.logger(actor).emit(Event.FAULT, kind=word, target=target)
        match event.deed:
            case Deed.SHRINK_MEMORY | Deed.GROW_MEMORY:
                self.engine.change_memory(self._memory_bytes(event))
            case Deed.SLOW_FLASH:
                self._disturb(replace(self._faults, slow_factor=event.factor))
            case Deed.STALL_FLASH:
                now = replace(self._faults, stall_ns=event.stall_ns, stall_every=event.every)
                self._disturb(now)
            case Deed.FAIL_READ:
                kind, count = FAULT_KINDS[event.kind], event.count
                fault = Fault(kind, 1, event.persistent, count)
                self._disturb(replace(self._faults, fault=fault))
                self._faults = self._faults.lasting()
            case Deed.STALL_NPU:
                for index in self._npu_places():
                    self.engine.actors.arena.executor(index).stall_ns = event.stall_ns
            case _:
                place = self._place(event)
                process = identify(self._holder(place))
                if process is not None:  # else it is lost already
                    self._lost[place] = process.pid
                    kill(process)

    def end(self, event: Disturbance) -> None:
        """Undo what lasted for a time."""
        if event.deed is Deed.SLOW_FLASH:
            self._disturb(replace(self._faults, slow_factor=1.0))
        elif event.deed is Deed.STALL_FLASH:
            self._disturb(replace(self._faults, stall_ns=0, stall_every=1))

    @property
    def are_replaced(self) -> bool:
        """Whether every lost process has a successor."""
        return all(self._holder(place) not in (0, pid) for place, pid in self._lost.items())

    @property
    def restarts(self) -> int:
        """Processes of executors and of the I/O actor that were replaced so far."""
        arena, config = self.engine.actors.arena, self.engine.config
        self._readers.add(self._reader())
        again = [
            int(arena.executor(index).generation) - 1
            for index in range(config.num_workers + config.num_npu_threads)
        ]
        workers, npu = again[: config.num_workers], again[config.num_workers :]
        return sum(workers) + max(npu, default=0) + len(self._readers - {0}) - 1

    def hold_at(self, num_tokens: int | None) -> None:
        """Let the engine begin no step once it has generated so many tokens; None: let it run."""
        if num_tokens != self._held_at:
            self._held_at = num_tokens
            self._ask("hold_at", num_tokens)

    def _disturb(self, faults: DeviceFaults) -> None:
        self._faults = faults
        self._ask("disturb_reads", faults)

    def _ask(self, method: str, value: object) -> None:
        from polyneuron.actors.launch import ask_coordinator  # imports Ray, which runs by now

        ask_coordinator(self.engine.actors, method, value)

    def _memory_bytes(self, event: Disturbance) -> int:
        """The budget that an event means; a share of feed forward is turned into bytes."""
        if event.ffn_resident is None:
            return event.memory_bytes
        budget = self.engine.budget
        less = (budget.resident_ffn_fraction - event.ffn_resident) * budget.ffn_bytes
        return budget.limit_bytes - max(0, round(less))

    def _place(self, event: Disturbance) -> int:
        """Where the process is that an event ends."""
        if event.deed is Deed.LOSE_READER:
            return READER
        config = self.engine.config
        if event.deed is Deed.LOSE_WORKER and event.worker >= config.num_workers:
            raise ConfigError(f"events: worker {event.worker}: there are {config.num_workers}")
        places = self._npu_places()
        if event.deed is Deed.LOSE_NPU and not places:
            raise ConfigError("events: lose_npu: this engine runs without an NPU executor's thread")
        return places[0] if event.deed is Deed.LOSE_NPU else event.worker

    def _holder(self, place: int) -> int:
        """The process at a place now; 0: none."""
        if place == READER:
            pid = self._reader()
            self._readers.add(pid)
            return pid
        return int(self.engine.actors.arena.executor(place).pid)

    def _npu_places(self) -> list[int]:
        config = self.engine.config
        return [config.num_workers + index for index in range(config.num_npu_threads)]

    def _reader(self) -> int:
        """The I/O actor's process; 0 when it is gone and its successor has not come yet."""
        found = [
            process.pid
            for process in self.engine.cluster.processes()
            if READER_TITLE in process_name(process.pid)
        ]
        return found[0] if found else 0
