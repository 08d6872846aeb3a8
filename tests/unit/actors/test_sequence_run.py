"""A running request's measurements and its mailbox."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polyneuron.actors.arena import LocalArena, format_arena
from polyneuron.actors.coordinator import Sequence
from polyneuron.actors.io_counters import NO_IO, IoCounters
from polyneuron.actors.messages import RequestOutcome, SubmitRequest
from polyneuron.actors.sequence_run import Mailbox, SequenceRun
from polyneuron.config import EngineConfig, Phase
from polyneuron.planning.layout import plan_layout
from polyneuron.planning.source import open_source
from tests.support.families import gguf_path

CONFIG = EngineConfig(
    num_ctx=16, num_workers=1, num_npu_threads=0, max_tokens=4, max_sequences=1, max_requests=3
)


@pytest.fixture
def mailboxes() -> Iterator[list[Mailbox]]:
    source = open_source(Path(gguf_path("llama_tied")))
    layout = plan_layout(source.manifest, source.spec, CONFIG)
    local = LocalArena(layout)
    format_arena(local.arena, layout, 1)
    yield [Mailbox(local.arena, layout, index) for index in range(3)]
    local.close()


def make_run(mailbox: Mailbox, **changes: object) -> SequenceRun:
    fields: dict[str, Any] = {"prompt": [1, 2, 3], "max_tokens": 4}
    fields |= {"sampling": {"temperature": 0.0}} | changes
    return SequenceRun.start(Sequence(SubmitRequest(5, 0, **fields)), mailbox)


class TestMailbox:
    def test_tokens_arrive_in_order(self, mailboxes: list[Mailbox]) -> None:
        for token_id in range(16):
            mailboxes[1].push(token_id)
        assert mailboxes[1].tokens_from(0) == list(range(16))
        assert mailboxes[1].tokens_from(14) == [14, 15]
        assert mailboxes[0].tokens_from(0) == mailboxes[2].tokens_from(0) == []

    def test_end_is_seen_with_all_tokens(self, mailboxes: list[Mailbox]) -> None:
        mailboxes[0].push(9)
        before = mailboxes[0].finished
        mailboxes[0].finish()
        assert (before, mailboxes[0].finished) == (False, True)
        assert mailboxes[0].tokens_from(0) == [9]

    def test_ended_mailbox_is_not_waited_for(self, mailboxes: list[Mailbox]) -> None:
        """A wait with an hour's time-out returns at once; else the test run's limit ends it."""
        mailboxes[0].finish()
        mailboxes[0].wait_more(0, 3600 * 10**9)
        mailboxes[0].wait_finished(3600 * 10**9)

    def test_cleared_mailbox_is_as_new(self, mailboxes: list[Mailbox]) -> None:
        mailboxes[0].push(9)
        mailboxes[0].finish()
        mailboxes[0].clear()
        assert not mailboxes[0].finished
        assert mailboxes[0].tokens_from(0) == []


class TestSequenceRun:
    def test_reads_are_told_by_phase(self, mailboxes: list[Mailbox]) -> None:
        run = make_run(mailboxes[0])
        run.step_done(Phase.PREFILL, IoCounters(bytes_read=7))
        run.step_done(Phase.DECODE, IoCounters(5, 1, 2, hits=3, misses=1))
        run.step_done(Phase.DECODE, IoCounters(0, 0, 0, hits=4, misses=0))
        run.step_done(Phase.DECODE, NO_IO)
        outcome = RequestOutcome.unpack(run.outcome(9).pack())
        assert outcome.prefill_io == IoCounters(bytes_read=7)
        assert outcome.decode_io == IoCounters(5, 1, 2, 7, 1)
        assert outcome.miss_rates == [0.25, 0.0]

    def test_digest_covers_every_row(self, mailboxes: list[Mailbox]) -> None:
        run = make_run(mailboxes[0], hash_logits=True)
        rows = np.arange(6, dtype=np.float32).reshape(2, 3)
        assert [run.sample(row) for row in rows] == [2, 2]
        assert run.outcome(0).logits_sha256 == hashlib.sha256(rows.tobytes()).hexdigest()

    def test_no_digest_unless_wanted(self, mailboxes: list[Mailbox]) -> None:
        assert make_run(mailboxes[0]).outcome(0).logits_sha256 is None

    def test_scores_are_of_the_next_token(self, mailboxes: list[Mailbox]) -> None:
        run = make_run(mailboxes[0], score_from=0)
        logits = np.array([0.0, 0.0, 0.0, np.log(3.0)], dtype=np.float32)
        for position in range(3):
            run.score(logits, position)
        np.testing.assert_allclose(run.scores, np.log([1 / 6, 3 / 6]), rtol=1e-6)

    def test_times_lie_between_tokens(self, mailboxes: list[Mailbox]) -> None:
        run = make_run(mailboxes[0])
        run.start_ns = 100
        for now_ns, step_ns in ((150, 40), (170, 15), (200, 21)):
            run.token_done(now_ns, step_ns)
        outcome = run.outcome(999)
        assert outcome.prefill_ns == 50
        assert outcome.token_ns == [20, 30]
        assert outcome.outside_ns == 5 + 9

    def test_request_without_token_has_a_prefill_time(self, mailboxes: list[Mailbox]) -> None:
        run = make_run(mailboxes[0])
        assert run.outcome(70).prefill_ns == 0
        run.start_ns = 20
        assert run.outcome(70).prefill_ns == 50

    def test_answer_is_scored_by_logits_as_they_are(self, mailboxes: list[Mailbox]) -> None:
        """Before penalties, which here make another token the likelier one."""
        sampling = {"temperature": 0.0, "presence_penalty": 2.0}
        run = make_run(mailboxes[0], score_answer=True, sampling=sampling)
        logits = np.array([0.0, 0.0, 0.0, np.log(3.0)], dtype=np.float32)
        assert [run.sample(logits) for _ in range(2)] == [0, 3]
        np.testing.assert_allclose(run.scores, np.log([1 / 6, 3 / 6]), rtol=1e-6)

    def test_batch_sizes_are_kept_where_they_change(self, mailboxes: list[Mailbox]) -> None:
        run = make_run(mailboxes[0])
        for size in (0, 4, 4, 3, 3, 4):
            run.sequence.tokens.append(9)
            run.token_done(1, 1, size)
        outcome = RequestOutcome.unpack(run.outcome(9).pack())
        assert outcome.batch_sizes == [(1, 4), (3, 3), (5, 4)]
