"""The paper's curves and bars drawn beside the simulator's, by matplotlib (extra `plot`)."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polyneuron.scenarios.paper_table import Row

CURVES = {
    "memory_powerinfer2": ("PowerInfer-2", "tab:blue"),
    "memory_llmflash": ("LLMFlash", "tab:orange"),
    "memory_mmap": ("llama.cpp", "tab:gray"),
}
"""Scenario -> what the paper calls it, and its colour."""
WIDTH = 0.4
INCHES = (8.0, 4.8)


def has_matplotlib() -> bool:
    """Whether figures can be drawn here."""
    return importlib.util.find_spec("matplotlib") is not None


def draw(rows: Sequence[Row], folder: Path) -> Iterator[Path]:
    """One PNG of the curves by memory, and one of bars for each other scenario."""
    import matplotlib as mpl

    mpl.use("Agg")
    folder.mkdir(parents=True, exist_ok=True)
    curves = [row for row in rows if row.scenario in CURVES]
    if curves:
        yield _saved(_memory_figure(curves), folder / "memory.png")
    for scenario in dict.fromkeys(row.scenario for row in rows if row.scenario not in CURVES):
        own = [row for row in rows if row.scenario == scenario]
        yield _saved(_bars(scenario, own), folder / f"{scenario}.png")


def _saved(figure: Any, path: Path) -> Path:
    from matplotlib import pyplot

    figure.savefig(path, dpi=120, bbox_inches="tight")
    pyplot.close(figure)
    return path


def gib_of(row: Row) -> float:
    """The memory that a row's point is of: its name ends in a size as 7GiB."""
    return float(row.figure.rpartition(" ")[2].removesuffix("GiB"))


def _memory_figure(rows: Sequence[Row]) -> Any:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=INCHES)
    for scenario, (label, colour) in CURVES.items():
        own = [row for row in rows if row.scenario == scenario]
        sizes = [gib_of(row) for row in own]
        axes.plot(sizes, [row.paper for row in own], "o--", color=colour, label=f"{label}, paper")
        simulated = [float("nan") if row.simulated is None else row.simulated for row in own]
        axes.plot(sizes, simulated, "-", color=colour, label=f"{label}, simulated")
    axes.set_xlabel("memory, GiB")
    axes.set_ylabel("decode, tokens/s")
    axes.set_title("TurboSparse-Mixtral-47B on a OnePlus 12")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def _bars(scenario: str, rows: Sequence[Row]) -> Any:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=INCHES)
    places = range(len(rows))
    axes.bar([x - WIDTH / 2 for x in places], [r.paper for r in rows], WIDTH, label="paper")
    axes.bar([x + WIDTH / 2 for x in places], [r.simulated or 0.0 for r in rows], WIDTH,
             label="simulated")  # fmt: skip
    labels = [row.figure.partition("@")[2] or row.figure for row in rows]
    axes.set_xticks(list(places), labels, rotation=60,
                    ha="right", fontsize=8)  # fmt: skip
    axes.set_title(scenario.replace("_", " "))
    axes.grid(axis="y", alpha=0.3)
    axes.legend()
    return figure
