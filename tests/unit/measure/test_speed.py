"""Timing engines in turn: order, figures, and who is seen at work."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest

from polyneuron.config import Phase
from polyneuron.io.device_probe import LAYER_READS, Pattern, ProbeCase, ProbeRow
from polyneuron.kernels.arena import monotonic_ns
from polyneuron.measure import speed
from polyneuron.measure.bench_report import (
    BenchModel,
    BenchReport,
    DiskSpeeds,
    Entry,
    markdown,
)
from polyneuron.measure.speed import (
    CLOCK_TICKS,
    CoreShare,
    Race,
    Sample,
    SampleIo,
    SpeedTest,
    Trial,
    race,
)

PREFILL, DECODE = SpeedTest(Phase.PREFILL, 8), SpeedTest(Phase.DECODE, 4)
MODEL = BenchModel("tiny", 3 << 20, 2_500_000)
ENTRIES = {name: Entry(MODEL) for name in ("polyneuron", "llama.cpp")}


@dataclass
class Machine:
    """A pretended machine: one clock, one count of busy ticks, and a diary."""

    now_ns: int = 1_000_000_000
    busy: int = 0
    diary: list[tuple[str, str, tuple[int, ...]]] = field(default_factory=list)

    def work(self, ns: int, ticks: int) -> None:
        self.now_ns += ns
        self.busy += ticks


@dataclass
class Engine:
    """Takes as long as it is told, the next number of its list on every run."""

    name: str
    machine: Machine
    seconds: list[float]
    strangers: float = 0.0
    """Cores that others use while it runs."""
    other: "Engine | None" = None
    leaks: float = 0.0
    """Cores the other one uses while this one runs."""
    ticks: int = 0

    def run(self, phase: Phase, tokens: Sequence[int]) -> Sample:
        seconds = self.seconds.pop(0)
        self.machine.diary.append((self.name, phase, tuple(tokens)))
        own, leaked = round(seconds * CLOCK_TICKS), round(seconds * self.leaks * CLOCK_TICKS)
        self.ticks += own
        if self.other is not None:
            self.other.ticks += leaked
        strangers = round(seconds * self.strangers * CLOCK_TICKS)
        self.machine.work(round(seconds * 1e9), own + leaked + strangers)
        ms = seconds * 1e3 / len(tokens)
        token_ms = {"mean": ms, "p50": ms, "p90": ms, "p99": None}
        return Sample(round(seconds * 1e9), None if phase is Phase.PREFILL else token_ms)

    def peak_bytes(self) -> int:
        return len(self.machine.diary) << 20

    def cpu_ticks(self) -> int:
        return self.ticks


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine()
    monkeypatch.setattr(speed, "monotonic_ns", lambda: made.now_ns)
    monkeypatch.setattr(speed, "busy_ticks", lambda: made.busy)
    return made


def quietly(line: str) -> None:
    assert line


def test_engines_take_turns_on_the_same_tokens(machine: Machine) -> None:
    engines = [Engine("a", machine, [1.0] * 6), Engine("b", machine, [1.0] * 6)]
    race(engines, [PREFILL, DECODE], 2, 100, quietly)
    assert [name for name, _, _ in machine.diary] == ["a", "b"] * 6  # a warm-up and two each
    for own, peer in zip(machine.diary[::2], machine.diary[1::2], strict=True):
        assert own[1:] == peer[1:]
    assert [len(tokens) for _, _, tokens in machine.diary[::2]] == [8, 8, 8, 4, 4, 4]
    assert all(0 <= token < 100 for _, _, tokens in machine.diary for token in tokens)
    assert len({tokens for _, _, tokens in machine.diary}) == 6


def test_warm_up_does_not_count(machine: Machine) -> None:
    found = race([Engine("a", machine, [9.0, 2.0, 4.0])], [PREFILL], 2, 100, quietly)
    (trial,) = found.trials
    assert trial.rates == [8 / 2.0, 8 / 4.0]
    assert trial.peak_bytes == 3 << 20  # the most after any repetition
    assert found.idle == {}


def test_ratio_is_the_median_over_pairs(machine: Machine) -> None:
    own = Engine("a", machine, [1.0, 1.0, 1.0, 4.0])
    peer = Engine("b", machine, [1.0, 2.0, 3.0, 4.0])
    found = race([own, peer], [PREFILL], 3, 100, quietly)
    assert found.ratios("a", "b") == {"pp8": pytest.approx(2.0)}  # of 2, 3 and 1
    assert found.ratios("b", "a") == {"pp8": pytest.approx(0.5)}
    assert found.ratios("a", "c") == {}


def test_load_of_others_is_told_from_that_of_the_engines(machine: Machine) -> None:
    own = Engine("a", machine, [1.0] * 3, strangers=0.5)
    peer = Engine("b", machine, [1.0] * 3, other=own, leaks=0.2)
    found = race([own, peer], [PREFILL], 2, 100, quietly)
    assert [trial.strangers.share for trial in found.trials] == [
        pytest.approx(0.5),
        pytest.approx(0.0),
    ]
    assert found.idle["a"].share == pytest.approx(0.2)
    assert found.idle["b"].share == 0.0
    warnings = BenchReport(ENTRIES, 2, found, {"pp8": 1.0}).warnings()
    assert [line.split(":")[0] for line in warnings] == ["warning", "warning"]
    assert "a used 20% of a core while the other engine" in warnings[0]
    assert "a pp8: other processes used 50%" in warnings[1]


def test_this_machine_counts_its_busy_ticks() -> None:
    before = speed.busy_ticks()
    end = monotonic_ns() + 50_000_000
    while monotonic_ns() < end:
        pass
    assert speed.busy_ticks() > before


def test_no_time_no_share() -> None:
    assert CoreShare().share == 0.0


def report(machine: Machine) -> BenchReport:
    own = Engine("polyneuron", machine, [1.0] * 6)
    peer = Engine("llama.cpp", machine, [2.0] * 6)
    found = race([own, peer], [PREFILL, DECODE], 2, 100, quietly)
    return BenchReport(ENTRIES, 2, found, found.ratios("polyneuron", "llama.cpp"), 0.25)


def test_rows_are_as_the_interface_says(machine: Machine) -> None:
    *rows, last = report(machine).rows()
    required = {
        "engine", "model", "size_bytes", "threads", "test", "avg_ts", "stddev_ts", "samples_ts",
        "memory_limit_bytes", "peak_bytes", "io_bytes_per_token", "hit_rate", "stall_share",
        "token_ms",
    }  # fmt: skip
    assert all(required <= row.keys() for row in rows)
    assert [(row["engine"], row["test"]) for row in rows] == [
        ("polyneuron", "pp8"), ("llama.cpp", "pp8"), ("polyneuron", "tg4"), ("llama.cpp", "tg4"),
    ]  # fmt: skip
    assert rows[0]["avg_ts"] == pytest.approx(8.0)
    assert rows[0]["samples_ts"] == [8.0, 8.0]
    assert rows[0]["io_bytes_per_token"] is None  # unmeasured is null, never 0
    assert rows[0]["token_ms"] is None
    assert rows[2]["token_ms"] == {"mean": 250.0, "p50": 250.0, "p90": 250.0, "p99": None}
    assert [row["overhead_ms"] for row in rows] == [None, None, 0.25, None]
    assert last["ratio"] == {"pp8": pytest.approx(2.0), "tg4": pytest.approx(2.0)}
    assert "median" in last["ratio_is"]


def test_reads_are_shown_where_measured(machine: Machine) -> None:
    found = race([Engine("polyneuron", machine, [1.0] * 4)], [DECODE], 3, 100, quietly)
    (trial,) = found.trials
    reads = [SampleIo(3 << 20, 0.9, 0.2), SampleIo(5 << 20, 0.8, 0.3), SampleIo(4 << 20, 0.7, 0.1)]
    trial.samples = [replace(s, io=io) for s, io in zip(trial.samples, reads, strict=True)]
    disk = DiskSpeeds(probe_rows(1e9, 5e4), probe_rows(5e8, 2e4))
    entries = {"polyneuron": Entry(MODEL, 3 << 30)}
    made = BenchReport(entries, 2, found, {}, disk=disk)
    row, last = made.rows()
    assert (row["io_bytes_per_token"], row["hit_rate"], row["stall_share"]) == (4 << 20, 0.8, 0.2)
    assert row["memory_limit_bytes"] == 3 << 30
    assert [r["read_bytes"] for r in last["disk"]["before"]] == [1 << 20, 4608]
    assert last["disk"]["after"][1]["reads_per_second"] == 2e4
    table = made.table().splitlines()
    assert "MiB of 3072 |       4.0 MiB |    80.0% | 20.0% |" in table[2]
    assert table[-1] == (
        "disk before: 1000 MB/s in a row, 50.0k/s random 4608 B at depth 32; "
        "after: 500 MB/s in a row, 20.0k/s random 4608 B at depth 32"
    )


def probe_rows(bytes_per_s: float, reads_per_s: float) -> tuple[ProbeRow, ...]:
    """What a probe of both kinds of reads gave."""
    random = ProbeCase(Pattern.RANDOM, 4608, 32)
    return (
        ProbeRow(LAYER_READS, 100, bytes_per_s, bytes_per_s / 2**20, 1, 2, 3.0),
        ProbeRow(random, 100, reads_per_s * 4608, reads_per_s, 1, 2, 3.0),
    )


def test_one_repetition_has_no_deviation(machine: Machine) -> None:
    found = race([Engine("polyneuron", machine, [1.0, 1.0])], [PREFILL], 1, 100, quietly)
    made = BenchReport(ENTRIES, 1, found, {})
    assert made.rows()[-1]["stddev_ts"] is None
    assert "±" not in made.table()
    assert "ratio" not in made.table()


def test_table_shows_rates_ratio_and_overhead(machine: Machine) -> None:
    table = report(machine).table().splitlines()
    assert {len(line) for line in table if line.startswith("|")} == {len(table[0])}
    assert "| 8.00 ± 0.00 |" in table[2]
    assert table[-2].startswith("ratio: pp8 2.000, tg4 2.000")
    assert table[-1].startswith("overhead: 0.250 ms")


def test_markdown_is_aligned() -> None:
    assert markdown([("a", "bb"), ("ccc", "1")], 1) == [
        "| a   | bb |", "| --- | -: |", "| ccc |  1 |",
    ]  # fmt: skip


def test_race_without_samples_of_a_peer_has_no_ratio() -> None:
    assert Race([Trial("a", PREFILL, [Sample(10)])]).ratios("a", "b") == {}
