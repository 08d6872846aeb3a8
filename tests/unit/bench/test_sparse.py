"""The benchmark of sparse decode: what it asks for, and what it makes of the answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.bench import sparse
from tests.bench.random_model import RandomModel

PLAN = '[engine]\nmode = "predicted"\nlookahead = true\n\n[hot_clusters]\n1 = 2\n'


def make_row(rate: float, **more: Any) -> dict[str, Any]:
    times = {"mean": 80.0, "p50": 78.0, "p90": 90.0, "p99": 104.0}
    return {
        "engine": "polyneuron", "test": "tg1024", "avg_ts": rate, "peak_bytes": 3 << 30,
        "io_bytes_per_token": 10 << 20, "hit_rate": 0.97, "miss_rate_p99": 0.05,
        "stall_share": 0.06, "token_ms": times, "other_cores": 0.0,
    } | more  # fmt: skip


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> RandomModel:
    made = RandomModel("bamboo-7b", Path("cache"))
    monkeypatch.setattr(sparse, "sparse_model", lambda: made)
    return made


def test_hot_clusters_stay_in_the_last_rung_only() -> None:
    plans = {name: plan for name, (plan, _) in sparse.rungs(PLAN).items()}
    assert list(plans) == [*sparse.LADDER, sparse.WHOLE_PLAN]
    assert plans.pop(sparse.WHOLE_PLAN) == PLAN
    assert all(plan.endswith("[hot_clusters]\n1 = 0\n") for plan in plans.values())
    assert "keep_neurons = false" in plans["+ bundles"]


def test_long_run_is_held_against_both_bars(
    model: RandomModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sparse, "own_bench", lambda *_: make_row(13.0))
    found = {verdict.row: (verdict.measured, verdict.verdict) for verdict in sparse.long()}
    assert found["8"] == ("1.30", "met")
    assert found["9"] == ("6.0%", "met")


def test_sweep_says_where_more_memory_is_slower(
    model: RandomModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = iter([3.0, 5.0, 4.9, 4.0, 6.0, 7.0, 8.0])
    monkeypatch.setattr(sparse, "own_bench", lambda *_: make_row(next(rates)))
    verdicts = [verdict.verdict for verdict in sparse.sweep()]
    assert verdicts == ["met", "met", "met", "not met", "met", "met", "met"]


@pytest.mark.parametrize(("reads", "verdict"), [(60_000.0, "-"), (20_000.0, "met")])
def test_the_disk_is_the_bound_only_where_it_is_slow(reads: float, verdict: str) -> None:
    probe = {"bytes_per_second": reads * 7168, "reads_per_second": reads}
    own = make_row(13.0, io_bytes_per_token=10_000_000)
    assert sparse.bound_verdict("4", "work", own, [probe]).verdict == verdict
