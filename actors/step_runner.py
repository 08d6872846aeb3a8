"""Performs step plans on the arena: writes the step's inputs, rings, waits, hands out logits.

No Ray here: the coordinator's shell uses it over Ray's arena, tests over a local one.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyneuron.actors.coordinator import Sequence, StepPlan
from polyneuron.actors.step_trace import StepTrace
from polyneuron.backends.notice import read_notice
from polyneuron.clock import MonotonicClock
from polyneuron.config import Phase
from polyneuron.errors import EngineError, ProtocolError
from polyneuron.kernels.arena import SPIN_LIMIT, Arena, StepFlag, StepStatus, Unit, monotonic_ns
from polyneuron.kernels.neuron_cache import NeuronCache
from polyneuron.kernels.quant import KV_BLOCK_TOKENS
from polyneuron.model.spec import ModelSpec
from polyneuron.planning.layout import ArenaLayout, hot_widths, num_executors
from polyneuron.planning.rope_tables import write_rope
from polyneuron.planning.step_program import compile_program, write_program

WAIT_SLICE_NS = 250_000_000
LOCK_TIMEOUT_NS = 100_000_000
POLL_NS = 1_000_000
MAX_RECOVERIES = 3


def stream_schedules(layout: ArenaLayout) -> dict[Phase, int]:
    """The number of each phase's list of loads; phases that read nothing have none."""
    prefill, decode = layout.loads(Phase.PREFILL), layout.loads(Phase.DECODE)
    schedules = {Phase.PREFILL: 0} if prefill else {}
    if decode:
        is_same = [s.offset for s in prefill] == [s.offset for s in decode]
        schedules[Phase.DECODE] = 0 if is_same else 1
    return schedules


class StepRunner:
    """One model's programs on one arena."""

    def __init__(
        self,
        arena: Arena,
        spec: ModelSpec,
        layout: ArenaLayout,
        trace: StepTrace | None = None,
    ) -> None:
        self._arena, self._spec, self._layout = arena, spec, layout
        self._trace = trace or StepTrace()
        config = layout.config
        self._num_ops: dict[str, int] = {}
        self._units: dict[str, frozenset[Unit]] = {}
        self._write_program("prefill", Phase.PREFILL)
        for width in hot_widths(config):
            self._write_program(f"decode.{width}", Phase.DECODE, width)
        write_rope(arena, spec, layout)
        self._token_ids = self._input("token_ids", config.max_tokens)
        self._positions = self._input("positions", config.max_tokens)
        self._block_tables = self._input("block_tables", config.max_tokens)
        self._logit_rows = self._input("logit_rows", config.max_logit_rows)
        self._table_stride = config.num_ctx // KV_BLOCK_TOKENS + 1
        tables = self._input("tables", config.max_sequences * self._table_stride)
        self._tables = tables.reshape(config.max_sequences, self._table_stride)
        width = layout.strides["logits"] // 4
        shape = (config.max_logit_rows, width)
        self._logits = arena.view(layout.at("activations.logits"), shape, np.float32)
        # Of KV blocks (layers, blocks, bytes): as words, which copy faster.
        block_bytes = layout.kv_layer_bytes // layout.num_kv_blocks
        kv_shape = (spec.num_layers, layout.num_kv_blocks, block_bytes // 8)
        self._kv = arena.view(layout.at("kv.blocks"), kv_shape, np.uint64)
        self._write_constants()
        self._has_told = False

    def _write_program(self, name: str, phase: Phase, hot_clusters: int = 0) -> None:
        ops = compile_program(self._spec, self._layout, phase, hot_clusters)
        write_program(self._arena, self._layout.at(f"boards.program.{name}"), ops)
        self._num_ops[name] = len(ops)
        self._units[name] = frozenset(op.unit for op in ops)

    def _input(self, name: str, count: int) -> NDArray[np.int32]:
        return self._arena.view(self._layout.at(f"inputs.{name}"), (count,), np.int32)

    def _write_constants(self) -> None:
        step, config = self._arena.step, self._layout.config
        step.num_parties[Unit.CPU] = config.num_workers
        step.num_parties[Unit.NPU] = config.num_npu_threads
        step.spin_limit = SPIN_LIMIT
        step.max_tokens = config.max_tokens
        step.table_stride = self._table_stride
        self._stream = self._layout.at("boards.stream") if self._layout.is_streaming else 0
        step.stream, step.stream_base = self._stream, 0
        self._schedules = stream_schedules(self._layout)
        self._epoch = 0
        for name in ("token_ids", "positions", "block_tables", "tables", "logit_rows"):
            setattr(step, name, self._layout.at(f"inputs.{name}"))

    @property
    def stream(self) -> Any:
        """`struct layer_stream`, live, or None when every layer is resident."""
        return self._arena.layer_stream(self._stream) if self._stream else None

    def cache_is_whole(self) -> bool:
        """Whether nobody was lost while changing the neuron cache. No step may run."""
        cache = NeuronCache(self._arena.address + self._layout.at("boards.cache"))
        try:
            with cache.locked(LOCK_TIMEOUT_NS):
                return True
        except ProtocolError:
            return False

    def restart_stream(self) -> None:
        """After a failed read: begin with the first streamed layer. No reader may run."""
        stream = self.stream
        if stream is None:
            return
        stream.landed = stream.consumed = stream.error = 0
        stream.serving = stream.schedule  # the next reader begins there
        self._arena.step.stream_base = 0

    def wait_until_left(self, recover: Callable[[], bool]) -> None:
        """Wait until no executor is in a step that has ended.

        One that was descheduled may still free a buffer of it, or look for a load of it.
        """
        executors = [self._arena.executor(i) for i in range(num_executors(self._layout.config))]
        end_ns = monotonic_ns() + WAIT_SLICE_NS
        while any(executor.busy_seq for executor in executors):
            if self._arena.header.stop:
                raise EngineError("the engine was stopped")
            if monotonic_ns() > end_ns:
                recover()
                end_ns = monotonic_ns() + WAIT_SLICE_NS
            MonotonicClock().wait_ns(POLL_NS)

    def _want_schedule(self, phase: Phase, recover: Callable[[], bool]) -> None:
        """Have the reader begin the loads of a phase where they differ from the last ones."""
        schedule = self._schedules.get(phase)
        stream = self.stream
        if schedule is None or schedule == stream.serving == stream.schedule:
            return
        self.wait_until_left(recover)
        self._wait_serving(recover)  # of a step that failed before its list was begun
        if schedule != stream.serving:
            num_loads = len(self._layout.loads(phase))
            self._arena.switch_stream(self._stream, schedule, num_loads)
            self._arena.step.stream_base = 0
            self._wait_serving(recover)

    def _wait_serving(self, recover: Callable[[], bool]) -> None:
        while not self._arena.wait_serving(self._stream, WAIT_SLICE_NS):
            if self._arena.header.stop:
                raise EngineError("the engine was stopped")
            recover()

    def place_sequence(self, sequence: Sequence) -> None:
        """Write an admitted sequence's block table."""
        self._tables[sequence.slot, : len(sequence.block_ids)] = sequence.block_ids

    def copy_blocks(self, copies: SequenceOf[tuple[int, int]]) -> None:
        """Copy KV blocks (from, to) in every layer. No step may run."""
        for source, target in copies:
            for blocks in self._kv:  # one by one: numpy would copy more than that twice
                blocks[target] = blocks[source]

    def _phase(self, plan: StepPlan) -> Phase:
        """Which program computes a step: a short prompt need not stream every layer.

        Predicted mode, where programs differ in what they give, takes a single token: what a
        request computes must not depend on how many others there is room for.
        """
        few = len(plan.rows) <= self._layout.config.sparse_tokens
        return Phase.DECODE if few else plan.phase

    def graph(self, plan: StepPlan) -> str:
        """Its name: in decode the one for the step's number of tokens."""
        if self._phase(plan) is Phase.PREFILL:
            return "prefill"
        return f"decode.{self._layout.config.hot_for(len(plan.rows))}"

    def _open(self, plan: StepPlan, flags: int) -> int:
        seq = self._arena.open_step()
        count, logit_rows = len(plan.rows), plan.logit_rows
        assert 0 < count <= self._layout.config.max_tokens
        self._token_ids[:count] = [row.token_id for row in plan.rows]
        self._positions[:count] = [row.position for row in plan.rows]
        self._block_tables[:count] = [row.sequence.slot for row in plan.rows]
        self._logit_rows[: len(logit_rows)] = logit_rows
        step = self._arena.step
        program = self.graph(plan)
        step.program = self._layout.at(f"boards.program.{program}")
        step.program_ops = self._num_ops[program]
        step.num_tokens, step.num_logit_rows, step.flags = count, len(logit_rows), flags
        self._epoch = (self._epoch + self._spec.num_layers) % (1 << 32)
        step.epoch = self._epoch
        return seq

    def _tell_notice(self) -> None:
        """Tell the timeline, once, that the NPU executor's back end has failed."""
        if not self._has_told and read_notice(self._arena, self._layout.at("inputs.npu_notice")):
            self._has_told = True
            self._trace.lost("npu_failed", "npu.0")

    def run(
        self, plan: StepPlan, recover: Callable[[], bool], *, dry: bool = False
    ) -> tuple[NDArray[np.float32], int]:
        """Compute a step; returns its logits (rows wanted, vocabulary) and the ns it took.

        `recover` is asked on every slice in which the step did not end: it returns True when it
        replaced an executor, and then the same step is computed again. The logits are the arena's
        own memory: read them before the next step.
        """
        program = self.graph(plan)
        flags = self._trace.begin(program, self._units[program]) | (StepFlag.DRY if dry else 0)
        while True:
            if self._stream:
                self._want_schedule(self._phase(plan), recover)
            seq = self._open(plan, flags)
            self._trace.opened(seq)
            start_ns = monotonic_ns()
            self._arena.ring(seq)
            while (status := self._arena.wait_step(seq, WAIT_SLICE_NS)) is StepStatus.TIMEOUT:
                if recover():
                    break
            if self._stream:
                # After a recovery too: the executors have left, the pass begins anew.
                self._arena.step.stream_base = self._arena.end_pass(self._stream)
            self._tell_notice()
            if status is StepStatus.DONE:
                rows = self._logits[: len(plan.logit_rows), : self._spec.vocab_size]
                return rows, monotonic_ns() - start_ns
            if status is StepStatus.ABORTED:
                # A recovery in this loop clears the word it sets, or raises and leaves it set.
                stopped = self._arena.header.stop
                raise EngineError("the engine was stopped" if stopped else "the step was aborted")
