"""The coordinator's state: requests, phases, and which tokens the next step computes.

Pure: no clock, no Ray, no arena. The shell performs each `StepPlan` and reports what came of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from enum import StrEnum

from polyneuron.actors.messages import SubmitRequest
from polyneuron.config import EngineConfig, Phase
from polyneuron.errors import ProtocolError

KV_BLOCK_TOKENS = 32


class RequestStatus(StrEnum):
    """Where a request is in its life."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"


TRANSITIONS: dict[RequestStatus, frozenset[RequestStatus]] = {
    RequestStatus.WAITING: frozenset(
        {
            RequestStatus.PREFILL,  # a sequence slot and KV blocks are free
            RequestStatus.FINISHED,  # cancelled in the queue
        }
    ),
    RequestStatus.PREFILL: frozenset(
        {
            RequestStatus.DECODE,  # the prompt is computed, the first token sampled
            RequestStatus.FINISHED,  # scored, cancelled, failed, or ended by its first token
        }
    ),
    RequestStatus.DECODE: frozenset({RequestStatus.FINISHED}),
    RequestStatus.FINISHED: frozenset(),
}


@dataclass(slots=True)
class Sequence:
    """One request and what has been computed of it."""

    request: SubmitRequest
    status: RequestStatus = RequestStatus.WAITING
    slot: int = -1
    """Its row of the block tables while it runs."""
    block_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    """Positions whose keys and values are in the KV cache."""
    tokens: list[int] = field(default_factory=list)
    """Tokens generated so far."""
    finish_reason: str = ""

    def move_to(self, status: RequestStatus) -> None:
        """Change the status along an allowed edge, or raise and change nothing."""
        if status not in TRANSITIONS[self.status]:
            raise ProtocolError(
                f"request {self.request.request_id} cannot go from {self.status} to {status}"
            )
        self.status = status

    @property
    def num_uncomputed(self) -> int:
        """Prompt tokens still to be computed."""
        return max(0, len(self.request.prompt) - self.num_computed)


@dataclass(frozen=True, slots=True)
class StepRow:
    """One token of a step."""

    sequence: Sequence
    token_id: int
    position: int
    wants_logits: bool


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One forward pass: its tokens in order, and the phase whose program runs."""

    phase: Phase
    rows: tuple[StepRow, ...]

    @property
    def logit_rows(self) -> list[int]:
        """Indexes of the rows whose logits are wanted."""
        return [index for index, row in enumerate(self.rows) if row.wants_logits]


@dataclass(slots=True)
class CoordinatorState:
    """Queue, running sequences, free KV blocks."""

    config: EngineConfig
    num_kv_blocks: int
    waiting: deque[Sequence] = field(default_factory=deque)
    running: list[Sequence] = field(default_factory=list)
    free_blocks: list[int] = field(default_factory=list)
    free_slots: list[int] = field(default_factory=list)
    phase: Phase = Phase.IDLE

    def __post_init__(self) -> None:
        self.free_blocks = list(range(self.num_kv_blocks - 1, -1, -1))
        self.free_slots = list(range(self.config.max_sequences - 1, -1, -1))

    def submit(self, request: SubmitRequest) -> Sequence:
        """Queue a request; the sender has checked that it fits the context."""
        sequence = Sequence(request)
        self.waiting.append(sequence)
        return sequence

    def cancel(self, request_id: int) -> Sequence | None:
        """End a request wherever it is; None when it is not here (any more)."""
        for sequence in [*self.waiting, *self.running]:
            if sequence.request.request_id == request_id:
                self.finish(sequence, "cancelled")
                return sequence
        return None

    def finish(self, sequence: Sequence, reason: str) -> None:
        """End a sequence and free what it holds."""
        if sequence.status is RequestStatus.WAITING:
            self.waiting.remove(sequence)
        else:
            self.running.remove(sequence)
            self.free_slots.append(sequence.slot)
            self.free_blocks.extend(reversed(sequence.block_ids))
        sequence.move_to(RequestStatus.FINISHED)
        sequence.finish_reason = reason
        assert len(self.free_blocks) <= self.num_kv_blocks

    def admit(self) -> list[Sequence]:
        """Start waiting sequences, in order, while slots and KV blocks last."""
        admitted: list[Sequence] = []
        while self.waiting and self.free_slots:
            sequence = self.waiting[0]
            request = sequence.request
            needed = -(-(len(request.prompt) + request.max_tokens) // KV_BLOCK_TOKENS)
            if needed > len(self.free_blocks):
                break
            self.waiting.popleft()
            sequence.move_to(RequestStatus.PREFILL)
            sequence.slot = self.free_slots.pop()
            sequence.block_ids = [self.free_blocks.pop() for _ in range(needed)]
            self.running.append(sequence)
            admitted.append(sequence)
        return admitted

    def schedule(self) -> StepPlan | None:
        """The next step: a chunk of the first unfinished prompt, else a token of each sequence."""
        for sequence in self.running:
            if sequence.num_uncomputed:
                self.phase = Phase.PREFILL
                return StepPlan(self.phase, self._prefill_rows(sequence))
        if not self.running:
            self.phase = Phase.IDLE
            return None
        self.phase = Phase.DECODE
        rows = (StepRow(s, s.tokens[-1], s.num_computed, True) for s in self.running)
        return StepPlan(self.phase, tuple(rows))

    def _prefill_rows(self, sequence: Sequence) -> tuple[StepRow, ...]:
        prompt, first = sequence.request.prompt, sequence.num_computed
        last = min(len(prompt), first + self.config.max_tokens)
        score_from = sequence.request.score_from
        if score_from >= 0 and first < score_from:
            last = min(last, score_from)
        elif score_from >= 0:
            last = min(last, first + self.config.max_logit_rows)
        scoring = score_from >= 0 and first >= score_from
        return tuple(
            StepRow(sequence, prompt[i], i, scoring or (score_from < 0 and i == len(prompt) - 1))
            for i in range(first, last)
        )

    def computed(self, plan: StepPlan) -> None:
        """The step is done: its positions are in the KV cache."""
        for row in plan.rows:
            if row.sequence.status is not RequestStatus.FINISHED:
                row.sequence.num_computed = row.position + 1

    def append(self, sequence: Sequence, token_id: int) -> None:
        """Take a sampled token; the sequence ends at an end token or its limit."""
        if sequence.status is RequestStatus.PREFILL:
            sequence.move_to(RequestStatus.DECODE)
        sequence.tokens.append(token_id)
        if token_id in sequence.request.end_ids:
            self.finish(sequence, "stop")
        elif len(sequence.tokens) >= sequence.request.max_tokens:
            self.finish(sequence, "length")

    def fail_all(self, reason: str) -> SequenceOf[Sequence]:
        """End everything that runs or waits."""
        ended = [*self.running, *self.waiting]
        for sequence in ended:
            self.finish(sequence, reason)
        return ended
