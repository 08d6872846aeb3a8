"""Requests from their submission until their outcome is taken, and what a step gives each of them.

No Ray and no lock here: the coordinator's shell calls it under its own lock, tests from one thread.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import numpy as np
from numpy.typing import NDArray

from polyneuron.actors.coordinator import (
    CoordinatorState,
    RequestStatus,
    Sequence,
    StepPlan,
    block_copies,
)
from polyneuron.actors.io_counters import IoCounters
from polyneuron.actors.messages import RequestOutcome, SubmitRequest
from polyneuron.actors.sequence_run import Mailbox, SequenceRun
from polyneuron.actors.step_runner import StepRunner
from polyneuron.actors.step_trace import StepTrace
from polyneuron.kernels.arena import Arena, monotonic_ns
from polyneuron.planning.layout import ArenaLayout


class RequestBook:
    """Every request with its state, sampler and mailbox; then its outcome."""

    def __init__(
        self,
        arena: Arena,
        layout: ArenaLayout,
        runner: StepRunner,
        trace: StepTrace | None = None,
    ) -> None:
        self._arena, self._layout, self._runner = arena, layout, runner
        self._trace = trace or StepTrace()
        self._state = self._trace.journalled(CoordinatorState(layout.config, layout.num_kv_blocks))
        self.runs: dict[int, SequenceRun] = {}
        """Of requests that wait or run, by request id."""
        self._ended: dict[int, RequestOutcome] = {}
        self.num_generated = 0
        """Tokens given to all requests so far."""

    def submit(self, requests: SequenceOf[SubmitRequest]) -> None:
        """Queue one request, or candidates of one prompt; all of them or, when it raises, none."""
        sequences = self._state.submit_candidates(requests)
        try:
            runs = [SequenceRun.start(s, self._empty_mailbox(s)) for s in sequences]
        except Exception:
            for sequence in sequences:
                self._state.finish(sequence, "error")
            raise
        self.runs.update({run.sequence.request.request_id: run for run in runs})
        for sequence in sequences:
            self._trace.request_changed(sequence)

    def _empty_mailbox(self, sequence: Sequence) -> Mailbox:
        mailbox = Mailbox(self._arena, self._layout, sequence.request.mailbox)
        mailbox.clear()
        return mailbox

    def cancel(self, request_id: int) -> None:
        """End a request; unknown or ended ones are no error."""
        sequence = self._state.cancel(request_id)
        if sequence is not None:
            self._end(self.runs[request_id])

    def fail_all(self, reason: str, error: str | None) -> None:
        """End everything that runs or waits."""
        for sequence in self._state.fail_all(reason):
            self._end(self.runs[sequence.request.request_id], error)

    def take_outcome(self, request_id: int) -> RequestOutcome:
        """The outcome of an ended request, once."""
        return self._ended.pop(request_id)

    def next_plan(self) -> StepPlan | None:
        """Admit who finds room, and plan the next step; None when nothing runs."""
        for sequence in self._state.admit():
            self._runner.place_sequence(sequence)
            self.runs[sequence.request.request_id].start_ns = monotonic_ns()
            self._trace.request_changed(sequence)
        plan = self._state.schedule()
        self._trace.planned(plan, self._state.num_steps)
        return plan

    def step_done(
        self,
        plan: StepPlan,
        logits: NDArray[np.float32],
        step_ns: int,
        io: IoCounters | None = None,
    ) -> None:
        """Take what a step gave: logits (rows wanted, vocabulary), its time, what was read."""
        joined = self._state.computed(plan)
        self._runner.copy_blocks(block_copies(plan.rows[0].sequence, joined))
        if io is not None:
            self._count_io(plan, joined, io)
        for row_index, row in zip(plan.logit_rows, logits, strict=True):
            planned = plan.rows[row_index]
            for sequence in (planned.sequence, *joined):
                if run := self.runs.get(sequence.request.request_id):
                    self.take_logits(run, row, planned.position, step_ns, plan.batch_size)

    def _count_io(self, plan: StepPlan, joined: SequenceOf[Sequence], io: IoCounters) -> None:
        waiting = self._state.followers(plan.rows[0].sequence)
        sequences = [row.sequence for row in plan.rows] + [*joined, *waiting]
        for request_id in {sequence.request.request_id for sequence in sequences}:
            if run := self.runs.get(request_id):
                run.step_done(plan.phase, io)

    def take_logits(
        self,
        run: SequenceRun,
        logits: NDArray[np.float32],
        position: int,
        step_ns: int,
        batch_size: int,
    ) -> None:
        """Score or sample of one row of logits (vocabulary), after the token at `position`."""
        sequence = run.sequence
        if sequence.request.score_from >= 0:
            run.score(logits, position)
            if position == len(sequence.request.prompt) - 1:
                self._state.finish(sequence, "scored")
        elif sequence.request.max_tokens == 0:
            self._state.finish(sequence, "length")
        else:
            try:
                token_id = run.sample(logits)
            except Exception as error:  # noqa: BLE001  it is of this request alone
                self._state.finish(sequence, "error")
                self._end(run, str(error) or repr(error))
                return
            is_first = sequence.status is RequestStatus.PREFILL
            self._state.append(sequence, token_id)
            if is_first and sequence.status is RequestStatus.DECODE:
                self._trace.request_changed(sequence)
            self._trace.token_sampled(sequence)
            run.token_done(monotonic_ns(), step_ns, batch_size)
            run.mailbox.push(token_id)
            self.num_generated += 1
        if sequence.status is RequestStatus.FINISHED:
            self._end(run)

    def _end(self, run: SequenceRun, error: str | None = None) -> None:
        request_id = run.sequence.request.request_id
        self._trace.request_changed(run.sequence)
        self._ended[request_id] = run.outcome(monotonic_ns(), error)
        del self.runs[request_id]
        run.mailbox.finish()
