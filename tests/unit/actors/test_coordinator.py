"""The coordinator's state: what is admitted, what a step computes, and who holds which blocks."""

from __future__ import annotations

import pytest

from polyneuron.actors.coordinator import KV_BLOCK_TOKENS, TRANSITIONS, RequestStatus, Sequence
from polyneuron.config import Phase
from polyneuron.errors import ProtocolError
from tests.support.coordinators import END_ID, make_coordinator, make_request, rows_of, run_step


class TestAdmission:
    def test_blocks_cover_prompt_and_answer(self) -> None:
        state = make_coordinator()
        sequence = state.submit(make_request(prompt=range(KV_BLOCK_TOKENS), max_tokens=1))
        assert state.admit() == [sequence]
        assert len(sequence.block_ids) == 2
        assert sequence.status is RequestStatus.PREFILL

    def test_queue_order_is_kept(self) -> None:
        """A small request does not overtake a big one that has no room yet."""
        state = make_coordinator(num_kv_blocks=3)
        first = state.submit(make_request(1, max_tokens=2 * KV_BLOCK_TOKENS - 5))
        big = state.submit(make_request(2, max_tokens=2 * KV_BLOCK_TOKENS - 5))
        small = state.submit(make_request(3))
        assert state.admit() == [first]
        assert list(state.waiting) == [big, small]
        state.finish(first, "cancelled")
        assert state.admit() == [big, small]

    def test_slots_bound_the_batch(self) -> None:
        state = make_coordinator(max_sequences=2)
        sequences = [state.submit(make_request(i)) for i in range(3)]
        assert state.admit() == sequences[:2]
        assert {s.slot for s in sequences[:2]} == {0, 1}
        state.finish(sequences[0], "stop")
        assert state.admit() == [sequences[2]]
        assert sequences[2].slot == sequences[0].slot

    def test_full_context_for_every_slot_fits(self) -> None:
        """As the layout gives blocks: each slot can hold the longest request there is."""
        num_ctx = 100
        state = make_coordinator(num_kv_blocks=4 * -(-num_ctx // KV_BLOCK_TOKENS))
        for i in range(4):
            state.submit(make_request(i, prompt=range(99), max_tokens=1))
        assert len(state.admit()) == 4


class TestPrefill:
    def test_prompt_is_cut_into_chunks(self) -> None:
        state = make_coordinator(max_tokens=2, max_sequences=2)
        state.submit(make_request(prompt=[10, 11, 12, 13, 14]))
        assert rows_of(run_step(state)) == [(1, 10, 0, False), (1, 11, 1, False)]
        assert [state.phase] == [Phase.PREFILL]
        assert rows_of(run_step(state)) == [(1, 12, 2, False), (1, 13, 3, False)]
        assert rows_of(run_step(state)) == [(1, 14, 4, True)]
        assert rows_of(run_step(state)) == [(1, 7, 5, True)]
        assert state.phase is Phase.DECODE

    def test_prompt_goes_before_decode(self) -> None:
        state = make_coordinator()
        state.submit(make_request(1))
        run_step(state)
        state.submit(make_request(2, prompt=[20, 21]))
        plan = run_step(state)
        assert rows_of(plan) == [(2, 20, 0, False), (2, 21, 1, True)]
        assert rows_of(run_step(state)) == [(1, 7, 5, True), (2, 7, 2, True)]

    def test_uncomputed_chunk_is_planned_again(self) -> None:
        """A step that was lost changes nothing until it is reported as computed."""
        state = make_coordinator(max_tokens=2, max_sequences=2)
        state.submit(make_request())
        state.admit()
        assert rows_of(state.schedule()) == rows_of(state.schedule())


class TestScoring:
    def test_logits_begin_at_the_scored_index(self) -> None:
        state = make_coordinator(max_tokens=4, max_logit_rows=4)
        sequence = state.submit(make_request(prompt=range(9), max_tokens=0, score_from=3))
        state.admit()
        chunks = []
        while sequence.num_uncomputed:
            plan = state.schedule()
            assert plan is not None
            chunks.append([(row.position, row.wants_logits) for row in plan.rows])
            state.computed(plan)
        assert chunks == [
            [(0, False), (1, False), (2, False)],
            [(3, True), (4, True), (5, True), (6, True)],
            [(7, True), (8, True)],
        ]

    def test_logit_rows_are_bounded(self) -> None:
        state = make_coordinator(max_tokens=16, max_sequences=2, max_logit_rows=3)
        state.submit(make_request(prompt=range(8), max_tokens=0, score_from=0))
        state.admit()
        plan = state.schedule()
        assert plan is not None
        assert len(plan.rows) == 3
        assert plan.logit_rows == [0, 1, 2]


class TestEnd:
    def test_end_token_stops(self) -> None:
        state = make_coordinator()
        sequence = state.submit(make_request())
        run_step(state, END_ID)
        assert (sequence.finish_reason, sequence.tokens) == ("stop", [END_ID])
        assert sequence.status is RequestStatus.FINISHED

    def test_limit_ends_with_length(self) -> None:
        state = make_coordinator()
        sequence = state.submit(make_request(max_tokens=2))
        run_step(state)
        assert sequence.status is RequestStatus.DECODE
        run_step(state)
        assert (sequence.finish_reason, len(sequence.tokens)) == ("length", 2)
        assert run_step(state) is None
        assert state.phase is Phase.IDLE

    def test_one_end_leaves_the_others(self) -> None:
        state = make_coordinator()
        state.submit(make_request(1, max_tokens=1))
        state.submit(make_request(2, max_tokens=3))
        for _ in range(2):
            run_step(state)
        assert rows_of(run_step(state)) == [(2, 7, 5, True)]

    @pytest.mark.parametrize("num_steps", [0, 1, 2, 3])
    def test_cancel_frees_everything(self, num_steps: int) -> None:
        """Waiting, mid-prompt, at its end, decoding."""
        state = make_coordinator(max_tokens=3, max_sequences=3)
        sequence = state.submit(make_request())
        for _ in range(num_steps):
            run_step(state)
        assert state.cancel(1) is sequence
        assert sequence.finish_reason == "cancelled"
        assert sorted(state.free_blocks) == list(range(16))
        assert sorted(state.free_slots) == list(range(3))
        assert run_step(state) is None
        assert state.cancel(1) is None

    def test_cancel_during_step_keeps_it_ended(self) -> None:
        """The step that was under way changes nothing of a request that has gone."""
        state = make_coordinator()
        sequence = state.submit(make_request())
        state.admit()
        plan = state.schedule()
        assert plan is not None
        state.cancel(1)
        state.computed(plan)
        assert sequence.num_computed == 0

    def test_failure_ends_all(self) -> None:
        state = make_coordinator(max_sequences=1)
        sequences = [state.submit(make_request(i)) for i in range(3)]
        run_step(state)
        assert {s.request.request_id for s in state.fail_all("error")} == {0, 1, 2}
        assert {s.finish_reason for s in sequences} == {"error"}
        assert sorted(state.free_blocks) == list(range(16))


class TestTransitions:
    @pytest.mark.parametrize("origin", RequestStatus)
    @pytest.mark.parametrize("target", RequestStatus)
    def test_only_listed_edges_pass(self, origin: RequestStatus, target: RequestStatus) -> None:
        sequence = Sequence(make_request(), status=origin)
        if target in TRANSITIONS[origin]:
            sequence.move_to(target)
            assert sequence.status is target
        else:
            with pytest.raises(ProtocolError, match=f"from {origin} to {target}"):
                sequence.move_to(target)
            assert sequence.status is origin

    def test_every_status_is_listed(self) -> None:
        assert set(TRANSITIONS) == set(RequestStatus)
        assert TRANSITIONS[RequestStatus.FINISHED] == frozenset()
