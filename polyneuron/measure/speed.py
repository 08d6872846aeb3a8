"""Times engines in turn on the same random tokens, as llama-bench does, and watches who is idle."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np

from polyneuron.config import Phase
from polyneuron.kernels.arena import monotonic_ns

SEED = 0
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
PREFIXES = {Phase.PREFILL: "pp", Phase.DECODE: "tg"}
TokenTimes = dict[str, float | None]
"""mean, p50, p90, p99 in ms."""
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class SpeedTest:
    """Prefill of so many tokens, or decode of so many from an empty context."""

    phase: Phase
    num_tokens: int

    @property
    def name(self) -> str:
        """llama-bench's name: pp512, tg128."""
        return f"{PREFIXES[self.phase]}{self.num_tokens}"


@dataclass(frozen=True, slots=True)
class SampleIo:
    """What one repetition read; a figure is None where it was not measured."""

    bytes_per_token: float | None = None
    hit_rate: float | None = None
    """Of neurons that were needed, those that were in memory."""
    stall_share: float | None = None
    """Of the executors' time, what they waited for weights."""
    miss_rate_p99: float | None = None
    """99 in 100 tokens missed at most this share."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One repetition; `token_ms` is of decode only."""

    total_ns: int
    token_ms: TokenTimes | None = None
    io: SampleIo = field(default_factory=SampleIo)


class Contestant(Protocol):
    """An engine with a model in memory."""

    @property
    def name(self) -> str:
        """What the rows call it."""

    def run(self, phase: Phase, tokens: Sequence[int]) -> Sample:
        """Compute the tokens from an empty context, all at once or one after another."""

    def peak_bytes(self) -> int:
        """The most memory it has taken in all its processes, as far as that is known."""

    def cpu_ticks(self) -> int:
        """Processor time it has used, in all its processes."""


@dataclass(slots=True)
class CoreShare:
    """Processor time that somebody used while another was timed."""

    ticks: int = 0
    wall_ns: int = 0

    def add(self, ticks: int, wall_ns: int) -> None:
        """Count a stretch of time."""
        self.ticks += ticks
        self.wall_ns += wall_ns

    @property
    def share(self) -> float:
        """As a share of one core."""
        return self.ticks / CLOCK_TICKS / (self.wall_ns / 1e9) if self.wall_ns else 0.0


@dataclass(slots=True)
class Trial:
    """One contestant in one test."""

    engine: str
    test: SpeedTest
    samples: list[Sample] = field(default_factory=list)
    peak_bytes: int = 0
    """The most that was known of after any repetition."""
    strangers: CoreShare = field(default_factory=CoreShare)
    """Processes that are no contestant's, while it was timed."""

    @property
    def rates(self) -> list[float]:
        """Tokens a second of each repetition."""
        return [self.test.num_tokens / sample.total_ns * 1e9 for sample in self.samples]

    @property
    def token_ms(self) -> TokenTimes | None:
        """Medians over the repetitions; None in prefill."""
        times = [sample.token_ms for sample in self.samples if sample.token_ms is not None]
        if not times:
            return None
        columns = {name: [t[name] for t in times if t[name] is not None] for name in times[0]}
        return {name: _median_or_none(values) for name, values in columns.items()}

    @property
    def io(self) -> SampleIo:
        """Medians over the repetitions."""
        samples = [sample.io for sample in self.samples]
        return SampleIo(
            _median_or_none([io.bytes_per_token for io in samples]),
            _median_or_none([io.hit_rate for io in samples]),
            _median_or_none([io.stall_share for io in samples]),
            _median_or_none([io.miss_rate_p99 for io in samples]),
        )


def _median_or_none(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


@dataclass(slots=True)
class Race:
    """All trials of one comparison."""

    trials: list[Trial] = field(default_factory=list)
    idle: dict[str, CoreShare] = field(default_factory=dict)
    """Each contestant while another ran."""

    def ratios(self, ours: str, theirs: str) -> dict[str, float]:
        """Test to the median, over pairs of neighbouring repetitions, of our rate by theirs."""
        rates = {(trial.engine, trial.test.name): trial.rates for trial in self.trials}
        return {
            test: statistics.median(a / b for a, b in zip(own, rates[theirs, test], strict=True))
            for (engine, test), own in rates.items()
            if engine == ours and (theirs, test) in rates
        }


def race(
    contestants: Sequence[Contestant],
    tests: Sequence[SpeedTest],
    repetitions: int,
    vocab_size: int,
    say: Say,
) -> Race:
    """Every test: one warm-up each, then repetitions in turn (A B A B), the same tokens for all."""
    result = Race(idle={c.name: CoreShare() for c in contestants} if len(contestants) > 1 else {})
    rng = np.random.default_rng(SEED)
    for test in tests:
        trials = [Trial(contestant.name, test) for contestant in contestants]
        result.trials += trials
        for repetition in range(repetitions + 1):
            tokens = rng.integers(0, vocab_size, test.num_tokens).tolist()
            for contestant, trial in zip(contestants, trials, strict=True):
                if repetition == 0:  # pages, caches and clocks settle
                    contestant.run(test.phase, tokens)
                    continue
                with _watched(result, contestants, trial):
                    trial.samples.append(contestant.run(test.phase, tokens))
                trial.peak_bytes = max(trial.peak_bytes, contestant.peak_bytes())
                say(f"{contestant.name} {test.name} {repetition}/{repetitions}: "
                    f"{trial.rates[-1]:.2f} tok/s")  # fmt: skip
    return result


@contextmanager
def _watched(result: Race, contestants: Sequence[Contestant], trial: Trial) -> Iterator[None]:
    """Add up who used the processor while a trial's contestant was timed."""
    before, busy, start_ns = _ticks(contestants), busy_ticks(), monotonic_ns()
    yield
    wall_ns, busy = monotonic_ns() - start_ns, busy_ticks() - busy
    used = {name: ticks - before[name] for name, ticks in _ticks(contestants).items()}
    for name, idle in result.idle.items():
        if name != trial.engine:
            idle.add(used[name], wall_ns)
    trial.strangers.add(max(0, busy - sum(used.values())), wall_ns)


def _ticks(contestants: Sequence[Contestant]) -> dict[str, int]:
    return {contestant.name: contestant.cpu_ticks() for contestant in contestants}


def busy_ticks() -> int:
    """Ticks all cores of the machine have spent at work since it started."""
    line = Path("/proc/stat").read_text().split("\n", 1)[0]
    user, nice, system, _idle, _iowait, irq, softirq, *_ = map(int, line.split()[1:])
    return user + nice + system + irq + softirq
