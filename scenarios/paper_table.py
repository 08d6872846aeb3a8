"""The paper's figures beside the simulator's: what `make paper` prints and draws."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from polyneuron.config import usable_cores
from polyneuron.errors import PolyneuronError
from polyneuron.scenarios.expectation import Expectation, Player
from polyneuron.scenarios.library import LIBRARY
from polyneuron.scenarios.playing import Play, play_all
from polyneuron.scenarios.result import Checked, ScenarioResult

PAPER = LIBRARY / "paper"
HOW_TO_DRAW = "no figures drawn: pip install 'polyneuron[plot]' for matplotlib"


TOLERANCE_MAX = 0.25
"""A figure that is given more is out of reach, and said to be (docs/SIMULATOR.md)."""


@dataclass(frozen=True, slots=True)
class Row:
    """One figure of the paper and what the simulator gives."""

    scenario: str
    figure: str
    paper: float
    simulated: float | None
    tolerance: float
    """As a share of the paper's figure."""
    source: str
    ok: bool

    @property
    def difference(self) -> float | None:
        """As a share of the paper's figure; None when nothing was simulated."""
        return None if self.simulated is None else self.simulated / self.paper - 1.0

    @property
    def verdict(self) -> str:
        """ok, off or out of reach."""
        if not self.ok:
            return "off"
        return "ok" if self.tolerance <= TOLERANCE_MAX else "out of reach"


def rows_of(result: ScenarioResult, expectations: Sequence[Expectation]) -> Iterator[Row]:
    """A row for each expectation of a scenario that names a figure of the paper."""
    mine = [e for e in expectations if e.player in (None, Player.SIMULATE)]
    for wanted, checked in zip(mine, result.expectations, strict=True):
        if wanted.near is not None:
            yield _row(result.scenario, wanted, checked)


def _row(scenario: str, wanted: Expectation, checked: Checked) -> Row:
    assert wanted.near is not None
    return Row(
        scenario, wanted.name, wanted.near, checked.got, wanted.within, wanted.source, checked.ok
    )


def paper_rows(paths: Iterable[Path], jobs: int) -> list[Row]:
    """Play the paper's scenarios and compare."""
    plays = [Play.load(path, {}, Player.SIMULATE) for path in paths]
    results = play_all(plays, Player.SIMULATE, jobs)
    return [
        row
        for play, result in zip(plays, results, strict=True)
        for row in rows_of(result, play.script.expectations)
    ]


def table_of(rows: Sequence[Row]) -> Table:
    """For people."""
    table = Table(title="PowerInfer-2 (arXiv 2406.06282) and the simulator", title_justify="left")
    for name in ("scenario", "figure"):
        table.add_column(name, overflow="fold")
    for name in ("paper", "simulated", "difference", "tolerance", ""):
        table.add_column(name, justify="right")
    last = ""
    for row in rows:
        difference = "-" if row.difference is None else f"{row.difference:+.1%}"
        simulated = "-" if row.simulated is None else f"{row.simulated:.4g}"
        table.add_row(
            row.scenario if row.scenario != last else "", row.figure, f"{row.paper:.4g}",
            simulated, difference, f"{row.tolerance:.0%}", row.verdict,
        )  # fmt: skip
        last = row.scenario
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table, draw the figures if matplotlib is there: 0, or 1 when a figure is off."""
    parser = argparse.ArgumentParser(prog="paper_table", description=__doc__)
    parser.add_argument("--jobs", type=int, default=len(usable_cores()))
    parser.add_argument("--figures", type=Path, default=Path("build/paper"), help="folder")
    options = parser.parse_args(arguments)
    try:
        rows = paper_rows(sorted(PAPER.glob("*.toml")), options.jobs)
    except PolyneuronError as error:
        print(f"polyneuron: error: {error}", file=sys.stderr)
        return 2
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(table_of(rows))
    verdicts = [row.verdict for row in rows]
    reach = verdicts.count("out of reach")
    told = f"; {reach} out of reach, see docs/SIMULATOR.md" if reach else ""
    console.print(f"{verdicts.count('ok')} of {len(rows)} figures within their tolerance{told}")
    _draw(rows, options.figures)
    return 1 if "off" in verdicts else 0


def _draw(rows: Sequence[Row], folder: Path) -> None:
    from polyneuron.scenarios.paper_figures import draw, has_matplotlib

    if not has_matplotlib():
        print(HOW_TO_DRAW)
        return
    for path in draw(rows, folder):
        print(f"drawn: {path}")


if __name__ == "__main__":
    sys.exit(main())
