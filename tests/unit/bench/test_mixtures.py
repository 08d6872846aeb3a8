"""The benchmark of mixtures of experts: what it asks for, and what it makes of the answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.bench import mixtures, random_model
from tests.bench.random_model import RandomModel
from tests.unit.bench.test_sparse import make_row


def answered(own: float, peer: float, **more: Any) -> list[dict[str, Any]]:
    """A benchmark's rows."""
    rows = [
        make_row(own, test=mixtures.TEST, memory_limit_bytes=2 << 30) | more,
        make_row(peer, test=mixtures.TEST, engine="llama.cpp", memory_limit_bytes=2 << 30),
    ]
    speeds = [{"bytes_per_second": 4e8, "reads_per_second": 5e4, "pattern": "random",
               "read_bytes": 7168}]  # fmt: skip
    disk = {"disk": {"before": speeds, "after": speeds}}
    idle = {"polyneuron": 0.0, "llama.cpp": 0.0}
    return [*rows, disk, {"ratio": {mixtures.TEST: own / peer}, "idle_cores": idle}]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """The arguments of each benchmark that is run."""
    calls: list[tuple[str, ...]] = []

    def bench(*arguments: str) -> list[dict[str, Any]]:
        calls.append(arguments)
        return answered(5.0, 0.25)

    monkeypatch.setattr(mixtures, "bench", bench)
    monkeypatch.setattr(random_model.RandomModel, "is_there", property(lambda _: True))
    monkeypatch.setattr(mixtures, "ensure_predictors", lambda model, rank: None)
    return calls


@pytest.mark.parametrize(
    ("part", "verdict"), [(mixtures.turbosparse, "not met"), (mixtures.qwen3moe, "met")]
)
def test_ratios_are_held_against_their_bars(
    asked: list[tuple[str, ...]], part: Any, verdict: str
) -> None:
    """Twenty times: below 21.2, above 10."""
    (found,) = [v for v in part() if v.measured == "20.00x"]
    assert (found.row, found.verdict) == ("6", verdict)
    ((model, *rest),) = asked
    assert Path(model).with_suffix(".gguf") == Path(rest[1])
    assert rest[rest.index("--memory") + 1] == "2GiB"


def test_without_cgroups_nothing_is_judged(
    asked: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = answered(50.0, 0.25, memory_limit_bytes=None)
    monkeypatch.setattr(mixtures, "bench", lambda *_: rows)
    (found,) = [v for v in mixtures.turbosparse() if v.measured == "200.00x"]
    assert mixtures.NO_CGROUP in found.verdict


def test_sweep_takes_a_quarter_of_the_papers_memory(
    asked: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[str] = []
    rates = iter([2.0, 3.0, 2.9, 2.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0])

    def own_bench(model: RandomModel, *arguments: str) -> dict[str, Any]:
        limits.append(arguments[arguments.index("--memory") + 1])
        return make_row(next(rates))

    monkeypatch.setattr(mixtures, "own_bench", own_bench)
    verdicts = [verdict.verdict for verdict in mixtures.sweep()]
    assert limits == [f"{size}MiB" for size in range(1792, 4097, 256)]
    assert verdicts == ["met", "met", "met", "not met", *["met"] * 6]


def test_depth_is_part_of_a_files_name() -> None:
    whole, quarter = RandomModel("a", Path("x")), RandomModel("a", Path("x"), 8)
    assert whole.ncf != quarter.ncf and "8-layers" in quarter.ncf.name
    assert quarter.gguf.suffix == ".gguf"
