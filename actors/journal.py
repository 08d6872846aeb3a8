"""The journal of a run: what the coordinator's state was told, and what it answered.

An entry is a msgpack array (event, arguments, answer). Fed to a fresh state, a journal must give
the same answers, byte for byte: a failure seen on real actors becomes a unit test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgpack

from polyneuron.actors.coordinator import CoordinatorState, Sequence, StepPlan, block_copies
from polyneuron.actors.messages import SubmitRequest
from polyneuron.config import EngineConfig
from polyneuron.errors import ConfigError, FormatError

T = TypeVar("T")

FORMAT = 1
CONFIG_FIELDS = ("max_tokens", "max_sequences", "max_logit_rows")
"""Of EngineConfig: what the state looks at."""
MAX_COUNT = 1 << 24
"""Of KV blocks, and of what else a state makes room for."""


def journal_path(path: Path) -> Path:
    """Where the journal of a timeline's run is."""
    return path.with_name(f"{path.name}.journal")


def ids_of(sequences: SequenceOf[Sequence]) -> list[int]:
    """Their requests' ids."""
    return [sequence.request.request_id for sequence in sequences]


def admission(admitted: SequenceOf[Sequence]) -> list[Any]:
    """The commands that admission gives: slot and KV blocks of each request."""
    return [[s.request.request_id, s.slot, s.block_ids] for s in admitted]


def commands(plan: StepPlan | None) -> list[Any] | None:
    """A plan as msgpack can hold it."""
    if plan is None:
        return None
    rows = [
        [row.sequence.request.request_id, row.token_id, row.position, row.wants_logits]
        for row in plan.rows
    ]
    change = plan.batch_change
    return [str(plan.phase), rows, [change.step, change.num_sequences] if change else None]


Answered = tuple[str, list[Any], Any]
"""What the state was told, its arguments, and its answer, all as msgpack can hold them."""


def pack_entry(answered: Answered) -> bytes:
    """An entry of a journal."""
    event, arguments, answer = answered
    return bytes(msgpack.packb([event, arguments, msgpack.packb(answer)]))


class JournalledState:
    """A coordinator's state that tells what it is told and what it answers."""

    def __init__(self, state: CoordinatorState, keep: Callable[[Answered], None]) -> None:
        self._state, self._keep_entry = state, keep
        self._is_idle = False
        config = [getattr(state.config, name) for name in CONFIG_FIELDS]
        self._keep("journal", [FORMAT, config, state.num_kv_blocks], None)

    @property
    def num_steps(self) -> int:
        """As `CoordinatorState`."""
        return self._state.num_steps

    def submit_candidates(self, requests: SequenceOf[SubmitRequest]) -> list[Sequence]:
        """As `CoordinatorState`."""
        packed = [request.pack() for request in requests]
        return self._tell(
            "submit", [packed], lambda: self._state.submit_candidates(requests), ids_of
        )

    def cancel(self, request_id: int) -> Sequence | None:
        """As `CoordinatorState`."""
        cancel = self._state.cancel
        return self._tell(
            "cancel", [request_id], lambda: cancel(request_id), lambda s: s is not None
        )

    def followers(self, leader: Sequence) -> list[Sequence]:
        """As `CoordinatorState`; changes nothing, so it is not written down."""
        return self._state.followers(leader)

    def finish(self, sequence: Sequence, reason: str) -> None:
        """As `CoordinatorState`."""
        arguments = [sequence.request.request_id, reason]
        self._tell("finish", arguments, lambda: self._state.finish(sequence, reason))

    def admit(self) -> list[Sequence]:
        """As `CoordinatorState`."""
        if self._is_idle and not self._state.waiting:
            return []
        return self._tell("admit", [], self._state.admit, admission)

    def schedule(self) -> StepPlan | None:
        """As `CoordinatorState`; of a row of calls that give nothing only the first is kept."""
        if self._is_idle and not self._state.running:
            return None
        plan = self._tell("schedule", [], self._state.schedule, commands)
        self._is_idle = plan is None
        return plan

    def computed(self, plan: StepPlan) -> list[Sequence]:
        """As `CoordinatorState`."""
        return self._tell(
            "computed", [], lambda: self._state.computed(plan), lambda joined: _joined(plan, joined)
        )

    def append(self, sequence: Sequence, token_id: int) -> None:
        """As `CoordinatorState`."""
        self._tell(
            "append",
            [sequence.request.request_id, token_id],
            lambda: self._state.append(sequence, token_id),
            lambda _: sequence.finish_reason,
        )

    def fail_all(self, reason: str) -> SequenceOf[Sequence]:
        """As `CoordinatorState`."""
        return self._tell("fail_all", [reason], lambda: self._state.fail_all(reason), ids_of)

    def _tell(
        self,
        event: str,
        arguments: list[Any],
        handle: Callable[[], T],
        answer: Callable[[T], Any] = lambda _: None,
    ) -> T:
        try:
            result = handle()
        except BaseException as error:
            self._keep(event, arguments, [type(error).__name__])
            raise
        self._keep(event, arguments, answer(result))
        return result

    def _keep(self, event: str, arguments: list[Any], answer: Any) -> None:
        self._is_idle = False
        self._keep_entry((event, arguments, answer))


def _joined(plan: StepPlan, joined: SequenceOf[Sequence]) -> list[Any]:
    """What follows a step: who has its prompt now, and the KV blocks to copy."""
    return [ids_of(joined), block_copies(plan.rows[0].sequence, joined) if joined else []]


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """One event with the answer that the run of the journal got."""

    event: str
    arguments: list[Any]
    answer: bytes


def read_journal(path: Path) -> Iterator[JournalEntry]:
    """A journal's entries, its head first; an entry that a crash cut short is left out."""
    try:
        with path.open("rb") as file:
            for entry in msgpack.Unpacker(file, strict_map_key=False):
                event, arguments, answer = entry
                if (type(event), type(arguments), type(answer)) != (str, list, bytes):
                    raise TypeError(event)
                yield JournalEntry(event, arguments, answer)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, TypeError):
        raise FormatError(f"{path}: is no journal") from None


@dataclass(slots=True)
class JournalReplay:
    """A fresh state that is told what a journal says."""

    state: CoordinatorState
    sequences: dict[int, Sequence] = field(default_factory=dict)
    plan: StepPlan | None = None

    @classmethod
    def open(cls, head: JournalEntry) -> JournalReplay:
        """The state that a journal's first entry describes."""
        if head.event != "journal" or head.arguments[:1] != [FORMAT]:
            raise FormatError(f"the journal does not begin with format {FORMAT}: write it anew")
        try:
            _, values, num_kv_blocks = head.arguments
            config = EngineConfig(**dict(zip(CONFIG_FIELDS, values, strict=True)))
            is_right = all(0 <= value < MAX_COUNT for value in (*values, num_kv_blocks))
        except (TypeError, ValueError):
            is_right = False
        if not is_right:
            raise FormatError("the journal's first entry describes no coordinator: damaged")
        return cls(CoordinatorState(config, num_kv_blocks))

    def answer(self, entry: JournalEntry) -> bytes:
        """Tell the state one event; its answer, packed as in the journal."""
        try:
            answer = getattr(self, f"_{entry.event}")(*entry.arguments)
        except Exception as error:  # noqa: BLE001  the run's state may have raised the same
            answer = [type(error).__name__]
        return bytes(msgpack.packb(answer))

    def _submit(self, packed: list[bytes]) -> list[int]:
        requests = [SubmitRequest.unpack(descriptor) for descriptor in packed]
        sequences = self.state.submit_candidates(requests)
        self.sequences.update(zip(ids_of(sequences), sequences, strict=True))
        return ids_of(sequences)

    def _cancel(self, request_id: int) -> bool:
        return self.state.cancel(request_id) is not None

    def _finish(self, request_id: int, reason: str) -> None:
        self.state.finish(self.sequences[request_id], reason)

    def _admit(self) -> list[Any]:
        return admission(self.state.admit())

    def _schedule(self) -> list[Any] | None:
        self.plan = self.state.schedule()
        return commands(self.plan)

    def _computed(self) -> list[Any]:
        assert self.plan is not None
        return _joined(self.plan, self.state.computed(self.plan))

    def _append(self, request_id: int, token_id: int) -> str:
        sequence = self.sequences[request_id]
        self.state.append(sequence, token_id)
        return sequence.finish_reason

    def _fail_all(self, reason: str) -> list[int]:
        return ids_of(self.state.fail_all(reason))


def replay_journal(path: Path) -> Iterator[tuple[JournalEntry, bytes]]:
    """Each entry of a journal, and what a fresh state answers to it now."""
    replay = None
    for entry in read_journal(path):
        if entry.event == "journal":
            replay = JournalReplay.open(entry)
        elif replay is None:
            raise FormatError(f"{path}: does not begin as a journal does")
        else:
            yield entry, replay.answer(entry)
    if replay is None:
        raise FormatError(f"{path}: is empty, no journal")
