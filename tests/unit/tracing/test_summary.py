"""Figures against timelines small enough to count by hand."""

import json
from pathlib import Path
from typing import Any

import pytest

from polyneuron.tracing.collector import read_recording
from polyneuron.tracing.summary import DISTRIBUTION, distribution, summarize
from tests.support.made_up_timeline import MadeUp

MS = 1_000_000
NULLABLE = ("compute_ns", "stall_ns", "wait_ns", "bytes", "reads", "needed", "hits", "misses",
            "predicted", "active")  # fmt: skip


def event(t_ms: float, actor: str, name: str, **keys: Any) -> dict[str, Any]:
    return {"t_ns": int(t_ms * MS), "seq": 0, "actor": actor, "event": name, **keys}


def step(t_ms: float, ms: float, number: int, **keys: Any) -> dict[str, Any]:
    unmeasured = dict.fromkeys(NULLABLE)
    facts = {"phase": "decode", "graph": "decode.1", "tokens": 1, "sequences": 1, "executors": 2,
             "detail": False, **unmeasured, **keys}  # fmt: skip
    return event(t_ms, "coordinator", "step", ns=int(ms * MS), step=number, **facts)


def request(t_ms: float, state: str, **keys: Any) -> dict[str, Any]:
    return event(t_ms, "coordinator", "request", request=4, state=state, prompt_tokens=9, **keys)


def token(t_ms: float, index: int) -> dict[str, Any]:
    return event(t_ms, "coordinator", "token", request=4, index=index)


def figures_of(tmp_path: Path, *events: dict[str, Any]) -> dict[str, Any]:
    path = tmp_path / "run.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in events))
    return summarize(read_recording(path))


class TestRequests:
    def test_times_of_one_request(self, tmp_path: Path) -> None:
        found = figures_of(
            tmp_path, request(100, "queued"), request(103, "admitted"),
            token(120, 0), token(130, 1), token(150, 2), token(160, 3),
            request(161, "finished", tokens=4, reason="stop"),
        )  # fmt: skip
        (one,) = found["requests"]
        assert (one["ttft_ms"], one["tokens"], one["reason"]) == (20, 4, "stop")
        assert (one["queued_ms"], one["admitted_ms"], one["finished_ms"]) == (0, 3, 61)
        assert one["tbt_ms"]["mean"] == pytest.approx(40 / 3, rel=1e-5)
        assert one["tbt_ms"]["p50"] == 10
        assert found["duration_ms"] == 61

    def test_first_candidate_counts(self, tmp_path: Path) -> None:
        found = figures_of(
            tmp_path, request(0, "queued"), token(5, 0), token(5, 0), token(9, 1), token(11, 1)
        )
        (one,) = found["requests"]
        assert one["tbt_ms"] == dict.fromkeys(DISTRIBUTION, 4)

    def test_gap_is_no_time_between_tokens(self, tmp_path: Path) -> None:
        (one,) = figures_of(tmp_path, token(5, 0), token(6, 1), token(90, 7))["requests"]
        assert one["tbt_ms"]["p99"] == 1
        assert one["ttft_ms"] is None


class TestPhases:
    def test_shares_are_of_executors_time(self, tmp_path: Path) -> None:
        found = figures_of(
            tmp_path,
            step(0, 10, 0, compute_ns=12 * MS, stall_ns=4 * MS, wait_ns=2 * MS),
            step(10, 10, 1, compute_ns=14 * MS, stall_ns=0, wait_ns=6 * MS),
        )["decode"]
        shares = [found[f"{name}_share"] for name in ("compute", "stall", "wait")]
        assert shares == pytest.approx([26 / 40, 4 / 40, 8 / 40])
        assert found["tokens_per_second"] == pytest.approx(100)
        assert found["token"]["stall_ms"]["mean"] == pytest.approx(2)

    def test_counts_are_of_one_token(self, tmp_path: Path) -> None:
        found = figures_of(
            tmp_path, step(0, 10, 0, tokens=4, sequences=4, bytes=4096, reads=8, hits=30, misses=10)
        )["decode"]
        assert (found["token"]["bytes"]["mean"], found["token"]["reads"]["mean"]) == (1024, 2)
        assert (found["hit_rate"], found["miss_rate"]["p99"]) == (0.75, 0.25)

    def test_hit_rate_weighs_neurons(self, tmp_path: Path) -> None:
        found = figures_of(
            tmp_path, step(0, 1, 0, hits=90, misses=10), step(1, 1, 1, hits=0, misses=10)
        )
        assert found["decode"]["hit_rate"] == pytest.approx(90 / 110, rel=1e-5)

    def test_unmeasured_is_null(self, tmp_path: Path) -> None:
        found = figures_of(tmp_path, step(0, 10, 0), step(10, 10, 1))
        decode = found["decode"]
        assert decode["step_ms"]["mean"] == 10
        assert decode["hit_rate"] is decode["stall_share"] is decode["compute_share"] is None
        for values in [decode["miss_rate"], *decode["token"].values()]:
            assert values == dict.fromkeys(DISTRIBUTION)
        assert found["prefill"] is found["flash"] is found["run"] is None
        assert found["steps"][0]["bytes"] is found["steps"][0]["hit_rate"] is None

    def test_zero_is_not_unmeasured(self, tmp_path: Path) -> None:
        found = figures_of(tmp_path, step(0, 10, 0, bytes=0, stall_ns=0, hits=0, misses=0))
        assert found["decode"]["token"]["bytes"]["mean"] == 0
        assert found["decode"]["stall_share"] == 0
        assert found["decode"]["hit_rate"] is None  # no neuron was asked for


class TestDistribution:
    def test_none_is_left_out(self) -> None:
        assert distribution([1.0, None, 3.0])["mean"] == 2
        assert distribution([None]) == dict.fromkeys(DISTRIBUTION)


class TestEvents:
    def test_switches_and_faults_are_told(self, tmp_path: Path) -> None:
        made = MadeUp(tokens=24, faults=True, sequences=2)
        found = summarize(read_recording(made.write(tmp_path / "run.jsonl")))
        kinds = [fault["kind"] for fault in found["faults"]]
        assert kinds == ["read_error", "worker_lost", "memory_shrink"]
        (restart,) = found["restarts"]
        assert (restart["target"], restart["generation"], restart["took_ms"]) == (
            "worker.0",
            2,
            900,
        )
        batches = [row["sequences"] for row in found["changes"] if row["event"] == "batch"]
        assert batches == [2, 1]

    def test_figures_are_json(self, tmp_path: Path) -> None:
        found = summarize(read_recording(MadeUp(faults=True).write(tmp_path / "run.jsonl")))
        assert json.loads(json.dumps(found, allow_nan=False)) == found
