"""Plans held against runs: what is moved, and what is made of the answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.bench import planned
from tests.bench.random_model import RandomModel

PLAN = (
    '[engine]\nmode = "predicted"\nworkers = 2  # CPU workers\nqueue_depth = 32  # reads\n'
    "lookahead = true  # early\n\n[hot_clusters]\n1 = 6\n2 = 7\n"
)
MODEL = RandomModel("bamboo-7b", Path("cache"))


def make_row(rate: float) -> dict[str, Any]:
    return {"avg_ts": rate, "other_cores": 0.0, "io_bytes_per_token": 1 << 20}


def test_keys_of_a_plan_are_set_or_added() -> None:
    changed = planned.changed(PLAN, {"lookahead": "false", "matrix_barrier": "true"})
    assert changed.count("lookahead") == 1
    assert "lookahead = false\n" in changed
    assert "[engine]\nmatrix_barrier = true\n" in changed
    assert planned.changed(PLAN, {}) == PLAN


def test_every_knob_is_moved_alone() -> None:
    moves = planned.moves(PLAN)
    assert {"1 workers", "3 workers", "16 reads at once", "64 reads at once"} <= moves.keys()
    assert {"lookahead false", "4 hot clusters, not 6", "8 hot clusters, not 6"} <= moves.keys()
    changes = {
        name: [line for line in plan.splitlines() if line not in PLAN.splitlines()]
        for name, plan in moves.items()
    }
    assert all(len(lines) == 1 for lines in changes.values()), changes


@pytest.mark.parametrize(("measured", "verdict"), [(10.0, "met"), (12.0, "met"), (14.0, "not met")])
def test_expectations_are_held_against_runs(
    monkeypatch: pytest.MonkeyPatch, measured: float, verdict: str
) -> None:
    expected = {"tokens_per_second": 10.5, "bytes_per_token": 2 << 20}
    monkeypatch.setattr(planned, "polyneuron", lambda *_: {"expected": expected})
    found = list(planned.expectations(MODEL, lambda *_: make_row(measured)))
    assert [each.verdict for each in found] == [verdict] * len(planned.SHARES)
    assert found[0].measured == f"10.5 tok/s, 2.0 MiB a token; {measured:.1f}, 1.0"


def test_a_knob_that_gains_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def plan(*arguments: str) -> None:
        Path(arguments[-1]).write_text(PLAN)

    rates = iter([10.0, 10.6, *[9.0] * 20])
    monkeypatch.setattr(planned, "polyneuron", plan)
    found = list(planned.knobs(MODEL, (), lambda *_: make_row(next(rates))))
    assert [each.verdict for each in found[:3]] == ["-", "not met", "met"]
