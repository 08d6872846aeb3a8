"""Descriptors that cross Ray: frozen values with a msgpack form (DESIGN §3)."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Self

import msgpack

from polyneuron.actors.io_counters import NO_IO, IoCounters


@dataclass(frozen=True, slots=True)
class Message:
    """Base: packs to a msgpack array in field order, without names."""

    def pack(self) -> bytes:
        """The descriptor's bytes."""
        return bytes(msgpack.packb(list(asdict(self).values())))

    @classmethod
    def unpack(cls, descriptor: bytes) -> Self:
        """The message those bytes describe."""
        return cls(*msgpack.unpackb(descriptor, strict_map_key=False))


@dataclass(frozen=True, slots=True)
class SubmitRequest(Message):
    """Start a sequence; its tokens go to mailbox `mailbox`."""

    request_id: int
    mailbox: int
    prompt: list[int]
    max_tokens: int
    sampling: dict[str, Any] = field(default_factory=dict)
    """Fields of `SamplingParams`."""
    end_ids: list[int] = field(default_factory=list)
    top_logprobs: int = 0
    hash_logits: bool = False
    score_from: int = -1
    """Prompt index from which the next token's log-probability is wanted; -1: generate instead."""
    score_answer: bool = False
    """Keep the log-probability of every generated token, by the logits as they are."""


@dataclass(frozen=True, slots=True)
class RequestOutcome(Message):
    """How a request ended, with what was measured; times in ns."""

    request_id: int
    finish_reason: str
    num_prompt: int
    prefill_ns: int
    token_ns: list[int]
    """Of each token after the first: from the one before it."""
    outside_ns: int
    """Of all decode steps: time not inside a step (sampling, bookkeeping, hand-off)."""
    logits_sha256: str | None
    top_logprobs: list[list[tuple[int, float]]]
    scores: list[float]
    """Log-probabilities asked for by `score_from` or `score_answer`."""
    prefill_io: IoCounters = NO_IO
    """Of the steps that computed the prompt; a step of several sequences counts for each."""
    decode_io: IoCounters = NO_IO
    miss_rates: list[float] = field(default_factory=list)
    """Of decode steps that used the neuron cache: the share of neurons it did not have."""
    batch_sizes: list[tuple[int, int]] = field(default_factory=list)
    """(index of a token, sequences its step computed), where that number changed; no prefill."""
    error: str | None = None

    def __post_init__(self) -> None:
        rows = [[(token_id, value) for token_id, value in row] for row in self.top_logprobs]
        object.__setattr__(self, "top_logprobs", rows)  # msgpack has no tuples
        sizes = [(index, size) for index, size in self.batch_sizes]
        object.__setattr__(self, "batch_sizes", sizes)
        for name in ("prefill_io", "decode_io"):
            object.__setattr__(self, name, IoCounters(*getattr(self, name)))


@dataclass(frozen=True, slots=True)
class PlaceExecutor(Message):
    """Take executor place `executor` and keep to `cores` (none: anywhere allowed)."""

    executor: int
    unit: int
    cores: list[int]


@dataclass(frozen=True, slots=True)
class ExecutorStatus(Message):
    """What an executor says of itself."""

    executor: int
    pid: int
    generation: int
    isa: str
    cores: list[int]
