"""The table of the paper's figures, and what is drawn of it."""

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from polyneuron.scenarios.expectation import Expectation, Player
from polyneuron.scenarios.paper_figures import CURVES, draw, gib_of, has_matplotlib
from polyneuron.scenarios.paper_table import Row, rows_of, table_of
from polyneuron.scenarios.result import Checked, ScenarioResult


def row(scenario: str = "ladder", figure: str = "cache", simulated: float | None = 4.0) -> Row:
    return Row(scenario, figure, 5.0, simulated, 0.25, "PAPER 3.10", simulated is not None)


def test_rows_are_of_near_expectations_of_the_simulator() -> None:
    wanted = [
        Expectation("decode_tok_s", near=10.0, within=0.2, name="a"),
        Expectation("tokens", equals=3.0, name="b"),
        Expectation("ttft_ms", near=1.0, within=0.2, name="c", player=Player.REPLAY),
    ]
    checked = (Checked("a", "", 9.0, True), Checked("b", "", 3.0, True))
    result = ScenarioResult("tried", 1, {}, checked, None)
    (only,) = rows_of(result, wanted)
    assert (only.figure, only.paper, only.simulated) == ("a", 10.0, 9.0)
    assert only.difference == pytest.approx(-0.1)


def test_table_says_what_is_off() -> None:
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(table_of([row(), row(figure="pipeline", simulated=None)]))
    text = console.export_text()
    assert "-20.0%" in text and "ok" in text and "off" in text


def test_what_needs_a_wide_tolerance_is_not_met() -> None:
    assert row().verdict == "ok"
    assert replace(row(), tolerance=0.6).verdict == "out of reach"
    assert replace(row(), tolerance=0.6, ok=False).verdict == "off"


def test_point_names_its_memory() -> None:
    assert gib_of(row("memory_mmap", "llama.cpp in 18.5GiB")) == 18.5


@pytest.mark.skipif(not has_matplotlib(), reason="matplotlib (extra plot) is not installed")
def test_figures_are_drawn(tmp_path: Path) -> None:
    curve = next(iter(CURVES))
    rows = [row(curve, "PowerInfer-2 in 7GiB"), row(curve, "PowerInfer-2 in 8GiB", None), row()]
    drawn = list(draw(rows, tmp_path))
    assert [path.name for path in drawn] == ["memory.png", "ladder.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn)
