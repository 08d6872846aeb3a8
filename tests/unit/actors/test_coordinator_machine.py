"""Random lives of requests: blocks and slots never leak, never double, and nobody starves."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from polyneuron.actors.coordinator import (
    KV_BLOCK_TOKENS,
    CoordinatorState,
    RequestStatus,
    Sequence,
    StepPlan,
)
from polyneuron.actors.messages import SubmitRequest
from polyneuron.config import EngineConfig, Phase

NUM_CTX = 96
END_ID = 1


class CoordinatorMachine(RuleBasedStateMachine):
    """Drives the state beside a plain account of what each request was given and has computed."""

    @initialize(sequences=st.integers(1, 4), chunk=st.integers(0, 40), logits=st.integers(0, 3))
    def start(self, sequences: int, chunk: int, logits: int) -> None:
        self.config = EngineConfig(
            max_tokens=sequences + chunk, max_sequences=sequences, max_logit_rows=sequences + logits
        )
        self.num_blocks = sequences * NUM_CTX // KV_BLOCK_TOKENS
        self.state = CoordinatorState(self.config, self.num_blocks)
        self.all: list[Sequence] = []
        self.computed: dict[int, list[int]] = {}
        self.queue: list[int] = []
        self.plan: StepPlan | None = None

    @rule(prompt=st.integers(1, NUM_CTX - 1), room=st.integers(0, NUM_CTX), scored=st.booleans())
    def submit(self, prompt: int, room: int, scored: bool) -> None:
        request_id = len(self.all)
        tokens = [100 + i for i in range(prompt)]
        max_tokens = 0 if scored else max(1, min(room, NUM_CTX - prompt))
        request = SubmitRequest(
            request_id, 0, tokens, max_tokens,
            end_ids=[END_ID], score_from=prompt // 2 if scored else -1,
        )  # fmt: skip
        self.all.append(self.state.submit(request))
        self.computed[request_id] = []
        self.queue.append(request_id)

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        """Also while a step is under way, and also what has ended or never was."""
        request_id = data.draw(st.integers(0, len(self.all)))
        known = {s.request.request_id: s for s in self.all}
        ended = request_id not in known or (known[request_id].status is RequestStatus.FINISHED)
        sequence = self.state.cancel(request_id)
        assert (sequence is None) == ended
        if sequence is not None:
            assert sequence.finish_reason == "cancelled"
            self.queue = [i for i in self.queue if i != request_id]

    @precondition(lambda self: self.plan is None)
    @rule()
    def begin_step(self) -> None:
        admitted = [s.request.request_id for s in self.state.admit()]
        assert admitted == self.queue[: len(admitted)], "first come, first served"
        del self.queue[: len(admitted)]
        self.plan = self.state.schedule()
        assert (self.plan is None) == (not self.state.running)
        if self.plan is None:
            assert not self.queue, "an idle engine has nothing waiting"
            return
        self._check_plan(self.plan)

    def _check_plan(self, plan: StepPlan) -> None:
        assert 0 < len(plan.rows) <= self.config.max_tokens
        assert len(plan.logit_rows) <= self.config.max_logit_rows
        owners = [row.sequence.request.request_id for row in plan.rows]
        if plan.phase is Phase.DECODE:
            assert owners == [s.request.request_id for s in self.state.running]
        else:
            assert len(set(owners)) == 1
        for row in plan.rows:
            sequence = row.sequence
            history = sequence.request.prompt + sequence.tokens
            assert row.token_id == history[row.position]
            assert row.position < len(sequence.block_ids) * KV_BLOCK_TOKENS

    @precondition(lambda self: self.plan is not None)
    @rule(is_end=st.booleans())
    def end_step(self, is_end: bool) -> None:
        plan, self.plan = self.plan, None
        assert plan is not None
        living = [row for row in plan.rows if row.sequence.status is not RequestStatus.FINISHED]
        self.state.computed(plan)
        for row in living:
            positions = self.computed[row.sequence.request.request_id]
            assert row.position == len(positions), "every position once, in order"
            positions.append(row.position)
        for row in living:
            if row.wants_logits:
                self._take(row.sequence, row.position, END_ID if is_end else 50)

    def _take(self, sequence: Sequence, position: int, token_id: int) -> None:
        request = sequence.request
        if request.score_from < 0:
            self.state.append(sequence, token_id)
            assert len(sequence.tokens) <= request.max_tokens
        elif position == len(request.prompt) - 1:
            self.state.finish(sequence, "scored")

    @precondition(lambda self: self.plan is None)
    @rule()
    def fail(self) -> None:
        ended = self.state.fail_all("error")
        assert len(ended) == len(set(map(id, ended)))
        self.queue = []

    @invariant()
    def nothing_leaks_or_doubles(self) -> None:
        if not hasattr(self, "state"):
            return
        held = [block for s in self.state.running for block in s.block_ids]
        assert sorted(held + self.state.free_blocks) == list(range(self.num_blocks))
        slots = [s.slot for s in self.state.running]
        assert sorted(slots + self.state.free_slots) == list(range(self.config.max_sequences))

    @invariant()
    def every_request_is_in_one_place(self) -> None:
        if not hasattr(self, "state"):
            return
        waiting = [s.request.request_id for s in self.state.waiting]
        running = [s.request.request_id for s in self.state.running]
        ended = [s.request.request_id for s in self.all if s.status is RequestStatus.FINISHED]
        assert sorted(waiting + running + ended) == list(range(len(self.all)))
        assert waiting == self.queue


TestCoordinatorMachine = CoordinatorMachine.TestCase
TestCoordinatorMachine.settings = settings(max_examples=40, stateful_step_count=40)
