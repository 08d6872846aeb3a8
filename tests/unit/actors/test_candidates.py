"""Several at once: who takes turns with whom, the size of the batch, candidates of one prompt."""

from __future__ import annotations

from dataclasses import astuple

import pytest

from polyneuron.actors.coordinator import KV_BLOCK_TOKENS, block_copies
from tests.support.coordinators import (
    make_coordinator,
    make_request,
    rows_of,
    run_step,
    submit_candidates,
)


class TestTurns:
    """Who has begun to answer waits for one chunk at most, whatever stands in the queue."""

    def test_long_prompt_and_decode_take_turns(self) -> None:
        state = make_coordinator(max_tokens=2, max_sequences=2)
        state.submit(make_request(1, prompt=[10], max_tokens=9))
        run_step(state)
        state.submit(make_request(2, prompt=range(20, 26)))
        owners = [[row[0] for row in rows_of(run_step(state))] for _ in range(7)]
        assert owners == [[2, 2], [1], [2, 2], [1], [2, 2], [1, 2], [1, 2]]

    def test_row_of_prompts_and_decode_take_turns(self) -> None:
        state = make_coordinator()
        state.submit(make_request(1, prompt=[10], max_tokens=9))
        run_step(state)
        for number in (2, 3, 4):
            state.submit(make_request(number, prompt=[20, 21], max_tokens=9))
        owners = [{row[0] for row in rows_of(run_step(state))} for _ in range(6)]
        assert owners == [{2}, {1, 2}, {3}, {1, 2, 3}, {4}, {1, 2, 3, 4}]

    def test_prompts_alone_wait_for_nobody(self) -> None:
        state = make_coordinator(max_tokens=4)
        state.submit(make_request(1, prompt=range(10), max_tokens=0, score_from=9))
        state.admit()
        while (plan := state.schedule()) and plan.logit_rows == []:
            state.computed(plan)
            assert not state.owes_decode


class TestBatchSize:
    def test_changes_are_told_once(self) -> None:
        state = make_coordinator(max_tokens=8)
        submit_candidates(state, [2, 3, 3, 5])
        state.submit(make_request(9, prompt=[20], max_tokens=2))
        changes = []
        while plan := run_step(state):
            changes.append(plan.batch_change and tuple(astuple(plan.batch_change)))
        # The prompt, one ends, another's prompt, which makes four again, then three end.
        assert changes == [None, (1, 4), None, None, (4, 1), None]

    def test_size_is_told_again_when_planned_again(self) -> None:
        """Until a step is computed its change has not happened."""
        state = make_coordinator()
        submit_candidates(state, [4, 4])
        run_step(state)
        first, again = state.schedule(), state.schedule()
        assert first is not None
        assert first == again
        assert first.batch_change is not None


class TestCandidates:
    PROMPT = range(KV_BLOCK_TOKENS + 8)

    def test_prompt_is_computed_once(self) -> None:
        state = make_coordinator(max_tokens=64)
        sequences = submit_candidates(state, [4, 4, 4], prompt=self.PROMPT)
        plan = run_step(state)
        assert plan is not None
        assert {row.sequence.request.request_id for row in plan.rows} == {1}
        assert [s.tokens for s in sequences] == [[7]] * 3
        end = len(self.PROMPT)
        assert rows_of(run_step(state)) == [(i, 7, end, True) for i in (1, 2, 3)]

    def test_full_blocks_are_shared_and_counted_once(self) -> None:
        state = make_coordinator(num_kv_blocks=4)
        sequences = submit_candidates(state, [4, 4, 4], prompt=self.PROMPT)
        assert state.admit() == sequences
        shared = {s.block_ids[0] for s in sequences}
        own = {s.block_ids[1] for s in sequences}
        assert (len(shared), len(own), state.free_blocks) == (1, 3, [])
        assert block_copies(sequences[0], sequences[1:]) == [
            (sequences[0].block_ids[1], s.block_ids[1]) for s in sequences[1:]
        ]

    def test_full_last_block_is_not_copied(self) -> None:
        state = make_coordinator()
        sequences = submit_candidates(state, [4, 4], prompt=range(KV_BLOCK_TOKENS))
        state.admit()
        assert block_copies(sequences[0], sequences[1:]) == []

    def test_too_few_blocks_let_all_wait(self) -> None:
        state = make_coordinator(num_kv_blocks=3)
        submit_candidates(state, [4, 4, 4], prompt=self.PROMPT)
        assert state.admit() == []
        assert len(state.free_blocks) == 3

    def test_too_few_slots_let_all_wait_in_order(self) -> None:
        state = make_coordinator(max_sequences=3)
        first = state.submit(make_request(8))
        sequences = submit_candidates(state, [4, 4, 4])
        last = state.submit(make_request(9))
        assert state.admit() == [first]
        state.finish(first, "cancelled")
        assert state.admit() == sequences
        assert list(state.waiting) == [last]

    def test_each_ends_by_itself(self) -> None:
        state = make_coordinator()
        sequences = submit_candidates(state, [1, 3, 2])
        sizes = []
        while plan := run_step(state):
            sizes.append(len(plan.logit_rows))
        assert sizes == [1, 2, 1]
        assert [len(s.tokens) for s in sequences] == [1, 3, 2]
        assert sorted(state.free_blocks) == list(range(16))
        assert state.block_users == [0] * 16

    @pytest.mark.parametrize("num_steps", [0, 1, 2])
    def test_lost_leader_passes_the_prompt_on(self, num_steps: int) -> None:
        """The next candidate goes on behind the last full block, and the others wait for it."""
        state = make_coordinator(max_tokens=36)
        sequences = submit_candidates(state, [4, 4, 4], prompt=range(80))
        for _ in range(num_steps):
            run_step(state)
        assert state.cancel(1) is sequences[0]
        plan = run_step(state)
        assert plan is not None
        first = plan.rows[0]
        assert first.sequence is sequences[1]
        assert first.position == [0, 36, 64][num_steps]
        while sequences[1].num_uncomputed:
            run_step(state)
        assert [s.tokens for s in sequences] == [[], [7], [7]]

    def test_leader_lost_during_its_last_chunk(self) -> None:
        """Its logits are nobody's: who goes on computes them again."""
        state = make_coordinator()
        sequences = submit_candidates(state, [4, 4])
        state.admit()
        plan = state.schedule()
        assert plan is not None
        state.cancel(1)
        assert state.computed(plan) == []
        assert sequences[1].num_uncomputed == 5

    @pytest.mark.parametrize("num_steps", [0, 1, 3])
    def test_cancelling_all_frees_everything(self, num_steps: int) -> None:
        state = make_coordinator(max_tokens=4)
        submit_candidates(state, [9, 9, 9, 9])
        for _ in range(num_steps):
            run_step(state)
        for number in (1, 3, 2, 4):
            state.cancel(number)
        assert sorted(state.free_blocks) == list(range(16))
        assert sorted(state.free_slots) == list(range(4))
        assert run_step(state) is None
