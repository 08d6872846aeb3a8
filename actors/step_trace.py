"""What the coordinator tells of its work: nothing, or a timeline's events (docs/TIMELINE.md)."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from pathlib import Path

from polyneuron.actors.coordinator import CoordinatorState, RequestStatus, Sequence, StepPlan
from polyneuron.actors.io_counters import IoCounters
from polyneuron.actors.journal import Answered, JournalledState, journal_path, pack_entry
from polyneuron.actors.step_meter import StepMeter
from polyneuron.config import Phase
from polyneuron.kernels.arena import Arena, StepFlag, Unit, monotonic_ns
from polyneuron.planning.layout import ArenaLayout
from polyneuron.timeline import MAX_TOLD, AppendedFile, TimelinePart, part_path
from polyneuron.timeline_events import Event


class StepTrace:
    """Keeps nothing: what the coordinator calls when no timeline is wanted."""

    def journalled(self, state: CoordinatorState) -> CoordinatorState | JournalledState:
        """The state to use instead of this one."""
        return state

    def request_changed(self, sequence: Sequence) -> None:
        """A request was queued, admitted, has its first token, or ended."""

    def token_sampled(self, sequence: Sequence) -> None:
        """A request got a token: the last one it has."""

    def planned(self, plan: StepPlan | None, step: int) -> None:
        """This is computed next, as step number `step`; None: nothing is."""

    def begin(self, graph: str, units: Collection[Unit]) -> int:
        """The step begins: its program is `graph`, run by executors of these units.

        Returns the `StepFlag`s it needs.
        """
        return 0

    def opened(self, step_seq: int) -> None:
        """The step is about to be rung under this number; once more when it is computed again."""

    def step_done(self, plan: StepPlan, step_ns: int, io: IoCounters | None) -> None:
        """The step has ended and took so long; what was read, None when all is in memory."""

    def step_failed(self) -> None:
        """The running step has ended without a result."""

    def resized(self, cold_slots: int, memory_bytes: int) -> None:
        """The neuron cache has so many slots now, to stay within so much memory."""

    def lost(self, kind: str, target: str) -> None:
        """An actor was found lost, or a read of it failed for good."""

    def restarted(self, target: str, generation: int, since_ns: int) -> None:
        """A lost actor's replacement is at work."""

    def close(self) -> None:
        """Nothing more will come."""


REQUEST_STATES = {
    RequestStatus.WAITING: "queued",
    RequestStatus.PREFILL: "admitted",
    RequestStatus.DECODE: "decode",
    RequestStatus.FINISHED: "finished",
}


class TimelineTrace(StepTrace):
    """Writes a part of the timeline, the trace records of the arena, and the journal."""

    def __init__(self, arena: Arena, layout: ArenaLayout) -> None:
        config = layout.config
        assert config.trace is not None
        path = Path(config.trace)
        self._layout = layout
        self._part = TimelinePart(part_path(path, "coordinator"))
        self._log = self._part.logger("coordinator")
        self._cache_log = self._part.logger("cache")
        self._meter = StepMeter(arena, layout, path, self._part)
        self._journal = AppendedFile(journal_path(path))
        self._answered: deque[Answered] = deque()
        """What the journal lacks yet; written together, as a part makes its lines."""
        self._phase, self._graph = Phase.IDLE, ""
        self._step, self._start_ns, self._num_executors = -1, 0, 0
        self._has_detail = False

    def journalled(self, state: CoordinatorState) -> JournalledState:
        """As `StepTrace`."""
        return JournalledState(state, self._answered.append)

    def request_changed(self, sequence: Sequence) -> None:
        """As `StepTrace`."""
        keys: dict[str, object] = {"prompt_tokens": len(sequence.request.prompt)}
        if sequence.status is RequestStatus.FINISHED:
            keys |= {"tokens": len(sequence.tokens), "reason": sequence.finish_reason}
        state = REQUEST_STATES[sequence.status]
        request_id = sequence.request.request_id
        self._log.emit(Event.REQUEST, request=request_id, state=state, **keys)

    def token_sampled(self, sequence: Sequence) -> None:
        """As `StepTrace`."""
        index, request_id = len(sequence.tokens) - 1, sequence.request.request_id
        self._log.emit(Event.TOKEN, request=request_id, index=index)

    def planned(self, plan: StepPlan | None, step: int) -> None:
        """As `StepTrace`."""
        self._step = step
        phase = plan.phase if plan else Phase.IDLE
        if phase is not self._phase:
            self._phase = phase
            self._log.emit(Event.PHASE, phase=str(phase))
            if plan is None:
                self._meter.drain()  # who was late to leave the last step has left it by now
                self._part.flush()
                self._write_journal()
        if plan and plan.batch_change:
            self._tell_batch(plan.batch_change.num_sequences)

    def _tell_batch(self, num_sequences: int) -> None:
        hot, share = self._layout.config.hot_for(num_sequences), 0.0
        if bundles := self._layout.bundles:  # what is not pinned cannot be hot
            neurons = min(bundles.rows.neurons_in(hot), bundles.pinned_neurons)
            hot = -(-neurons // bundles.rows.cluster_neurons)
            share = neurons / bundles.rows.num_neurons
        self._log.emit(Event.BATCH, sequences=num_sequences, hot_clusters=hot, hot_share=share)

    def begin(self, graph: str, units: Collection[Unit]) -> int:
        """As `StepTrace`."""
        if graph != self._graph:
            self._log.emit(Event.GRAPH, graph=graph, previous=self._graph)
            self._graph = graph
            config = self._layout.config
            parties = {Unit.CPU: config.num_workers, Unit.NPU: config.num_npu_threads}
            self._num_executors = sum(parties[unit] for unit in units)
        self._has_detail = self._layout.config.trace_detail.covers(self._step)
        return StepFlag.TIMED | (StepFlag.TRACE if self._has_detail else 0)

    def opened(self, step_seq: int) -> None:
        """As `StepTrace`."""
        self._meter.opened(step_seq, self._step, want_reads=self._has_detail)
        self._start_ns = monotonic_ns()

    def _write_journal(self) -> None:
        entries = []
        while self._answered:  # requests may come meanwhile
            entries.append(pack_entry(self._answered.popleft()))
        self._journal.append(b"".join(entries))

    def step_done(self, plan: StepPlan, step_ns: int, io: IoCounters | None) -> None:
        """As `StepTrace`."""
        if len(self._answered) >= MAX_TOLD:
            self._write_journal()
        if self._has_detail:
            self._meter.drain()
        used = io is not None and self._layout.has_neuron_cache
        self._log.emit(
            Event.STEP, t_ns=self._start_ns, ns=step_ns, step=self._step,
            phase=str(plan.phase), graph=self._graph, tokens=len(plan.rows),
            sequences=len({row.sequence.request.request_id for row in plan.rows}),
            stall_ns=io.stall_ns if io else None, executors=self._num_executors,
            bytes=io.bytes_read if io else None, reads=io.reads if io else None,
            needed=io.hits + io.misses if io and used else None,
            hits=io.hits if io and used else None, misses=io.misses if io and used else None,
            detail=self._has_detail, **self._meter.take(),
        )  # fmt: skip
        residency = self._meter.residency()
        if residency is not None:
            self._cache_log.emit(
                Event.RESIDENCY, t_ns=self._start_ns + step_ns, step=self._step, **residency
            )

    def step_failed(self) -> None:
        """As `StepTrace`."""
        self._write_journal()
        self._meter.drain()
        self._meter.take()  # what it counted is of no step

    def resized(self, cold_slots: int, memory_bytes: int) -> None:
        """As `StepTrace`."""
        self._cache_log.emit(
            Event.PLAN, what="resize", cold_slots=cold_slots, memory_bytes=memory_bytes
        )

    def lost(self, kind: str, target: str) -> None:
        """As `StepTrace`."""
        self._log.emit(Event.FAULT, kind=kind, target=target)

    def restarted(self, target: str, generation: int, since_ns: int) -> None:
        """As `StepTrace`."""
        took_ns = monotonic_ns() - since_ns
        self._log.emit(
            Event.RESTART, t_ns=since_ns, target=target, generation=generation, ns=took_ns
        )

    def close(self) -> None:
        """As `StepTrace`."""
        self._meter.close()
        self._part.close()
        self._write_journal()
        self._journal.close()


def make_trace(arena: Arena, layout: ArenaLayout) -> StepTrace:
    """What the configuration wants: a timeline, or nothing."""
    return TimelineTrace(arena, layout) if layout.config.trace else StepTrace()
