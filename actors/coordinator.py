"""The coordinator's state: requests, phases, and which tokens the next step computes.

Pure: no clock, no Ray, no arena. The shell performs each `StepPlan` and reports what came of it.

Requests submitted together are candidates: answers to one prompt that is computed once (best-of-N,
paper §1.13). The first of them leads: it computes the prompt; the others wait for it, then go on
from the same KV blocks, of which only the last, half-filled one is copied.
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
    leader: Sequence | None = None
    """Who computes its prompt, while it waits for that; None: it does itself, or has it."""

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

    @property
    def num_shared_blocks(self) -> int:
        """KV blocks the prompt fills: candidates share them, since nobody writes to them again."""
        return len(self.request.prompt) // KV_BLOCK_TOKENS

    @property
    def num_blocks(self) -> int:
        """KV blocks of prompt and answer."""
        return -(-(len(self.request.prompt) + self.request.max_tokens) // KV_BLOCK_TOKENS)


@dataclass(frozen=True, slots=True)
class StepRow:
    """One token of a step."""

    sequence: Sequence
    token_id: int
    position: int
    wants_logits: bool


@dataclass(frozen=True, slots=True)
class BatchChange:
    """From step `step` on (counted from 0), decode steps compute `num_sequences` sequences."""

    step: int
    num_sequences: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One forward pass: its tokens in order, and the phase whose program runs."""

    phase: Phase
    rows: tuple[StepRow, ...]
    batch_change: BatchChange | None = None
    """Of a decode step with another number of sequences than the one before it."""

    @property
    def batch_size(self) -> int:
        """Sequences that get a token of a decode step; 0 in prefill."""
        return len(self.rows) if self.phase is Phase.DECODE else 0

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
    block_users: list[int] = field(default_factory=list)
    """How many sequences hold each KV block."""
    free_slots: list[int] = field(default_factory=list)
    phase: Phase = Phase.IDLE
    num_steps: int = 0
    """Steps computed so far."""
    batch_size: int = 0
    """Sequences of the last decode step."""
    owes_decode: bool = False
    """Whether the last step was a chunk of a prompt while others had a token to compute."""

    def __post_init__(self) -> None:
        self.free_blocks = list(range(self.num_kv_blocks - 1, -1, -1))
        self.block_users = [0] * self.num_kv_blocks
        self.free_slots = list(range(self.config.max_sequences - 1, -1, -1))

    def submit(self, request: SubmitRequest) -> Sequence:
        """Queue a request; the sender has checked that it fits the context."""
        (sequence,) = self.submit_candidates([request])
        return sequence

    def submit_candidates(self, requests: SequenceOf[SubmitRequest]) -> list[Sequence]:
        """Queue requests with one prompt, at most `max_sequences`; the first of them leads."""
        leader, *others = sequences = [Sequence(request) for request in requests]
        for sequence in others:
            sequence.leader = leader
        self.waiting.extend(sequences)
        return sequences

    def cancel(self, request_id: int) -> Sequence | None:
        """End a request wherever it is; None when it is not here (any more)."""
        for sequence in [*self.waiting, *self.running]:
            if sequence.request.request_id == request_id:
                self.finish(sequence, "cancelled")
                return sequence
        return None

    def followers(self, leader: Sequence) -> list[Sequence]:
        """Those that wait for the prompt a sequence computes, in their order."""
        return [s for s in (*self.waiting, *self.running) if s.leader is leader]

    def finish(self, sequence: Sequence, reason: str) -> None:
        """End a sequence and free what it holds."""
        self._pass_on_prompt(sequence)
        sequence.leader = None
        if sequence.status is RequestStatus.WAITING:
            self.waiting.remove(sequence)
        else:
            self.running.remove(sequence)
            self.free_slots.append(sequence.slot)
            self._release(sequence.block_ids)
        sequence.move_to(RequestStatus.FINISHED)
        sequence.finish_reason = reason
        assert len(self.free_blocks) <= self.num_kv_blocks

    def _pass_on_prompt(self, leader: Sequence) -> None:
        """Another candidate goes on with the prompt, from what lies in the blocks they share."""
        if followers := self.followers(leader):
            heir, *others = followers
            heir.leader = None
            heir.num_computed = min(leader.num_computed, leader.num_shared_blocks * KV_BLOCK_TOKENS)
            for sequence in others:
                sequence.leader = heir

    def _release(self, block_ids: list[int]) -> None:
        for block in reversed(block_ids):
            self.block_users[block] -= 1
            if self.block_users[block] == 0:
                self.free_blocks.append(block)

    def admit(self) -> list[Sequence]:
        """Start waiting sequences, in order, while slots and KV blocks last.

        Candidates of one prompt start together.
        """
        admitted: list[Sequence] = []
        while self.waiting:
            leader = self.waiting[0]
            group = [leader, *self.followers(leader)]
            shared = leader.num_shared_blocks
            needed = sum(s.num_blocks for s in group) - shared * (len(group) - 1)
            if len(group) > len(self.free_slots) or needed > len(self.free_blocks):
                break
            for sequence in group:
                self.waiting.popleft()
                self._start(sequence, [] if sequence is leader else leader.block_ids[:shared])
            admitted += group
        return admitted

    def _start(self, sequence: Sequence, shared: list[int]) -> None:
        sequence.move_to(RequestStatus.PREFILL)
        sequence.slot = self.free_slots.pop()
        own = [self.free_blocks.pop() for _ in range(sequence.num_blocks - len(shared))]
        sequence.block_ids = shared + own
        for block in sequence.block_ids:
            self.block_users[block] += 1
        self.running.append(sequence)

    def schedule(self) -> StepPlan | None:
        """The next step: a chunk of the first unfinished prompt, or a token of each sequence.

        While there are both they take turns, so that no prompt, however long, and no row of
        prompts holds up for more than a chunk who has begun to answer.
        """
        decoding = [s for s in self.running if s.status is RequestStatus.DECODE]
        prompts = (s for s in self.running if s.num_uncomputed and s.leader is None)
        prompt = None if decoding and self.owes_decode else next(prompts, None)
        if prompt is not None:
            self.phase = Phase.PREFILL
            return StepPlan(self.phase, self._prefill_rows(prompt))
        if not decoding:
            self.phase = Phase.IDLE
            return None
        self.phase = Phase.DECODE
        rows = tuple(StepRow(s, s.tokens[-1], s.num_computed, True) for s in decoding)
        is_new = len(rows) != self.batch_size
        change = BatchChange(self.num_steps, len(rows)) if is_new else None
        return StepPlan(self.phase, rows, change)

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

    def computed(self, plan: StepPlan) -> list[Sequence]:
        """The step is done: its positions are in the KV cache.

        Returns who now has a prompt that another sequence computed: its logits are theirs too, and
        the shell must perform `block_copies` before the next step.
        """
        self.num_steps += 1
        self.batch_size = plan.batch_size or self.batch_size
        self.owes_decode = plan.phase is Phase.PREFILL and any(
            s.status is RequestStatus.DECODE for s in self.running
        )
        for row in plan.rows:
            if row.sequence.status is not RequestStatus.FINISHED:
                row.sequence.num_computed = row.position + 1
        leader = plan.rows[0].sequence
        if leader.num_uncomputed:
            return []
        joined = self.followers(leader)
        for sequence in joined:
            sequence.leader = None
            sequence.num_computed = leader.num_computed
        return joined

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


def block_copies(leader: Sequence, joined: SequenceOf[Sequence]) -> list[tuple[int, int]]:
    """(from, to) of the KV blocks that sequences which joined need a copy of: the last of a prompt.

    None where the prompt ends with a full block.
    """
    index, rest = divmod(len(leader.request.prompt), KV_BLOCK_TOKENS)
    return [(leader.block_ids[index], s.block_ids[index]) for s in joined] if rest else []
