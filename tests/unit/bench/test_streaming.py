"""What the comparisons out of memory make of a benchmark's rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.bench import streaming
from tests.bench.random_model import RandomModel

LIMIT = 3200 << 20


def make_row(engine: str, rate: float, **changes: Any) -> dict[str, Any]:
    fields = {
        "engine": engine, "test": "tg16", "avg_ts": rate, "peak_bytes": 3 << 30,
        "memory_limit_bytes": LIMIT, "io_bytes_per_token": 64 << 20, "hit_rate": None,
        "stall_share": None, "other_cores": 0.0, "token_ms": {"mean": 100.0, "p99": 130.0},
    }  # fmt: skip
    return fields | changes


def make_race(ratio: float, **changes: Any) -> list[dict[str, Any]]:
    speeds = [{"bytes_per_second": 1e9, "reads_per_second": 5e4, "pattern": "random",
               "read_bytes": 4608}]  # fmt: skip
    return [
        make_row("polyneuron", 0.4 * ratio, hit_rate=0.9, stall_share=0.1),
        make_row("llama.cpp", 0.4, **changes),
        {"disk": {"before": speeds, "after": speeds}},
        {"ratio": {"tg16": ratio}, "idle_cores": {"polyneuron": 0.0, "llama.cpp": 0.0}},
    ]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The words of every benchmark; models are written nowhere."""
    words: list[str] = []
    monkeypatch.setattr(streaming, "ensure_model", lambda shape: RandomModel(shape, Path("cache")))

    def bench(*arguments: str) -> list[dict[str, Any]]:
        words.extend(arguments)
        return make_race(9.0)

    def alone(*arguments: str) -> list[dict[str, Any]]:
        words.extend(arguments)
        return [make_row("polyneuron", 3.6, hit_rate=0.9, stall_share=0.2)]

    monkeypatch.setattr(streaming, "bench", bench)
    monkeypatch.setattr(streaming, "polyneuron", alone)
    return words


def test_sparse_race_is_held_against_three_bars(asked: list[str]) -> None:
    found = {verdict.row: verdict for verdict in streaming.exact() if verdict.row != "-"}
    assert {row: (v.measured, v.verdict) for row, v in found.items()} == {
        "4": ("9.00x", "met"), "8": ("1.30", "met"), "9": ("20.0%", "not met"),
    }  # fmt: skip
    model = RandomModel("bamboo-7b", Path("cache"))
    assert str(model.ncf) in asked
    assert asked[asked.index("--peer-model") + 1] == str(model.gguf)
    assert asked.count("--memory") == 2  # the longer run has the same limits


def test_busy_machine_is_not_judged(asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    busy = make_row("polyneuron", 3.6, stall_share=0.2, other_cores=0.5)
    monkeypatch.setattr(streaming, "polyneuron", lambda *_: [busy])
    found = {verdict.row: verdict.verdict for verdict in streaming.exact()}
    assert found["8"] == found["9"] == "not judged: other processes used 50% of a core"


def test_figures_are_told_beside_the_bar(asked: list[str]) -> None:
    rows = [verdict.cells for verdict in streaming.dense()]
    ours = "3.600 tok/s, peak 3072 MiB, 64.0 MiB a token, hit rate 90.0%, stall 10.0%"
    assert rows[0][1:3] == ("polyneuron, tg16", ours)
    assert rows[1][1:3] == ("llama.cpp, tg16", "0.400 tok/s, peak 3072 MiB, 64.0 MiB a token")
    assert rows[2][1:3] == ("disk before", "1000 MB/s, 50.0k/s random 4608 B")
    assert "3GiB" in asked


def test_without_cgroups_nothing_is_judged(
    asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    race = make_race(9.0, memory_limit_bytes=None)
    monkeypatch.setattr(streaming, "bench", lambda *_: race)
    *_, last = streaming.dense()
    assert last.verdict == "not judged: no memory cgroup can be made here"
