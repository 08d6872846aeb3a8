"""The benchmark of prompts: what it makes of both engines' answers, and of the peak."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from polyneuron.planning.source import open_source
from polyneuron.tracing.recording import Step
from tests.bench import prefill
from tests.bench.random_model import RandomModel
from tests.support.tiny_gguf import write_tiny_gguf

STEP = Step(
    t_ns=0, ns=1000, step=0, phase="prefill", graph="prefill", tokens=128, sequences=1,
    executors=2, compute_ns=1500, stall_ns=None, wait_ns=0, bytes=10 << 20, reads=12, needed=None,
    hits=None, misses=None, predicted=None, active=None, detail=False,
)  # fmt: skip
MODEL = RandomModel("mistral-7b", Path("cache"))


def make_row(engine: str, rate: float) -> dict[str, Any]:
    return {
        "engine": engine, "test": "pp512", "avg_ts": rate, "peak_bytes": 3 << 30,
        "io_bytes_per_token": 4 << 20, "hit_rate": None, "stall_share": 0.02, "other_cores": 0.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("streamed", "verdicts"), [(38.0, ["met", "met"]), (30.0, ["not met", "met"])]
)
def test_flash_is_held_against_memory_and_the_peer(
    monkeypatch: pytest.MonkeyPatch, streamed: float, verdicts: list[str]
) -> None:
    last = {"ratio": {"pp512": streamed / 20.0}, "idle_cores": {"polyneuron": 0.0}}
    rows = [make_row("polyneuron", streamed), make_row("llama.cpp", 20.0), last]
    monkeypatch.setattr(prefill, "ensure_model", lambda: MODEL)
    monkeypatch.setattr(prefill, "polyneuron", lambda *_: [make_row("polyneuron", 40.0)])
    monkeypatch.setattr(prefill, "bench", lambda *_: rows)
    monkeypatch.setattr(prefill, "TRACED", ())
    found = list(prefill.flash())
    assert [each.verdict for each in found if each.bar != "-"] == verdicts


@pytest.mark.parametrize(
    ("stall_ns", "measured", "verdict"),
    [(0, "0.0% of the step, 10 MiB", "met"), (700, "17.5% of the step, 10 MiB", "not met")],
)
def test_reads_are_hidden_where_executors_hardly_wait(
    stall_ns: int, measured: str, verdict: str
) -> None:
    quiet = replace(STEP, stall_ns=0)
    row = make_row("polyneuron", 40.0)
    found = prefill.hidden_reads("7B", [row], [quiet, replace(STEP, stall_ns=stall_ns)])
    assert found.measured.startswith(measured)
    assert found.verdict == verdict
    busy = prefill.hidden_reads("7B", [row | {"other_cores": 1.0}], [quiet])
    assert busy.verdict.startswith("not judged")


def test_products_leave_embedding_and_head_out(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path)
    tensors = {t.name: t for t in open_source(path).manifest.tensors if t.storage is not None}
    layers = sum(t.rows * t.cols for name, t in tensors.items() if name.startswith("blk."))
    assert prefill.products(path) == layers > 0


def test_efficiency_says_nothing_of_an_unknown_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "products", lambda _: 10**8)
    assert prefill.efficiency("work", Path("a"), 1000.0, None).measured == "200 GOP/s"
    told = prefill.efficiency("work", Path("a"), 1000.0, 4e11).measured
    assert told == "200 GOP/s, 50% of 400 (int8 peak)"
