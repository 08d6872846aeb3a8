"""Every scenario of the library, simulated: what must hold does, and its timeline is the known one.

`pytest tests/scenarios --update-golden` writes the timelines anew; git shows what has changed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from polyneuron.scenarios.expectation import Player
from polyneuron.scenarios.library import find_scenario, library_names
from polyneuron.scenarios.playing import Play, play_all
from polyneuron.scenarios.script import load_script
from tests.support.scenario_golden import golden_text

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = Path(__file__).parent / "golden"
OWN = [name for name in library_names() if "/" not in name]
"""Those of the paper's figures have tests of their own."""
SIMULATED = [n for n in OWN if Player.SIMULATE in load_script(find_scenario(n)).players]
WANTED = {
    "cold_start", "prefill_then_decode", "best_of_shrinking", "several_clients", "memory_pressure",
    "memory_returns", "slow_flash", "flash_stalls", "read_errors_transient", "hot_set_shift",
    "read_errors_persistent", "npu_stall", "npu_lost", "cpu_worker_lost", "reader_lost",
    "long_context", "moe_thrash", "thermal_throttle", "ablation_ladder", "ladder_replayed",
    "recorded_text",
}  # fmt: skip


class TestLibrary:
    def test_library_is_whole(self) -> None:
        assert set(OWN) >= WANTED

    @pytest.mark.parametrize("name", OWN)
    def test_each_says_what_it_is_about(self, name: str) -> None:
        script = load_script(find_scenario(name))
        assert script.about
        for player in script.players:
            assert any(wanted.player in (None, player) for wanted in script.expectations)

    @pytest.mark.parametrize("name", SIMULATED)
    def test_expectations_hold(self, name: str) -> None:
        (result,) = play_all([Play.load(find_scenario(name), {}, Player.SIMULATE)], Player.SIMULATE)
        assert [checked for checked in result.expectations if not checked.ok] == []

    @pytest.mark.parametrize("name", SIMULATED)
    def test_timeline_is_the_golden_one(self, name: str, pytestconfig: pytest.Config) -> None:
        path, text = GOLDEN / f"{name}.golden", golden_text(load_script(find_scenario(name)))
        if pytestconfig.getoption("--update-golden"):
            path.write_text(text)
        assert path.read_text() == text

    def test_no_golden_is_left_over(self) -> None:
        assert {path.stem for path in GOLDEN.iterdir()} == set(SIMULATED)


class TestDeterminism:
    NAMES = ("several_clients", "best_of_shrinking", "flash_stalls", "moe_thrash")

    def play(self, hash_seed: str, jobs: int, trace: Path) -> bytes:
        """All bytes that a program gives: results of two seeds, and one timeline."""
        program = [sys.executable, "-m", "polyneuron", "simulate", "--json"]
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        found = b""
        for words in ([*self.NAMES, "--seeds", "2", "--jobs", str(jobs)], ["slow_flash"]):
            command = [*program, *words, *(["--trace", str(trace)] if len(words) == 1 else [])]
            done = subprocess.run(
                command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, check=True
            )
            found += done.stdout
        return found + trace.read_bytes()

    def test_hash_seed_and_jobs_change_nothing(self, tmp_path: Path) -> None:
        first = self.play("1", 1, tmp_path / "first.jsonl")
        assert first.count(b'"seed": 2') == len(self.NAMES)
        assert self.play("2", 3, tmp_path / "second.jsonl") == first

    def test_other_seeds_differ(self) -> None:
        path = find_scenario("cold_start")
        plays = [Play.load(path, {"seed": seed}, Player.SIMULATE) for seed in (1, 2)]
        first, second = play_all(plays, Player.SIMULATE)
        assert first.timeline_sha256 != second.timeline_sha256
