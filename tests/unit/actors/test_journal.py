"""Journals: what a real run's state was told gives the same answers when a fresh one is told it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import msgpack
import pytest

from polyneuron.actors.coordinator import CoordinatorState
from polyneuron.actors.journal import (
    Answered,
    JournalledState,
    journal_path,
    pack_entry,
    read_journal,
    replay_journal,
)
from polyneuron.errors import ConfigError, FormatError, ProtocolError
from tests.support.coordinators import make_coordinator, make_request

RECORDED = Path(__file__).parents[2] / "data" / "journal" / "best_of.journal"
"""Of real actors: three candidates that end one after the other, others that wait, a request that
is cancelled, one that is scored, and what the engine's end cut short."""


class Journal:
    """A state whose journal is in memory."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.answered: list[Answered] = []
        self.inner: CoordinatorState = make_coordinator()
        self.state = JournalledState(self.inner, self.answered.append)

    @property
    def entries(self) -> list[bytes]:
        """As they are in the file."""
        return [pack_entry(answered) for answered in self.answered]

    def pairs(self) -> list[tuple[str, bool]]:
        """Events, and whether the same answer came again."""
        self._path.write_bytes(b"".join(self.entries))
        return [(e.event, e.answer == answer) for e, answer in replay_journal(self._path)]


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path / "run.jsonl.journal")


def step(state: JournalledState, token_id: int = 7) -> bool:
    """One step whose every logits row gives `token_id`; False when nothing runs."""
    state.admit()
    plan = state.schedule()
    if plan is None:
        return False
    joined = state.computed(plan)
    for index in plan.logit_rows:
        for sequence in (plan.rows[index].sequence, *joined):
            state.append(sequence, token_id)
    return True


class TestRecorded:
    def test_fresh_state_answers_the_same(self) -> None:
        pairs = list(replay_journal(RECORDED))
        assert [entry.answer for entry, _ in pairs] == [answer for _, answer in pairs]
        found = Counter(entry.event for entry, _ in pairs)
        assert {"submit", "admit", "schedule", "computed", "append"} <= found.keys()
        assert {"cancel", "finish", "fail_all"} <= found.keys()

    def test_changed_policy_would_show(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A state that admits one request less at a time gives other answers."""
        admit = CoordinatorState.admit

        def late(state: CoordinatorState) -> object:
            return admit(state) if state.num_steps else []

        monkeypatch.setattr(CoordinatorState, "admit", late)
        assert any(entry.answer != answer for entry, answer in replay_journal(RECORDED))


class TestJournalled:
    def test_whole_life_is_told_again(self, journal: Journal) -> None:
        state = journal.state
        state.submit_candidates([make_request(1), make_request(2, max_tokens=2)])
        while step(state):
            pass
        state.submit_candidates([make_request(3)])
        step(state)
        assert state.cancel(3) is not None
        assert state.cancel(3) is None
        state.submit_candidates([make_request(4)])
        state.fail_all("stopped")
        pairs = journal.pairs()
        assert all(same for _, same in pairs)
        assert Counter(event for event, _ in pairs) == {
            "submit": 3, "admit": 6, "schedule": 6, "computed": 5, "append": 7, "cancel": 2,
            "fail_all": 1,
        }  # fmt: skip

    def test_idle_calls_are_kept_once(self, journal: Journal) -> None:
        for _ in range(50):
            assert not step(journal.state)
        assert [event for event, _ in journal.pairs()] == ["admit", "schedule"]

    def test_raised_error_is_an_answer(self, journal: Journal) -> None:
        (sequence,) = journal.state.submit_candidates([make_request(1)])
        step(journal.state)
        journal.state.cancel(1)
        with pytest.raises(ValueError, match="not in list"):
            journal.state.finish(sequence, "error")
        with pytest.raises(ProtocolError):
            sequence.move_to(sequence.status)
        assert journal.pairs()[-1] == ("finish", True)

    def test_state_is_changed_as_without(self, journal: Journal) -> None:
        plain = make_coordinator()
        plain.submit(make_request(1))
        journal.state.submit_candidates([make_request(1)])
        step(journal.state)
        plain.admit()
        plan = plain.schedule()
        assert plan is not None
        plain.computed(plan)
        plain.append(plan.rows[0].sequence, 7)
        assert (journal.inner.num_steps, journal.inner.free_blocks) == (
            plain.num_steps, plain.free_blocks
        )  # fmt: skip


class TestFile:
    def test_crash_loses_the_last_entry_only(self, journal: Journal, tmp_path: Path) -> None:
        journal.state.submit_candidates([make_request(1)])
        path = tmp_path / "cut"
        path.write_bytes(b"".join(journal.entries)[:-3])
        assert [entry.event for entry in read_journal(path)] == ["journal"]

    @pytest.mark.parametrize("content", [b"", b"\x01\x02", b"hello", b'{"t_ns":1}\n'])
    def test_other_files_are_refused(self, tmp_path: Path, content: bytes) -> None:
        path = tmp_path / "x.journal"
        path.write_bytes(content)
        with pytest.raises(FormatError, match=r"x\.journal: is "):
            list(replay_journal(path))

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (5, "is no journal"),
            ([], "does not begin with format 1"),
            ([1, [8, 4, 8], 1 << 40], "describes no coordinator"),
            ([1, [1 << 40, 4, 8], 16], "describes no coordinator"),
            ([1, [8, 4], 16], "describes no coordinator"),
            ([1, 8, 16], "describes no coordinator"),
            ([1, [8, "x", 8], 16], "describes no coordinator"),
        ],
    )
    def test_damaged_head_is_refused(self, arguments: object, said: str, tmp_path: Path) -> None:
        path = tmp_path / "x.journal"
        path.write_bytes(msgpack.packb(["journal", arguments, msgpack.packb(None)]))
        with pytest.raises(FormatError, match=said):
            list(replay_journal(path))

    def test_missing_file_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="cannot be read: No such file"):
            list(replay_journal(tmp_path / "none"))

    def test_newer_format_is_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "x.journal"
        path.write_bytes(msgpack.packb(["journal", [2, [8, 4, 8], 16], msgpack.packb(None)]))
        with pytest.raises(FormatError, match="does not begin with format 1"):
            list(replay_journal(path))

    def test_lies_beside_the_timeline(self) -> None:
        assert journal_path(Path("a/run.jsonl")) == Path("a/run.jsonl.journal")
