"""The coordinator's shell: one thread runs steps, Ray methods hand it requests."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray

from polyneuron.actors.coordinator import StepPlan
from polyneuron.actors.io_counters import IoMeter
from polyneuron.actors.messages import SubmitRequest
from polyneuron.actors.pending_change import PendingChange
from polyneuron.actors.readers import Readers
from polyneuron.actors.request_book import RequestBook
from polyneuron.actors.shells import attach_arena
from polyneuron.actors.step_meter import executor_name
from polyneuron.actors.step_runner import MAX_RECOVERIES, StepRunner
from polyneuron.actors.step_trace import make_trace
from polyneuron.actors.supervisor import Supervisor
from polyneuron.errors import DeviceError, EngineError
from polyneuron.io.arena_loader import Reads
from polyneuron.io.device_faults import DeviceFaults
from polyneuron.io.weight_reader import ReadReport
from polyneuron.kernels import isa
from polyneuron.kernels.arena import monotonic_ns
from polyneuron.model.spec import ModelSpec
from polyneuron.planning.layout import ArenaLayout

RESTART_TIMEOUT_S = 30.0
UNWIND_TIMEOUT_NS = 5_000_000_000
WATCH_NS = 500_000_000
IDLE_WATCH_S = 1.0
POLL_S = 0.001


@dataclass(frozen=True, slots=True)
class Crew:
    """Handles of the actors the coordinator commands."""

    io_actor: Any
    cache_actor: Any
    executors: dict[int, Any]
    """executor place -> handle of the actor that holds it"""
    model_path: str


def read_failure(path: str, error: int) -> str:
    """Why a request ended when its model could not be read any more."""
    if error == errno.ENODATA:
        return f"{path}: the file has become shorter while it was in use; put it back"
    return f"{path}: reading failed: {os.strerror(error)}; look at the disk's health"


class CoordinatorShell:
    """Steps of one node, what they need replaced, and the requests they serve."""

    def __init__(self) -> None:
        isa.select()
        self._changed = threading.Condition()
        self._stopping = False
        self._dry = False
        self._is_manned = False
        self._recoveries = 0
        self._reader_generation = 1
        self._watched_ns = self._lost_ns = 0
        self._pending = PendingChange(self._changed)
        self._hold_at: int | None = None

    @ray.method(concurrency_group="control")
    def attach(self, refs: list[Any], spec: ModelSpec, layout: ArenaLayout) -> int:
        """Map the arena and write the step programs into it; returns this process."""
        self._refs = refs  # an object passed to a constructor would tie restarts to it
        self._layout = layout
        self._arena = attach_arena(refs)
        self._trace = make_trace(self._arena, layout)
        self._runner = StepRunner(self._arena, spec, layout, self._trace)
        self._book = RequestBook(self._arena, layout, self._runner, self._trace)
        self._io_meter = IoMeter(self._arena, layout) if layout.is_streaming else None
        return os.getpid()

    @ray.method(concurrency_group="control")
    def start(self, crew: Crew, reads: Reads) -> ReadReport:
        """Meet the crew, have the executors serve and everything resident read."""
        self._crew = crew
        self._readers = Readers(self._arena, self._layout, crew.io_actor)
        self._attach_io()
        self._supervisor = Supervisor(self._arena, tuple(crew.executors))
        self._serve(list(crew.executors))
        report = self._read_resident(reads)
        if self._io_meter is not None:
            self._io_meter.take()  # what start-up put into the neuron cache no step has missed
        self._readers.start()
        self._is_manned = True
        return report

    def _serve(self, executors: list[int]) -> None:
        """Attach the actors that hold these places and let them serve; bounded."""
        actors = {self._crew.executors[i]: None for i in executors}
        refs = self._refs
        ray.get([actor.attach.remote(refs) for actor in actors], timeout=RESTART_TIMEOUT_S)
        for index, actor in self._crew.executors.items():
            if actor in actors:
                actor.serve.remote(index)

    def _read_resident(self, reads: Reads) -> ReadReport:
        cache = self._crew.cache_actor
        section_bytes = self._layout.resident_bytes
        ray.get(cache.plan.remote(sum(section_bytes.values()), section_bytes))
        names = ray.get(cache.admit_fixed.remote())
        try:
            report: ReadReport = ray.get(self._crew.io_actor.read.remote(reads))
        except Exception:
            ray.get(cache.read_failed.remote(names))
            raise
        ray.get(cache.landed.remote(names))
        return report

    # ---- requests

    @ray.method(concurrency_group="control")
    def submit(self, descriptors: list[bytes]) -> None:
        """Queue a `SubmitRequest`, or several that are candidates of one prompt."""
        requests = [SubmitRequest.unpack(descriptor) for descriptor in descriptors]
        with self._changed:
            self._book.submit(requests)
            self._changed.notify()

    @ray.method(concurrency_group="control")
    def cancel(self, request_ids: list[int]) -> None:
        """End requests at the next token; unknown or ended ones are no error."""
        with self._changed:
            for request_id in request_ids:
                self._book.cancel(request_id)

    @ray.method(concurrency_group="control")
    def take_outcome(self, request_id: int) -> bytes:
        """The `RequestOutcome` of an ended request, once."""
        with self._changed:
            return self._book.take_outcome(request_id).pack()

    @ray.method(concurrency_group="control")
    def set_dry(self, dry: bool) -> None:
        """Whether steps skip their kernels: measures what everything else costs."""
        self._dry = dry

    @ray.method(concurrency_group="control")
    def resize_cache(self, num_slots: int, memory_bytes: int) -> None:
        """Have the neuron cache hold so many slots, between two steps; returns when it does.

        `memory_bytes`: what all of the product may take, which is why.
        """
        kept = "the neuron cache kept its size"
        self._pending.ask(lambda: self._resize(num_slots, memory_bytes), kept)

    @ray.method(concurrency_group="control")
    def disturb_reads(self, faults: DeviceFaults) -> None:
        """From between two steps on, read the model file as if this were wrong with the device."""
        self._pending.ask(lambda: self._disturb(faults), "reads go on as before")

    @ray.method(concurrency_group="control")
    def hold_at(self, num_tokens: int | None) -> None:
        """Begin no step once all requests so far have generated so many tokens; None: go on."""
        with self._changed:
            self._hold_at = num_tokens
            self._changed.notify_all()

    @ray.method(concurrency_group="control")
    def stop(self) -> None:
        """End the loop and everything in it."""
        with self._changed:
            self._stopping = True
            self._pending.give_up()
        self._arena.stop()
        if self._is_manned:
            self._readers.stop()

    # ---- the loop

    @ray.method(concurrency_group="loop")
    def run(self) -> None:
        """Run steps while there are sequences; else sleep, and look after the executors."""
        while True:
            self._pending.make()
            with self._changed:
                plan = self._next_plan()
                if plan is None and not self._stopping and not self._pending.is_wanted:
                    self._changed.wait(IDLE_WATCH_S)
                    plan = self._next_plan()
                if self._stopping:
                    self._book.fail_all("stopped", None)
                    self._trace.close()
                    return
            if plan is not None:
                self._perform(plan)
            elif self._is_manned:
                self._watch_idle()

    def _next_plan(self) -> StepPlan | None:
        is_held = self._hold_at is not None and self._book.num_generated >= self._hold_at
        return None if is_held else self._book.next_plan()

    def _resize(self, num_slots: int, memory_bytes: int) -> None:
        """Resize the neuron cache; no read may be under way, since pages may go."""
        with self._without_readers():
            self._ask_cache("resize_neurons", num_slots)
            self._readers.num_slots = num_slots
        self._trace.resized(num_slots, memory_bytes)

    def _disturb(self, faults: DeviceFaults) -> None:
        with self._without_readers():
            self._readers.faults = faults

    @contextmanager
    def _without_readers(self) -> Iterator[None]:
        """Between steps: nobody reads meanwhile, and then they begin anew."""
        self._replace_idle()
        self._runner.wait_until_left(self._recover)
        self._readers.end()
        if self._readers.are_lost():
            self._replace_reader()
        try:
            yield
        finally:
            self._runner.restart_stream()
            self._readers.start()

    def _watch_idle(self) -> None:
        """Replace lost executors before a request needs them."""
        try:
            self._replace_idle()
        except Exception:  # noqa: BLE001  the next step meets it again and tells its request
            self._watched_ns = monotonic_ns()

    def _perform(self, plan: StepPlan) -> None:
        try:
            self._recoveries = 0
            self._replace_idle()
            logits, step_ns = self._runner.run(plan, self._recover, dry=self._dry)
        except Exception as error:  # noqa: BLE001  a failed step ends requests, not the loop
            with self._changed:
                self._book.fail_all("error", str(error) or repr(error))
            self._trace.step_failed()
            return
        with self._changed:
            io = self._io_meter.take() if self._io_meter is not None else None
            self._book.step_done(plan, logits, step_ns, io)
        self._trace.step_done(plan, step_ns, io)

    # ---- recovery

    def _replace_idle(self) -> None:
        """Between steps: replace dead executors and, now and then, those that were stopped.

        A stopped worker that holds no unit delays no step; the others do its work meanwhile.
        """
        now_ns = monotonic_ns()
        if now_ns - self._watched_ns < WATCH_NS:
            self._revive(self._told(self._supervisor.dead()))
            return
        self._watched_ns = now_ns
        lost = self._told(self._supervisor.lost())
        self._supervisor.kill(lost)
        self._revive(lost)

    def _told(self, lost: list[int]) -> list[int]:
        """These executors, after telling the timeline of them."""
        self._lost_ns = monotonic_ns()
        for name in self._names(lost):
            self._trace.lost("npu_lost" if name.startswith("npu") else "worker_lost", name)
        return lost

    def _names(self, executors: list[int]) -> list[str]:
        return [executor_name(i, self._layout.config.num_workers) for i in executors]

    def _recover(self) -> bool:
        """Asked while a step takes long: replace what was lost; True when there was anything."""
        if self._readers.have_ended():
            return self._restart_readers()
        lost = self._told(self._supervisor.lost())
        if not lost:
            return False
        what = f"executors {lost} were lost {MAX_RECOVERIES} times in one step"
        self._count_recovery(EngineError(what))
        self._arena.abort()
        self._supervisor.kill(lost)
        self._wait_unwound(lost)
        self._revive(lost)
        return True

    def _count_recovery(self, error: EngineError) -> None:
        """Raise the error when a step has been recovered too often."""
        self._recoveries += 1
        if self._recoveries > MAX_RECOVERIES:
            raise error

    def _restart_readers(self) -> bool:
        """Begin reading anew, after a reader gave up or its process was lost."""
        error, complaint = self._readers.error(), self._readers.complaint()
        lost_ns = monotonic_ns()
        self._trace.lost("read_error" if error else "reader_lost", "io")
        self._arena.abort()
        lost = self._supervisor.lost()  # at the same time: they do not leave the step either
        self._supervisor.kill(lost)
        self._wait_unwound(lost)
        self._readers.end()
        self._replace_reader()
        self._runner.restart_stream()
        self._arena.clear_abort()
        self._readers.start()
        self._reader_generation += 1
        self._trace.restarted("io", self._reader_generation, lost_ns)
        if error:
            raise DeviceError(error, read_failure(self._crew.model_path, error))
        self._count_recovery(complaint)
        return True

    def _replace_reader(self) -> None:
        """Have Ray's replacement of the I/O actor attach, and mend what the lost one left torn."""
        self._ask_replacement("the I/O actor", self._attach_io)
        if self._is_cache_torn():
            self._ask_cache("reset_neurons", self._readers.num_slots)

    def _attach_io(self) -> None:
        offset = self._layout.at("inputs.bytes_read")
        attached = self._crew.io_actor.attach.remote(self._refs, offset)
        self._readers.pid = ray.get(attached, timeout=RESTART_TIMEOUT_S)

    def _is_cache_torn(self) -> bool:
        return self._layout.has_neuron_cache and not self._runner.cache_is_whole()

    def _ask_cache(self, method: str, num_slots: int) -> None:
        """Have the cache actor, or the replacement of a lost one, change the neuron cache."""
        cache = self._crew.cache_actor

        def ask() -> None:
            ray.get(cache.attach.remote(self._refs, self._layout), timeout=RESTART_TIMEOUT_S)
            ray.get(getattr(cache, method).remote(num_slots), timeout=RESTART_TIMEOUT_S)

        self._ask_replacement("the cache actor", ask)

    def _mend_cache(self) -> None:
        """When a lost executor held the cache's lock, forget what the cache holds."""
        if not self._is_cache_torn():
            return
        self._readers.end()
        try:
            self._ask_cache("reset_neurons", self._readers.num_slots)
        finally:
            self._runner.restart_stream()
            self._readers.start()

    def _wait_unwound(self, lost: list[int]) -> None:
        end_ns = monotonic_ns() + UNWIND_TIMEOUT_NS
        while not self._supervisor.all_idle(but=lost):
            if monotonic_ns() > end_ns:
                raise EngineError("an executor did not leave the aborted step")
            self._pause()

    @staticmethod
    def _pause() -> None:
        threading.Event().wait(POLL_S)

    def _revive(self, lost: list[int]) -> None:
        """Have Ray's replacements of dead executors take their places, under a new epoch."""
        if not lost:
            return
        self._arena.header.epoch += 1
        self._mend_cache()
        self._ask_replacement(f"executors {lost}", lambda: self._serve(lost))
        self._arena.clear_abort()
        for index, name in zip(lost, self._names(lost), strict=True):
            generation = int(self._arena.executor(index).generation)
            self._trace.restarted(name, generation, self._lost_ns)

    def _ask_replacement(self, who: str, ask: Callable[[], None]) -> None:
        """Ask actors that Ray is restarting until they are back; bounded."""
        end_ns = monotonic_ns() + int(RESTART_TIMEOUT_S * 1e9)
        while True:
            try:
                return ask()
            except ray.exceptions.ActorUnavailableError:
                if monotonic_ns() > end_ns:
                    raise EngineError(f"{who} did not come back") from None
                self._pause()
