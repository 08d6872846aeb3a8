"""What a simulated run tells its timeline (docs/TIMELINE.md has the events and their keys)."""

from __future__ import annotations

from polyneuron.actors.coordinator import Sequence, StepPlan
from polyneuron.config import Phase
from polyneuron.scenarios.disturbance import Deed, Disturbance
from polyneuron.scenarios.memory_plan import MemoryPlan
from polyneuron.scenarios.script import Script
from polyneuron.scenarios.simulated_engine import SimulatedEngine, StepOutcome
from polyneuron.scenarios.step_detail import StepDetail
from polyneuron.scenarios.timeline_sink import TimelineSink

DETAILED_STEPS = 8
"""So many decode steps from the first one on are told cluster by cluster,"""
DETAIL_EVERY = 64
"""and then one in so many."""
FAULTS = {
    Deed.SHRINK_MEMORY: ("cache", "memory_shrink", "arena"),
    Deed.GROW_MEMORY: ("cache", "memory_grow", "arena"),
    Deed.SLOW_FLASH: ("io", "device_slow", "device"),
    Deed.STALL_FLASH: ("io", "device_slow", "device"),
    Deed.FAIL_READ: ("io", "read_error", "device"),
    Deed.STALL_NPU: ("npu.0", "npu_stall", "npu.0"),
    Deed.LOSE_NPU: ("npu.0", "npu_lost", "npu.0"),
    Deed.LOSE_READER: ("io", "reader_lost", "io"),
    Deed.SHIFT_HOT_SET: ("cache", "hot_set_shift", "neurons"),
    Deed.THROTTLE: ("coordinator", "cpu_slow", "workers"),
}


class StepTimeline:
    """Turns what happens into timeline events; without a sink it does nothing."""

    def __init__(self, sink: TimelineSink | None, engine: SimulatedEngine) -> None:
        self._sink = sink
        self._engine = engine
        self._phase = Phase.IDLE
        self._graph = ""
        self._decode_steps = 0
        self._written = StepDetail(engine.costs().num_cores)
        self._num_misses = 0

    def _emit(self, t_ns: int, actor: str, event: str, **keys: object) -> None:
        if self._sink is not None:
            self._sink.emit(t_ns, actor, event, **keys)

    def wants_detail(self) -> bool:
        """Whether the next decode step is told cluster by cluster."""
        if self._sink is None or self._engine.is_dense:
            return False
        step = self._decode_steps
        return step < DETAILED_STEPS or step % DETAIL_EVERY == 0

    # ---- the run, requests

    def run(self, script: Script) -> None:
        """The first line."""
        engine, shape = self._engine, self._engine.shape
        self._emit(
            0, "driver", "run", format=1, clock="model", model=shape.name,
            mode=engine.mode, isa="model",
            workers=engine.costs().num_cores, npu_threads=int(engine.costs().uses_npu),
            layers=shape.layers, clusters=engine.clusters, memory_bytes=engine.plan.used_bytes,
            arena_bytes=engine.plan.slots * shape.slot, cold_slots=max(0, engine.cold_slots),
            policy=str(script.engine.policy),
        )  # fmt: skip

    def _request(self, t_ns: int, sequence: Sequence, state: str, **keys: object) -> None:
        request = sequence.request
        self._emit(
            t_ns, "coordinator", "request", request=request.request_id, state=state,
            prompt_tokens=len(request.prompt), **keys,
        )  # fmt: skip

    def queued(self, t_ns: int, sequence: Sequence) -> None:
        """A request has come."""
        self._request(t_ns, sequence, "queued")

    def admitted(self, t_ns: int, sequence: Sequence) -> None:
        """It has a place."""
        self._request(t_ns, sequence, "admitted")

    def token(self, t_ns: int, sequence: Sequence) -> None:
        """One more token of it."""
        index = len(sequence.tokens) - 1
        if index == 0:
            self._request(t_ns, sequence, "decode")
        self._emit(t_ns, "coordinator", "token", request=sequence.request.request_id, index=index)

    def finished(self, t_ns: int, sequence: Sequence) -> None:
        """It has ended."""
        tokens, reason = len(sequence.tokens), sequence.finish_reason
        self._request(t_ns, sequence, "finished", tokens=tokens, reason=reason)

    # ---- steps

    def phase(self, t_ns: int, phase: Phase) -> None:
        """Another phase begins."""
        if phase is not self._phase:
            self._phase = phase
            self._emit(t_ns, "coordinator", "phase", phase=str(phase))

    def _swap(self, t_ns: int, graph: str) -> None:
        if graph != self._graph:
            self._emit(t_ns, "coordinator", "graph", graph=graph, previous=self._graph)
            self._graph = graph

    def batch(self, t_ns: int, sequences: int) -> None:
        """Another number of sequences decodes."""
        engine = self._engine
        self._emit(
            t_ns, "coordinator", "batch", sequences=sequences,
            hot_clusters=engine.hot_neurons // engine.cluster_neurons,
            hot_share=round(engine.hot_neurons / engine.shape.neurons, 6),
        )  # fmt: skip

    def _graph_name(self, plan: StepPlan) -> str:
        if plan.phase is Phase.PREFILL:
            return "prefill"
        return f"decode.{self._engine.hot_neurons // self._engine.cluster_neurons}"

    def step(self, t_ns: int, step: int, plan: StepPlan, outcome: StepOutcome) -> None:
        """One step, with what it did in detail if that was kept."""
        is_decode = plan.phase is Phase.DECODE
        self._decode_steps += is_decode
        if self._sink is None:
            return
        self.phase(t_ns, plan.phase)
        graph = self._graph_name(plan)
        self._swap(t_ns, graph)
        totals, cores = outcome.totals, self._engine.costs().num_cores
        counts: dict[str, object] = dict.fromkeys(
            ("needed", "hits", "misses", "predicted", "active")
        )
        if is_decode:
            counts = {
                "needed": outcome.used, "hits": totals.hits + totals.hot,
                "misses": totals.misses, "predicted": totals.needed, "active": totals.active,
            }  # fmt: skip
        self._emit(
            t_ns, "coordinator", "step", ns=outcome.ns, step=step, phase=str(plan.phase),
            graph=graph, tokens=len(plan.rows), sequences=plan.batch_size or 1,
            compute_ns=totals.compute_ns, stall_ns=totals.stall_ns, wait_ns=totals.wait_ns,
            executors=cores + int(self._engine.costs().uses_npu), bytes=totals.bytes,
            reads=totals.reads, **counts, detail=outcome.is_detailed,
        )  # fmt: skip
        if is_decode:
            self._residency(t_ns + outcome.ns, step, outcome)
        if outcome.is_detailed:
            self._detail(t_ns + outcome.layers_at, step)

    def _residency(self, t_ns: int, step: int, outcome: StepOutcome) -> None:
        engine = self._engine
        cache = None if engine.is_dense else engine.steps.cache
        if cache is None:
            return
        counters = cache.counters()
        self._emit(
            t_ns, "cache", "residency", step=step, admitted=outcome.totals.misses,
            evicted=counters.evictions - self._num_misses, resident=counters.num_resident,
            slots=max(0, engine.cold_slots),
        )  # fmt: skip
        self._num_misses = counters.evictions

    def _detail(self, t_ns: int, step: int) -> None:
        assert self._sink is not None
        self._written.num_cores = self._engine.costs().num_cores
        self._sink.tell(self._written.events(self._engine.steps.records, t_ns, step))

    # ---- events

    def resized(self, t_ns: int, plan: MemoryPlan) -> None:
        """Regions have other sizes."""
        slots = max(0, self._engine.cold_slots)
        self._emit(
            t_ns, "cache", "plan", what="resize", cold_slots=slots, memory_bytes=plan.used_bytes
        )

    def disturbed(self, t_ns: int, event: Disturbance) -> None:
        """An event of the script."""
        worker = f"worker.{event.worker}"
        actor, kind, target = FAULTS.get(event.deed, (worker, "worker_lost", worker))
        self.fault(t_ns, actor, kind, target)

    def fault(self, t_ns: int, actor: str, kind: str, target: str) -> None:
        """Something goes wrong."""
        self._emit(t_ns, actor, "fault", kind=kind, target=target)

    def restart(self, t_ns: int, event: Disturbance, generation: int, ns: int) -> None:
        """A lost actor is replaced."""
        worker = f"worker.{event.worker}"
        target = FAULTS.get(event.deed, (worker, "", worker))[2]
        self._emit(t_ns, "coordinator", "restart", target=target, generation=generation, ns=ns)
