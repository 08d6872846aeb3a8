"""What a simulated run adds up to: the figures that scenarios expect."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from polyneuron.scenarios.result import Figures
from polyneuron.scenarios.simulated_engine import StepOutcome

NS = 1e9
NS_PER_MS = 1e6


@dataclass(slots=True)
class Asked:
    """One request, whose candidates end one by one."""

    left: int
    """Candidates that have not ended."""
    has_failed: bool = False


@dataclass(slots=True)
class Measured:
    """Counted step by step; times in ns."""

    prefill_ns: int = 0
    prefill_tokens: int = 0
    decode_ns: int = 0
    decode_tokens: int = 0
    exposed_ns: int = 0
    used: int = 0
    misses: int = 0
    reads: int = 0
    bytes: int = 0
    miss_rates: list[float] = field(default_factory=list)
    token_ns: list[int] = field(default_factory=list)
    first_token_ns: list[int] = field(default_factory=list)
    """From a request's arrival to its first token."""
    tokens: int = 0
    finished: int = 0
    failed: int = 0
    restarts: int = 0
    peak_bytes: int = 0

    def prefill(self, outcome: StepOutcome, tokens: int) -> None:
        """A chunk of a prompt."""
        self.prefill_ns += outcome.ns
        self.prefill_tokens += tokens

    def decode(self, outcome: StepOutcome, tokens: int) -> None:
        """A step that gave so many tokens."""
        totals = outcome.totals
        self.decode_ns += outcome.ns
        self.decode_tokens += tokens
        self.exposed_ns += min(totals.exposed_ns, outcome.ns)
        self.used += outcome.used
        self.misses += totals.misses
        self.reads += totals.reads
        self.bytes += totals.bytes
        if outcome.used:
            self.miss_rates.append(totals.misses / outcome.used)

    def ended(self, asked: Asked, *, failed: bool) -> None:
        """A candidate has ended; with the last one its request has."""
        asked.left -= 1
        asked.has_failed |= failed
        if not asked.left:
            self.failed += asked.has_failed
            self.finished += not asked.has_failed

    def figures(self) -> Figures:
        """Every figure that was measured; None: there was nothing to measure it by."""
        times = sorted(self.token_ns)
        miss_rate = _ratio(self.misses, self.used)
        found: Figures = {
            "decode_tok_s": _ratio(self.decode_tokens * NS, self.decode_ns),
            "prefill_tok_s": _ratio(self.prefill_tokens * NS, self.prefill_ns),
            "ttft_ms": _mean(self.first_token_ns, NS_PER_MS),
            "token_ms_mean": _mean(times, NS_PER_MS),
        }
        for percent in (50, 90, 99):
            value = percentile(times, percent)
            found[f"token_ms_p{percent}"] = None if value is None else value / NS_PER_MS
        return found | {
            "hit_rate": None if miss_rate is None else 1.0 - miss_rate,
            "miss_rate": miss_rate,
            "miss_rate_p99": percentile(sorted(self.miss_rates), 99),
            "io_share": _ratio(self.exposed_ns, self.decode_ns),
            "bytes_per_token": _ratio(self.bytes, self.decode_tokens),
            "reads_per_token": _ratio(self.reads, self.decode_tokens),
            "peak_memory_bytes": float(self.peak_bytes),
            "tokens": float(self.tokens),
            "requests_finished": float(self.finished),
            "requests_failed": float(self.failed),
            "restarts": float(self.restarts),
        }


def percentile(ordered: Sequence[float], percent: int) -> float | None:
    """The value that so many percent are at most; None of nothing."""
    if not ordered:
        return None
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def _ratio(over: float, under: float) -> float | None:
    return over / under if under else None


def _mean(values: Sequence[float], unit: float) -> float | None:
    return sum(values) / len(values) / unit if values else None
