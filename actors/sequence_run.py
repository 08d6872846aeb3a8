"""One running request beside its state: sampler, mailbox, measurements."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyneuron.actors.coordinator import Sequence
from polyneuron.actors.io_counters import NO_IO, IoCounters
from polyneuron.actors.messages import RequestOutcome
from polyneuron.config import Phase
from polyneuron.kernels.arena import Arena
from polyneuron.model.sampling import (
    Sampler,
    SamplingParams,
    log_probabilities,
    log_probability,
)
from polyneuron.planning.layout import MAILBOX_HEAD_BYTES, ArenaLayout

FINISHED_WORD = 4
"""Offset in a mailbox of the word that turns 1 at the end; the word before counts tokens."""
FINISHED_BIT = 1 << 31
"""In the counting word: it changes at the end too, so that no reader sleeps through it."""


class Mailbox:
    """Tokens of one request, written by the coordinator, read by the driver as they come."""

    def __init__(self, arena: Arena, layout: ArenaLayout, index: int) -> None:
        self._arena = arena
        self._offset = layout.at(f"mailbox.{index}")
        start, count = self._offset + MAILBOX_HEAD_BYTES, layout.config.num_ctx
        self._tokens = arena.view(start, (count,), np.int32)
        self._words = arena.view(self._offset, (2,), np.uint32)

    def clear(self) -> None:
        """Empty it for a new request."""
        self._words[:] = 0

    def push(self, token_id: int) -> None:
        """Append a token and wake the reader."""
        count = self._count
        self._tokens[count] = token_id
        self._arena.store_word(self._offset, count + 1)

    def finish(self) -> None:
        """No more tokens will come; wakes every reader."""
        self._arena.store_word(self._offset + FINISHED_WORD, 1)
        self._arena.store_word(self._offset, self._count | FINISHED_BIT)

    @property
    def finished(self) -> bool:
        """Whether the last token is in."""
        return bool(self._words[1])

    def tokens_from(self, first: int) -> list[int]:
        """The tokens so far, without the first ones."""
        tokens: list[int] = self._tokens[first : self._count].tolist()
        return tokens

    @property
    def _count(self) -> int:
        return int(self._words[0]) & ~FINISHED_BIT

    def wait_more(self, num_seen: int, timeout_ns: int) -> None:
        """Wait until there are more than `num_seen` tokens, the end, or the time is over."""
        if not self.finished:
            self._arena.wait_word(self._offset, num_seen, timeout_ns)

    def wait_finished(self, timeout_ns: int) -> None:
        """Wait for the end, at most `timeout_ns`."""
        self._arena.wait_word(self._offset + FINISHED_WORD, 0, timeout_ns)


@dataclass(slots=True)
class SequenceRun:
    """What the coordinator's shell keeps of one request."""

    sequence: Sequence
    mailbox: Mailbox
    sampler: Sampler
    start_ns: int = 0
    first_token_ns: int = 0
    last_token_ns: int = 0
    outside_ns: int = 0
    token_ns: list[int] = field(default_factory=list)
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    prefill_io: IoCounters = NO_IO
    decode_io: IoCounters = NO_IO
    miss_rates: list[float] = field(default_factory=list)
    batch_sizes: list[tuple[int, int]] = field(default_factory=list)
    digest: Any = None

    @classmethod
    def start(cls, sequence: Sequence, mailbox: Mailbox) -> SequenceRun:
        """Prepare a request that has just been queued."""
        request = sequence.request
        sampler = Sampler(SamplingParams(**request.sampling), request.prompt)
        digest = hashlib.sha256() if request.hash_logits else None
        return cls(sequence, mailbox, sampler, digest=digest)

    def score(self, logits: NDArray[np.float32], position: int) -> None:
        """Log-probability of the prompt token after `position`."""
        following = position + 1
        if following < len(self.sequence.request.prompt):
            token_id = self.sequence.request.prompt[following]
            self.scores.append(log_probability(logits, token_id))

    def sample(self, logits: NDArray[np.float32]) -> int:
        """The next token; keeps what the request wants to know of the logits."""
        if self.digest is not None:
            self.digest.update(logits.tobytes())
        if self.sequence.request.top_logprobs:
            self.top_logprobs.append(log_probabilities(logits, self.sequence.request.top_logprobs))
        token_id = self.sampler.sample(logits)
        if self.sequence.request.score_answer:
            self.scores.append(log_probability(logits, token_id))
        return token_id

    def step_done(self, phase: Phase, io: IoCounters) -> None:
        """Count what a step read that computed something of this request."""
        if phase is Phase.PREFILL:
            self.prefill_io = self.prefill_io.plus(io)
            return
        self.decode_io = self.decode_io.plus(io)
        if io.hit_rate is not None:
            self.miss_rates.append(1.0 - io.hit_rate)

    def token_done(self, now_ns: int, step_ns: int, batch_size: int = 0) -> None:
        """Count a token just sampled, of a step that gave `batch_size` tokens (0: a prompt)."""
        if batch_size and (not self.batch_sizes or self.batch_sizes[-1][1] != batch_size):
            self.batch_sizes.append((len(self.sequence.tokens) - 1, batch_size))
        if self.first_token_ns == 0:
            self.first_token_ns = now_ns
        else:
            self.token_ns.append(now_ns - self.last_token_ns)
            self.outside_ns += self.token_ns[-1] - step_ns
        self.last_token_ns = now_ns

    def outcome(self, now_ns: int, error: str | None = None) -> RequestOutcome:
        """The request's end."""
        end_ns = self.first_token_ns or now_ns
        return RequestOutcome(
            request_id=self.sequence.request.request_id,
            finish_reason=self.sequence.finish_reason,
            num_prompt=len(self.sequence.request.prompt),
            prefill_ns=end_ns - self.start_ns if self.start_ns else 0,
            token_ns=self.token_ns,
            outside_ns=self.outside_ns,
            logits_sha256=self.digest.hexdigest() if self.digest is not None else None,
            top_logprobs=self.top_logprobs,
            scores=self.scores,
            prefill_io=self.prefill_io,
            decode_io=self.decode_io,
            miss_rates=self.miss_rates,
            batch_sizes=self.batch_sizes,
            error=error,
        )
