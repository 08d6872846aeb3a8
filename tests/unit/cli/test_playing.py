"""What `simulate` and `replay` take, and what they refuse before anything is played."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from polyneuron.cli.playing import override_value, split_words
from tests.support.program import run

SCENARIO = """
name = "story"
players = ["simulate"]
[device]
profile = "oneplus12"
[model]
shape = "bamboo-7b"
[[requests]]
prompt_tokens = 4
output_tokens = 4
"""


@pytest.fixture
def story(tmp_path: Path) -> Path:
    path = tmp_path / "story.toml"
    path.write_text(SCENARIO)
    return path


class TestWords:
    @pytest.mark.parametrize(
        ("text", "value"),
        [
            ("7GiB", "7GiB"), ("7", 7), ("0.5", 0.5), ("true", True), ('"7"', "7"),
            ("[1, 2]", [1, 2]), ("", ""), ("a b", "a b"), ("1\nb = 2", "1\nb = 2"),
        ],
    )  # fmt: skip
    def test_values_are_tomls_or_words(self, text: str, value: Any) -> None:
        assert override_value(text) == value

    def test_keys_and_scenarios_are_told_apart(self) -> None:
        words = ["cold_start", "--engine.memory=7GiB", "a.toml", "--requests.0.best_of=2"]
        scenarios, overrides = split_words(words)
        assert scenarios == ["cold_start", "a.toml"]
        assert overrides == {"engine.memory": "7GiB", "requests.0.best_of": 2}


class TestRefusals:
    def test_trace_takes_nothings_place(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        fifo, text = tmp_path / "fifo", tmp_path / "text"
        os.mkfifo(fifo)
        text.write_text("kept")
        for path, said in ((fifo, "is no plain file"), (text, "is there and is no timeline")):
            assert run("simulate", "cold_start", "--trace", str(path)) == 2
            assert f"--trace {path}: {said}" in capsys.readouterr().err
        assert fifo.is_fifo() and text.read_text() == "kept"

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            ([], "no scenario: give a file or a name; --list shows those that come along"),
            (["cold_strat"], "neither a file nor in the library; did you mean cold_start?"),
            (["none.toml"], "none.toml: no such file; --list shows"),
            (["cold_start", "--foo"], "--foo: no such option; a scenario's key is --engine.memory"),
            (["cold_start", "--foo=1"], "--foo=1: no such option"),
            (["cold_start", "-x.y=1"], "-x.y=1: no such option"),
            (["cold_start", "--engine.memroy=1"], "engine.memroy: not a key here; did you mean me"),
            (["ladder_replayed"], "players: it is for replay, not for simulate"),
            (["cold_start", "--trace", "/nowhere/t"], "--trace /nowhere/t: there is no folder"),
            (["cold_start", "--seeds", "2", "--trace", "t"], "--trace t: this makes 2 timelines"),
        ],
    )
    def test_bad_words_are_named(
        self, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert run("simulate", *words) == 2
        error = capsys.readouterr().err
        assert error.startswith("polyneuron: error: ")
        assert message in error
        assert error.count("\n") == 1

    def test_replay_of_a_simulated_one(
        self, story: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert run("replay", story) == 2
        assert f"{story}: players: it is for simulate" in capsys.readouterr().err

    def test_replay_of_a_policy_it_does_not_know(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert run("replay", "cold_start", "--engine.policy=mmap") == 2
        assert "engine.policy: mmap is only simulated; replay knows" in capsys.readouterr().err

    def test_replay_of_a_rung_in_exact_mode(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert run("replay", "cold_start", "--engine.policy=cache") == 2
        assert 'replay knows cache in mode = "predicted" only' in capsys.readouterr().err


class TestLibrary:
    def test_list_tells_what_each_is_about(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert run("replay", "--list", "--json") == 0
        listed = capsys.readouterr().out
        assert '"npu_lost": "The NPU executor dies' in listed
        assert "hot_set_shift" not in listed
