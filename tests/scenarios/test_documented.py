"""What docs/SCENARIOS.md says: its example plays, and every word of the language stands there."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from polyneuron.scenarios.disturbance import KEYS, Deed
from polyneuron.scenarios.engine_settings import ENGINE_KEYS, Policy
from polyneuron.scenarios.expectation import EXPECT_KEYS, FIGURES
from polyneuron.scenarios.replay_settings import REPLAY_KEYS, ReplaySettings
from polyneuron.scenarios.script import SCRIPT_KEYS
from polyneuron.scenarios.workload import REQUEST_KEYS
from tests.support.program import run

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "SCENARIOS.md").read_text()
WORDS = {
    *SCRIPT_KEYS, *ENGINE_KEYS, *REQUEST_KEYS, *REPLAY_KEYS, *EXPECT_KEYS, *Policy, *Deed,
    *(key for keys in KEYS.values() for key in keys),
}  # fmt: skip


@pytest.fixture
def example(tmp_path: Path) -> Path:
    """The page's example as a user would save it."""
    (text,) = re.findall(r"^```toml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    path = tmp_path / "busy_evening.toml"
    path.write_text(text)
    return path


class TestExample:
    def test_example_plays(self, example: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert run("simulate", example) == 0
        shown = capsys.readouterr().out
        assert "ok     tokens wait for the flash, but not for ever" in shown
        assert "no token changes" not in shown  # the other player's

    def test_unmet_expectation_ends_in_1(
        self, example: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert run("simulate", example, "--expect.0.equals=3") == 1
        assert "MISSED requests_finished: 2, expected = 3" in capsys.readouterr().out

    def test_commands_of_the_page_work(
        self, example: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.chdir(example.parent)
        commands = re.findall(r"^polyneuron (simulate .*?)(?:  +#.*)?$", PAGE, re.MULTILINE)
        assert len(commands) == 4
        for command in commands:
            assert run(*command.replace("--seeds 20", "--seeds 2").split()) == 0
        assert (example.parent / "evening.jsonl").stat().st_size > 0
        capsys.readouterr()


class TestWords:
    @pytest.mark.parametrize("word", sorted(WORDS))
    def test_every_key_is_told(self, word: str) -> None:
        assert re.search(rf"[`\[\"]{word}[`\]\"\s]", PAGE), word

    @pytest.mark.parametrize("figure", FIGURES)
    def test_every_figure_is_told(self, figure: str) -> None:
        short = figure.replace("token_ms", "") if figure != "token_ms_mean" else figure
        assert f"`{figure}`" in PAGE or f"`{short}`" in PAGE

    def test_defaults_of_a_replay_are_the_codes(self) -> None:
        plain = ReplaySettings()
        names = ("layers", "hidden", "neurons", "heads", "kv_heads", "vocab")
        assert {field.name for field in fields(ReplaySettings)} >= set(names)
        values = ", ".join(str(getattr(plain, name)) for name in names)
        assert f"| {values} | its shape" in PAGE
