"""Expectations against figures."""

from __future__ import annotations

import math
from typing import Any

import pytest

from polyneuron.scenarios.expectation import Expectation, Player
from polyneuron.scenarios.result import Checked, Figures, ScenarioResult, check, named


def seen(figures: Figures, *points: str, **bounds: Any) -> list[Checked]:
    """One expectation of decode_tok_s unless told otherwise, checked at each point."""
    wanted = Expectation(**{"figure": "decode_tok_s", "name": "speed", **bounds})
    return list(check([wanted], figures, Player.SIMULATE, points or ("",)))


class TestBounds:
    @pytest.mark.parametrize(
        ("bounds", "passing", "failing"),
        [
            ({"min": 2.0}, (2.0, 9.0), (1.999,)),
            ({"max": 2.0}, (2.0, -1.0), (2.001,)),
            ({"equals": 0.0}, (0.0,), (1e-12,)),
            ({"near": 10.0, "within": 0.1}, (9.0, 11.0), (8.99, 11.01)),
            ({"near": -10.0, "within": 0.1}, (-9.0, -11.0), (-8.9,)),
            ({"min": 1.0, "max": 2.0}, (1.0, 2.0), (0.9, 2.1)),
        ],
    )
    def test_bounds_hold(
        self, bounds: dict[str, float], passing: tuple[float, ...], failing: tuple[float, ...]
    ) -> None:
        for value in passing + failing:
            (checked,) = seen({"decode_tok_s": value}, **bounds)
            assert checked.ok is (value in passing), value

    @pytest.mark.parametrize("figures", [{}, {"decode_tok_s": None}])
    def test_what_was_not_measured_meets_nothing(self, figures: Figures) -> None:
        (checked,) = seen(figures, min=-1e300)
        assert (checked.got, checked.ok) == (None, False)

    def test_ratio_is_of_two_figures(self) -> None:
        figures: Figures = {"decode_tok_s@b": 9.0, "decode_tok_s@a": 3.0}
        (checked,) = seen(figures, figure="decode_tok_s@b", over="decode_tok_s@a", min=3.0)
        assert (checked.got, checked.ok) == (3.0, True)
        assert checked.expected == ">= 3 times decode_tok_s@a"

    def test_ratio_to_zero_meets_nothing(self) -> None:
        (checked,) = seen({"decode_tok_s": 1.0, "miss_rate": 0.0}, over="miss_rate", min=0.0)
        assert (checked.got, checked.ok) == (None, False)

    def test_other_players_are_not_asked(self) -> None:
        assert seen({"decode_tok_s": 1.0}, player=Player.REPLAY, min=1.0) == []


class TestSweep:
    def test_plain_figure_is_every_points(self) -> None:
        figures = named({"decode_tok_s": 1.0}, "7") | named({"decode_tok_s": 3.0}, "8")
        checked = seen(figures, "7", "8", min=2.0)
        assert [(each.name, each.ok) for each in checked] == [("speed@7", False), ("speed@8", True)]

    def test_named_point_is_asked_once(self) -> None:
        figures = named({"decode_tok_s": 1.0}, "7") | named({"decode_tok_s": 3.0}, "8")
        assert [each.ok for each in seen(figures, "7", "8", figure="decode_tok_s@8", min=2.0)] == [
            True
        ]


class TestResult:
    def test_unmeasured_is_null(self) -> None:
        found = named({"hit_rate": math.nan, "io_share": None, "tokens": 3.0}, "")
        assert found == {"hit_rate": None, "io_share": None, "tokens": 3.0}

    def test_one_unmet_expectation_fails(self) -> None:
        good, bad = Checked("a", "= 1", 1.0, True), Checked("b", "= 1", 2.0, False)
        assert ScenarioResult("s", 1, {}, (good,), None).is_met
        result = ScenarioResult("s", 1, {"tokens": 2.0}, (good, bad), "abc")
        assert not result.is_met
        assert result.as_dict() == {
            "scenario": "s",
            "seed": 1,
            "figures": {"tokens": 2.0},
            "expectations": [
                {"name": "a", "expected": "= 1", "got": 1.0, "ok": True},
                {"name": "b", "expected": "= 1", "got": 2.0, "ok": False},
            ],
            "timeline_sha256": "abc",
        }
