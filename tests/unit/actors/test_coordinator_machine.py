"""Random lives of requests and candidates: blocks and slots never leak, and nobody starves."""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from polyneuron.actors.coordinator import (
    KV_BLOCK_TOKENS,
    CoordinatorState,
    RequestStatus,
    Sequence,
    StepPlan,
    block_copies,
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
        self.last_chunk_held_up_others = False
        self.num_steps = self.batch_size = 0

    @rule(prompt=st.integers(1, NUM_CTX - 1), room=st.integers(0, NUM_CTX), scored=st.booleans())
    def submit(self, prompt: int, room: int, scored: bool) -> None:
        max_tokens = 0 if scored else max(1, min(room, NUM_CTX - prompt))
        request = self._request(prompt, max_tokens, prompt // 2 if scored else -1)
        self._queued([self.state.submit(request)])

    @rule(prompt=st.integers(1, NUM_CTX - 1), rooms=st.lists(st.integers(1, 70), min_size=2))
    def submit_candidates(self, prompt: int, rooms: list[int]) -> None:
        rooms = rooms[: self.config.max_sequences]
        limits = [min(room, NUM_CTX - prompt) for room in rooms]
        first = len(self.all)
        requests = [self._request(prompt, n, -1, first + i) for i, n in enumerate(limits)]
        self._queued(self.state.submit_candidates(requests))

    def _request(
        self, prompt: int, max_tokens: int, score_from: int, request_id: int | None = None
    ) -> SubmitRequest:
        number = len(self.all) if request_id is None else request_id
        tokens = [100 + i for i in range(prompt)]
        return SubmitRequest(number, 0, tokens, max_tokens, end_ids=[END_ID], score_from=score_from)

    def _queued(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            self.all.append(sequence)
            self.computed[sequence.request.request_id] = []
            self.queue.append(sequence.request.request_id)

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        """Also while a step is under way, and also what has ended or never was."""
        request_id = data.draw(st.integers(0, len(self.all)))
        known = {s.request.request_id: s for s in self.all}
        ended = request_id not in known or (known[request_id].status is RequestStatus.FINISHED)
        followers = [] if ended else self.state.followers(known[request_id])
        sequence = self.state.cancel(request_id)
        assert (sequence is None) == ended
        if followers:  # the next one goes on, from the blocks that are its own too
            shared = len(followers[0].request.prompt) // KV_BLOCK_TOKENS * KV_BLOCK_TOKENS
            self.computed[followers[0].request.request_id] = self.computed[request_id][:shared]
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
        decoding = [
            s.request.request_id for s in self.state.running if s.status is RequestStatus.DECODE
        ]
        if plan.phase is Phase.DECODE:
            assert owners == decoding
        else:
            assert len(set(owners)) == 1
            assert not (decoding and self.last_chunk_held_up_others), "they take turns"
        self._check_batch(plan)
        for row in plan.rows:
            sequence = row.sequence
            history = sequence.request.prompt + sequence.tokens
            assert row.token_id == history[row.position]
            assert row.position < len(sequence.block_ids) * KV_BLOCK_TOKENS

    def _check_batch(self, plan: StepPlan) -> None:
        """A change is told exactly when decode steps have another size than before."""
        change = plan.batch_change
        if plan.phase is Phase.DECODE and len(plan.rows) != self.batch_size:
            assert change is not None
            assert (change.step, change.num_sequences) == (self.num_steps, len(plan.rows))
        else:
            assert change is None

    @precondition(lambda self: self.plan is not None)
    @rule(is_end=st.booleans())
    def end_step(self, is_end: bool) -> None:
        plan, self.plan = self.plan, None
        assert plan is not None
        living = [row for row in plan.rows if row.sequence.status is not RequestStatus.FINISHED]
        self.num_steps += 1
        if plan.phase is Phase.DECODE:
            self.batch_size = len(plan.rows)
        decoding = any(s.status is RequestStatus.DECODE for s in self.state.running)
        self.last_chunk_held_up_others = plan.phase is Phase.PREFILL and decoding
        joined = self.state.computed(plan)
        for row in living:
            positions = self.computed[row.sequence.request.request_id]
            assert row.position == len(positions), "every position once, in order"
            positions.append(row.position)
        self._check_joined(plan.rows[0].sequence, joined)
        for row in living:
            for sequence in (row.sequence, *joined) if row.wants_logits else ():
                self._take(sequence, row.position, END_ID if is_end else 50)

    def _check_joined(self, leader: Sequence, joined: list[Sequence]) -> None:
        """Who joins shares full blocks, has the last one to itself, and its content from there."""
        full, rest = divmod(len(leader.request.prompt), KV_BLOCK_TOKENS)
        copies = block_copies(leader, joined)
        assert len(copies) == (len(joined) if rest else 0)
        for index, sequence in enumerate(joined):
            assert sequence.block_ids[:full] == leader.block_ids[:full]
            assert not set(sequence.block_ids[full:]) & set(leader.block_ids)
            if rest:
                assert copies[index] == (leader.block_ids[full], sequence.block_ids[full])
            self.computed[sequence.request.request_id] = list(range(sequence.num_computed))

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
        held = Counter(block for s in self.state.running for block in s.block_ids)
        assert sorted([*held, *self.state.free_blocks]) == list(range(self.num_blocks))
        assert self.state.block_users == [held[block] for block in range(self.num_blocks)]
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
        for sequence in self.all:
            if leader := sequence.leader:
                assert leader.leader is None
                assert leader.status is sequence.status is not RequestStatus.FINISHED
                assert leader.num_uncomputed, "nobody waits for what is there"


TestCoordinatorMachine = CoordinatorMachine.TestCase
TestCoordinatorMachine.settings = settings(max_examples=40, stateful_step_count=40)
