"""What playing a scenario came to: figures, and which expectations they met."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from polyneuron.scenarios.expectation import AT, Expectation, Player

Figures = dict[str, float | None]
"""Name -> value; None, or no name at all: not measured."""


@dataclass(frozen=True, slots=True)
class Checked:
    """One expectation against what was seen."""

    name: str
    expected: str
    got: float | None
    ok: bool
    source: str = ""

    def as_dict(self) -> dict[str, Any]:
        """As in INTERFACE's `expectations`."""
        return {"name": self.name, "expected": self.expected, "got": self.got, "ok": self.ok}


@dataclass(frozen=True, slots=True)
class ScenarioResult:
    """One scenario played with one seed."""

    scenario: str
    seed: int
    figures: Mapping[str, float | None]
    """Of a sweep, each figure of each point as name@point."""
    expectations: tuple[Checked, ...]
    timeline_sha256: str | None
    """Of the timeline; of a sweep, of all points' hashes in order. None: none was kept."""

    @property
    def is_met(self) -> bool:
        """Whether every expectation was met."""
        return all(checked.ok for checked in self.expectations)

    def as_dict(self) -> dict[str, Any]:
        """The object of `--json`; a figure that was not measured is null."""
        return {
            "scenario": self.scenario,
            "seed": self.seed,
            "figures": dict(self.figures),
            "expectations": [checked.as_dict() for checked in self.expectations],
            "timeline_sha256": self.timeline_sha256,
        }


def named(figures: Mapping[str, float | None], point: str) -> Figures:
    """The figures of one point of a sweep, under their names there; NaN is not measured."""
    found: Figures = {}
    for name, value in figures.items():
        is_known = value is not None and math.isfinite(value)
        found[f"{name}{AT}{point}" if point else name] = value if is_known else None
    return found


def check(
    expectations: Iterable[Expectation],
    figures: Mapping[str, float | None],
    player: Player,
    points: Iterable[str],
) -> tuple[Checked, ...]:
    """Every expectation that is this player's; one of a sweep without a point, at each point."""
    places = list(points)
    return tuple(
        _checked(expectation, figures, point)
        for expectation in expectations
        if expectation.player in (None, player)
        for point in ([""] if AT in expectation.figure else places)
    )


def _checked(expectation: Expectation, figures: Mapping[str, float | None], point: str) -> Checked:
    got = _seen(expectation.figure, figures, point)
    if expectation.over is not None:
        base = _seen(expectation.over, figures, point)
        got = None if got is None or not base else got / base
    name = f"{expectation.name}{AT}{point}" if point else expectation.name
    return Checked(name, _wanted(expectation), got, _is_met(expectation, got), expectation.source)


def _seen(figure: str, figures: Mapping[str, float | None], point: str) -> float | None:
    return figures.get(f"{figure}{AT}{point}" if point and AT not in figure else figure)


def _is_met(wanted: Expectation, got: float | None) -> bool:
    """A figure that was not measured meets nothing."""
    if got is None:
        return False
    near = wanted.near
    return (
        (wanted.min is None or got >= wanted.min)
        and (wanted.max is None or got <= wanted.max)
        and (wanted.equals is None or got == wanted.equals)
        and (near is None or abs(got - near) <= wanted.within * abs(near))
    )


def _wanted(wanted: Expectation) -> str:
    """The bounds for people."""
    parts = []
    if wanted.min is not None:
        parts.append(f">= {wanted.min:g}")
    if wanted.max is not None:
        parts.append(f"<= {wanted.max:g}")
    if wanted.equals is not None:
        parts.append(f"= {wanted.equals:g}")
    if wanted.near is not None:
        parts.append(f"{wanted.near:g} within {wanted.within:.0%}")
    text = " and ".join(parts)
    return f"{text} times {wanted.over}" if wanted.over else text
