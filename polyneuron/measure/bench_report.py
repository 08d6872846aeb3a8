"""What `bench` prints: llama-bench's table and the rows of `bench --json`."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from polyneuron.config import Phase
from polyneuron.io.device_probe import Pattern, ProbeRow
from polyneuron.measure.disk_checks import row_figures
from polyneuron.measure.speed import Race, Trial

IDLE_SHARE_MAX = 0.05
"""An engine that uses more of a core than this while the other is timed is not idle."""
STRANGERS_SHARE_MAX = 0.1
"""Of one core, by processes that are no engine's: figures taken then say little.

OpenMP's barriers wait for the slowest thread: beside one busy process, llama.cpp on all cores has
been seen at a tenth of its speed, which makes any ratio look splendid.
"""
RATIO_IS = "median over pairs of neighbouring repetitions, ours by the peer's"


@dataclass(frozen=True, slots=True)
class BenchModel:
    """The model as the rows tell it."""

    name: str
    size_bytes: int
    num_params: int


@dataclass(frozen=True, slots=True)
class Entry:
    """What one engine ran."""

    model: BenchModel
    memory_limit_bytes: int | None = None
    """None: what the machine has."""


@dataclass(frozen=True, slots=True)
class DiskSpeeds:
    """What the disk gave just before the first and just after the last run, the same reads."""

    before: tuple[ProbeRow, ...]
    after: tuple[ProbeRow, ...]

    def as_dict(self) -> dict[str, Any]:
        """The same as data."""
        return {
            "before": [row_figures(row) for row in self.before],
            "after": [row_figures(row) for row in self.after],
        }

    def line(self) -> str:
        """Both in one line."""
        before, after = (", ".join(map(_speed, rows)) for rows in (self.before, self.after))
        return f"disk before: {before}; after: {after}"


def _speed(row: ProbeRow) -> str:
    if row.case.pattern is Pattern.SEQUENTIAL:
        return f"{row.bytes_per_s / 1e6:.0f} MB/s in a row"
    kilo = row.reads_per_s / 1e3
    return f"{kilo:.1f}k/s random {row.case.read_bytes} B at depth {row.case.depth}"


@dataclass(frozen=True, slots=True)
class BenchReport:
    """A finished benchmark."""

    entries: Mapping[str, Entry]
    """By the engines' names."""
    num_threads: int
    race: Race
    ratios: Mapping[str, float]
    """Empty without a peer."""
    overhead_ms: float | None = None
    """Of one decode step of ours, outside kernels; None without a decode test in memory."""
    disk: DiskSpeeds | None = None
    """None when nothing is read while it runs."""

    def rows(self) -> list[dict[str, Any]]:
        """The list that `bench --json` prints."""
        rows: list[dict[str, Any]] = [self._row(trial) for trial in self.race.trials]
        if self.disk is not None:
            rows.append({"disk": self.disk.as_dict()})
        if self.ratios:
            idle = {name: round(core.share, 4) for name, core in self.race.idle.items()}
            rows.append({"ratio": dict(self.ratios), "ratio_is": RATIO_IS, "idle_cores": idle})
        return rows

    def _row(self, trial: Trial) -> dict[str, Any]:
        is_own_decode = trial.engine == "polyneuron" and trial.test.phase is Phase.DECODE
        entry, io = self.entries[trial.engine], trial.io
        return {
            "engine": trial.engine,
            "model": entry.model.name,
            "size_bytes": entry.model.size_bytes,
            "num_params": entry.model.num_params,
            "threads": self.num_threads,
            "test": trial.test.name,
            "avg_ts": statistics.mean(trial.rates),
            "stddev_ts": _stddev(trial.rates),
            "samples_ts": trial.rates,
            "memory_limit_bytes": entry.memory_limit_bytes,
            "peak_bytes": trial.peak_bytes,
            "io_bytes_per_token": io.bytes_per_token,
            "hit_rate": io.hit_rate,
            "miss_rate_p99": io.miss_rate_p99,
            "stall_share": io.stall_share,
            "token_ms": trial.token_ms,
            "overhead_ms": self.overhead_ms if is_own_decode else None,
            "other_cores": round(trial.strangers.share, 4),
        }

    def table(self) -> str:
        """A Markdown table, and what the ratios and the overhead came to under it."""
        head = (
            "model", "size", "params", "engine", "threads", "test", "t/s", "memory",
            "I/O per token", "hit rate", "stall",
        )  # fmt: skip
        lines = [head, *(self._cells(trial) for trial in self.race.trials)]
        return "\n".join([*markdown(lines, num_text_columns=1), *self._footer()])

    def _cells(self, trial: Trial) -> tuple[str, ...]:
        entry, io = self.entries[trial.engine], trial.io
        model, limit = entry.model, entry.memory_limit_bytes
        rate = f"{statistics.mean(trial.rates):.2f}"
        if (stddev := _stddev(trial.rates)) is not None:
            rate += f" ± {stddev:.2f}"
        return (
            model.name, f"{model.size_bytes / 2**20:.2f} MiB", f"{model.num_params / 1e6:.2f} M",
            trial.engine, str(self.num_threads), trial.test.name, rate,
            f"{trial.peak_bytes / 2**20:.0f} MiB" + (f" of {limit / 2**20:.0f}" if limit else ""),
            "-" if io.bytes_per_token is None else f"{io.bytes_per_token / 2**20:.1f} MiB",
            _percent(io.hit_rate), _percent(io.stall_share),
        )  # fmt: skip

    def _footer(self) -> list[str]:
        lines = [""]
        if self.ratios:
            shown = ", ".join(f"{test} {ratio:.3f}" for test, ratio in self.ratios.items())
            lines.append(f"ratio: {shown} ({RATIO_IS})")
        if self.overhead_ms is not None:
            lines.append(
                f"overhead: {self.overhead_ms:.3f} ms of a decode step outside kernels "
                f"(steps that skip them)"
            )
        if self.disk is not None:
            lines.append(self.disk.line())
        return [*lines, *self.warnings()] if len(lines) > 1 else self.warnings()

    def warnings(self) -> list[str]:
        """What makes the figures doubtful."""
        found = [
            f"warning: {name} used {core.share:.0%} of a core while the other engine was timed"
            for name, core in self.race.idle.items()
            if core.share > IDLE_SHARE_MAX
        ]
        found += [
            f"warning: {trial.engine} {trial.test.name}: other processes used "
            f"{trial.strangers.share:.0%} of a core meanwhile; repeat on a quiet machine"
            for trial in self.race.trials
            if trial.strangers.share > STRANGERS_SHARE_MAX
        ]
        return found


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _stddev(rates: Sequence[float]) -> float | None:
    return statistics.stdev(rates) if len(rates) > 1 else None


def markdown(lines: Sequence[Sequence[str]], num_text_columns: int) -> list[str]:
    """Aligned rows of a Markdown table, the first of them its head; numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rule = [
        "-" * width if index < num_text_columns else "-" * (width - 1) + ":"
        for index, width in enumerate(widths)
    ]
    shown = [lines[0], rule, *lines[1:]]
    return ["| " + " | ".join(_padded(line, widths, num_text_columns)) + " |" for line in shown]


def _padded(line: Sequence[str], widths: Sequence[int], num_text_columns: int) -> list[str]:
    return [
        cell.ljust(width) if index < num_text_columns else cell.rjust(width)
        for index, (cell, width) in enumerate(zip(line, widths, strict=True))
    ]
