"""Scenarios on the real actors: what must hold does, and nothing is left, whatever happened."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from polyneuron.scenarios.expectation import Player
from polyneuron.scenarios.library import find_scenario
from polyneuron.scenarios.playing import Play, play_all
from polyneuron.scenarios.replay_run import ReplayRun
from polyneuron.scenarios.result import ScenarioResult
from polyneuron.timeline import read_timeline
from tests.support.leftovers import Snapshot, assert_nothing_left, snapshot
from tests.support.program import run

pytestmark = pytest.mark.ray

REPLAYED = ("read_errors_persistent", "cpu_worker_lost", "ladder_replayed")
"""Of the library: `make scenarios` replays all of it, which takes minutes."""

STORY = """
name = "story"
players = ["replay"]

[engine]
ffn_resident = 0.6
context = 256

[replay]
npu_threads = 1

[[requests]]
prompt_tokens = 24
output_tokens = 48

[[requests]]
at_token = 12
prompt_tokens = 24
output_tokens = 32
best_of = 3
ends_every = 8

[[events]]
at_token = 0
do = "stall_npu"
ms = 300

[[events]]
at_token = 4
do = "stall_flash"
ms = 5
every = 20
for_tokens = 20

[[events]]
at_token = 8
do = "fail_read"
kind = "short"
count = 2

[[events]]
at_token = 50
do = "shrink_memory"
ffn_resident = 0.5

[[events]]
at_token = 40
do = "lose_worker"
worker = 0

[[events]]
at_token = 26
do = "lose_reader"

[[expect]]
figure = "tokens"
equals = 104

[[expect]]
figure = "requests_finished"
equals = 2

[[expect]]
figure = "restarts"
equals = 2

[[expect]]
figure = "ttft_ms"
min = 150

[[expect]]
figure = "tokens_equal"
equals = 1
"""


@pytest.fixture
def before() -> Iterator[Snapshot]:
    with snapshot() as taken:
        yield taken


@pytest.fixture
def observed(before: Snapshot, monkeypatch: pytest.MonkeyPatch) -> Snapshot:
    """Notes what each engine of a replay starts."""
    play = ReplayRun.run

    def run_observed(self: ReplayRun) -> None:
        before.observe()
        play(self)

    monkeypatch.setattr(ReplayRun, "run", run_observed)
    return before


def replayed(path: Path, trace: Path | None = None) -> ScenarioResult:
    play = Play.load(path, {}, Player.REPLAY)
    (result,) = play_all([play], Player.REPLAY, trace=trace)
    return result


class TestReplay:
    def test_everything_at_once(self, tmp_path: Path, observed: Snapshot) -> None:
        """Stalls, failing reads, pressure and losses in one run change no token."""
        (tmp_path / "story.toml").write_text(STORY)
        trace = tmp_path / "story.jsonl"
        result = replayed(tmp_path / "story.toml", trace)
        assert [checked for checked in result.expectations if not checked.ok] == []
        assert result.timeline_sha256
        kinds = {event.keys["kind"] for event in read_timeline(trace) if event.event == "fault"}
        told = {"npu_stall", "device_slow", "read_error", "memory_shrink"}
        assert kinds >= told | {"worker_lost", "reader_lost"}
        assert_nothing_left(observed)

    def test_back_end_that_fails_costs_no_token(self, tmp_path: Path, observed: Snapshot) -> None:
        """A modelled device is lost in the midst of a prompt; the C kernels go on."""
        script = STORY[: STORY.index("[[events]]")] + STORY[STORY.index("[[expect]]") :]
        script = script.replace("npu_threads = 1\n", 'npu_threads = 1\nnpu = "native:fail=run@3"\n')
        script = script.replace('"restarts"\nequals = 2', '"restarts"\nequals = 0')
        script = script.replace('"ttft_ms"\nmin = 150', '"ttft_ms"\nmin = 0')
        (tmp_path / "story.toml").write_text(script)
        trace = tmp_path / "story.jsonl"
        result = replayed(tmp_path / "story.toml", trace)
        assert [checked for checked in result.expectations if not checked.ok] == []
        faults = [event.keys for event in read_timeline(trace) if event.event == "fault"]
        assert faults == [{"kind": "npu_failed", "target": "npu.0"}]
        assert_nothing_left(observed)

    @pytest.mark.parametrize("name", REPLAYED)
    def test_library_holds(self, name: str, observed: Snapshot) -> None:
        """Reads that never come, a process that is gone, predictors of every rung."""
        result = replayed(find_scenario(name))
        assert [checked for checked in result.expectations if not checked.ok] == []
        assert_nothing_left(observed)

    def test_failing_run_leaves_nothing(
        self, tmp_path: Path, observed: Snapshot, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """A worker that there is none of is found out in the midst of the run."""
        path = tmp_path / "story.toml"
        path.write_text(STORY)
        assert run("replay", path, "--events.4.worker=77") == 2
        assert "worker 77: there are" in capsys.readouterr().err
        assert_nothing_left(observed)

    def test_unmet_expectation_ends_in_1(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = tmp_path / "story.toml"
        short = STORY.partition("[[requests]]\nat_token")[0]
        path.write_text(short + '[[expect]]\nfigure = "tokens"\nequals = 47\n')
        assert run("replay", path, "--json") == 1
        found = json.loads(capsys.readouterr().out)
        assert found["expectations"] == [
            {"name": "tokens", "expected": "= 47", "got": 48.0, "ok": False}
        ]
