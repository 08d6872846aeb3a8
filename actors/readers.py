"""The I/O actor's endless readers as the coordinator sees them: started, watched, ended."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from typing import Any

import ray

from polyneuron.actors.supervisor import LOST_STATES, process_state
from polyneuron.config import Phase
from polyneuron.errors import EngineError, PolyneuronError
from polyneuron.io.device_faults import DeviceFaults
from polyneuron.kernels.arena import Arena
from polyneuron.planning.layout import ArenaLayout

END_TIMEOUT_S = 30.0


class Readers:
    """The layer reader, where layers are streamed, and the neuron reader, where neurons are."""

    def __init__(self, arena: Arena, layout: ArenaLayout, io_actor: Any) -> None:
        self._arena, self._layout, self._io_actor = arena, layout, io_actor
        self.num_slots = layout.bundles.cold_slots if layout.bundles else 0
        """Slots of the neuron cache that may be read into."""
        self.faults = DeviceFaults()
        """What a scenario has made wrong with the device; counts from the next start on."""
        self.pid = 0
        """The I/O actor's process."""
        self._running: list[Any] = []
        """References that are ready when a reader has ended."""

    def start(self) -> None:
        """Have the I/O actor read: layers from the first load on, neurons as they are ordered."""
        if self._layout.is_streaming:
            offset = self._layout.at("boards.stream")
            self._arena.layer_stream(offset).stop = 0
            phases = (Phase.PREFILL, Phase.DECODE)
            schedules = [list(self._layout.loads(phase)) for phase in phases]
            trace = self._layout.at("trace.stream") if self._layout.config.trace else 0
            experts = self._layout.expert_pieces
            stream = self._io_actor.stream.remote(offset, schedules, trace, experts, self.faults)
            self._running.append(stream)
        if self._layout.has_neuron_cache:
            offset = self._layout.at("boards.reads")
            reads = self._arena.neuron_reads(offset)
            reads.stop = reads.error = 0
            depth = self._layout.config.queue_depth
            place = (offset, self.num_slots, depth)
            self._running.append(self._io_actor.read_neurons.remote(*place, self.faults))
        self.faults = self.faults.lasting()

    def have_ended(self) -> bool:
        """Whether one of them ended by itself, or its process was lost; a stopped one is ended."""
        if self._running and process_state(self.pid) in "Tt":
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)  # Ray notices that, and not that it was stopped
        return bool(self._running) and bool(ray.wait(self._running, timeout=0)[0])

    def are_lost(self) -> bool:
        """Whether the process that reads is gone, or stopped."""
        return process_state(self.pid) in LOST_STATES

    def complaint(self) -> EngineError:
        """Why one of them has ended."""
        for ended in ray.wait(self._running, timeout=0)[0]:
            try:
                ray.get(ended)
            except ray.exceptions.RayTaskError as error:
                known = isinstance(error.cause, PolyneuronError)
                return EngineError(str(error.cause) if known else f"reading: {error.cause!r}")
            except ray.exceptions.RayError:
                continue
        return EngineError("the process that reads the model file was lost again and again")

    def error(self) -> int:
        """The errno that ended one of them, 0 when none did."""
        error = 0
        if self._layout.is_streaming:
            error = int(self._arena.layer_stream(self._layout.at("boards.stream")).error)
        if self._layout.has_neuron_cache:
            error = error or int(self._arena.neuron_reads(self._layout.at("boards.reads")).error)
        return error

    def stop(self) -> None:
        """Tell them to leave."""
        if self._layout.is_streaming:
            self._arena.stop_stream(self._layout.at("boards.stream"))
        if self._layout.has_neuron_cache:
            self._arena.stop_neuron_reads(self._layout.at("boards.reads"))

    def end(self) -> None:
        """Stop them and wait: afterwards nothing lands in the arena any more."""
        self.stop()
        _, others = ray.wait(self._running, num_returns=len(self._running), timeout=END_TIMEOUT_S)
        if others:
            raise EngineError(f"a reader of the model file did not stop in {END_TIMEOUT_S:.0f} s")
        self._running = []
