"""What a finished request gives back, with its measurements."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from polyneuron.actors.io_counters import NO_IO, IoCounters
from polyneuron.actors.messages import RequestOutcome


@dataclass(frozen=True, slots=True)
class Timings:
    """Times of one request in ms; a rate is None when there is nothing to divide."""

    load_ms: float
    prompt_n: int
    prompt_ms: float
    predicted_n: int
    predicted_ms: float
    token_ms: dict[str, float | None]
    """mean, p50, p90, p99 of the time between tokens."""
    outside_ms: float | None
    """Of a token: sampling, bookkeeping and hand-off, everything outside the step."""

    @property
    def prompt_per_second(self) -> float | None:
        """Prompt tokens a second."""
        return self.prompt_n / self.prompt_ms * 1e3 if self.prompt_ms else None

    @property
    def predicted_per_second(self) -> float | None:
        """Generated tokens a second, the first one not counted: prefill gave it."""
        return (self.predicted_n - 1) / self.predicted_ms * 1e3 if self.predicted_ms else None

    def as_dict(self) -> dict[str, Any]:
        """The `timings` object of `run --json`."""
        return {
            "load_ms": self.load_ms,
            "prompt_n": self.prompt_n,
            "prompt_ms": self.prompt_ms,
            "prompt_per_second": self.prompt_per_second,
            "predicted_n": self.predicted_n,
            "predicted_ms": self.predicted_ms,
            "predicted_per_second": self.predicted_per_second,
            "token_ms": self.token_ms,
            "outside_ms": self.outside_ms,
        }


@dataclass(frozen=True, slots=True)
class RequestIo:
    """What one request's steps read and waited for; a figure is None where nothing was measured.

    A step that computed several sequences counts whole for each of them.
    """

    prefill: IoCounters = NO_IO
    """Of the steps that computed the prompt."""
    decode: IoCounters = NO_IO
    bytes_per_token: float | None = None
    reads_per_token: float | None = None
    hit_rate: float | None = None
    """Of the neurons needed beyond their gates, those whose rows were in memory."""
    miss_rate_p99: float | None = None
    """99 in 100 tokens missed at most this share."""
    critical_path_share: float | None = None
    """Of the workers' time in decode, what they waited for weights."""

    def as_dict(self) -> dict[str, float | None]:
        """The `io` object of `run --json`."""
        return {
            "bytes_per_token": self.bytes_per_token,
            "reads_per_token": self.reads_per_token,
            "hit_rate": self.hit_rate,
            "miss_rate_p99": self.miss_rate_p99,
            "critical_path_share": self.critical_path_share,
        }


@dataclass(frozen=True, slots=True)
class CandidateReport:
    """One candidate of a prompt, as far as it is told of."""

    mean_logprob: float | None
    """Mean over its tokens of the natural logarithm of their probability, by the logits as they
    are, before temperature and filters; None without tokens."""
    num_tokens: int
    finish_reason: str


@dataclass(frozen=True, slots=True)
class BestOf:
    """All candidates of a prompt, and the number of the chosen one (paper §1.13)."""

    chosen: int
    candidates: tuple[CandidateReport, ...]

    @classmethod
    def among(cls, reports: Iterable[CandidateReport]) -> BestOf:
        """Choose the one whose tokens are the likeliest on average; of equals the first.

        One without a token comes after all others.
        """
        candidates = tuple(reports)
        means = [-math.inf if c.mean_logprob is None else c.mean_logprob for c in candidates]
        return cls(means.index(max(means)), candidates)

    def as_dict(self) -> dict[str, Any]:
        """The `best_of` object of `run --json`."""
        return {
            "n": len(self.candidates),
            "chosen": self.chosen,
            "candidates": [
                {
                    "mean_logprob": c.mean_logprob,
                    "n": c.num_tokens,
                    "finish_reason": c.finish_reason,
                }
                for c in self.candidates
            ],
        }


@dataclass(frozen=True, slots=True)
class Completion:
    """Text and tokens of one request; of several candidates, those of the best."""

    text: str
    prompt_tokens: list[int]
    tokens: list[int]
    finish_reason: str
    """stop, length or cancelled."""
    logits_sha256: str | None
    top_logprobs: list[list[tuple[int, float]]]
    timings: Timings
    io: RequestIo
    best_of: BestOf | None = None
    """None when there was one candidate only."""
    batch_sizes: list[tuple[int, int]] = field(default_factory=list)
    """(index of a token, sequences its decode step computed), where that number changed."""


def token_statistics(token_ns: list[int]) -> dict[str, float | None]:
    """Mean and percentiles in ms; None without tokens."""
    names = ("mean", "p50", "p90", "p99")
    if not token_ns:
        return dict.fromkeys(names)
    ms = np.array(token_ns) / 1e6
    values = (ms.mean(), *np.percentile(ms, (50, 90, 99)))
    return {name: round(float(value), 4) for name, value in zip(names, values, strict=True)}


def timings_of(outcome: RequestOutcome, load_ms: float, num_tokens: int) -> Timings:
    """The timings of an ended request."""
    steps = len(outcome.token_ns)
    return Timings(
        load_ms=round(load_ms, 3),
        prompt_n=outcome.num_prompt,
        prompt_ms=outcome.prefill_ns / 1e6,
        predicted_n=num_tokens,
        predicted_ms=sum(outcome.token_ns) / 1e6,
        token_ms=token_statistics(outcome.token_ns),
        outside_ms=outcome.outside_ns / steps / 1e6 if steps else None,
    )


def io_of(outcome: RequestOutcome, num_workers: int) -> RequestIo:
    """What the steps of an ended request read."""
    prefill, decode, steps = outcome.prefill_io, outcome.decode_io, len(outcome.token_ns)
    if not steps or not decode.bytes_read + decode.hits:
        return RequestIo(prefill, decode)
    misses = outcome.miss_rates
    return RequestIo(
        prefill,
        decode,
        bytes_per_token=decode.bytes_read / steps,
        reads_per_token=decode.reads / steps,
        hit_rate=decode.hit_rate,
        miss_rate_p99=float(np.percentile(misses, 99)) if misses else None,
        critical_path_share=decode.stall_ns / (num_workers * sum(outcome.token_ns)),
    )
