"""Figures of a run, and None where there was nothing to measure."""

import pytest

from polyneuron.scenarios.expectation import FIGURES
from polyneuron.scenarios.measured import Measured, percentile
from polyneuron.scenarios.simulated_engine import NOTHING, StepOutcome


def outcome(ns: int, **totals: int) -> StepOutcome:
    fields = {name: totals.get(name, 0) for name in NOTHING.__slots__}
    return StepOutcome(ns, 0, type(NOTHING)(**fields))


def test_nothing_measured_is_none() -> None:
    figures = Measured().figures()
    for name in ("decode_tok_s", "ttft_ms", "token_ms_p99", "hit_rate", "io_share"):
        assert figures[name] is None


def test_every_figure_is_a_known_one() -> None:
    assert set(Measured().figures()) <= set(FIGURES)


def test_decode_steps_add_up() -> None:
    measured = Measured()
    measured.decode(outcome(2_000_000, needed=80, misses=8, hot=20, exposed_ns=500_000), 1)
    measured.decode(outcome(6_000_000, needed=80, misses=2, hot=20, bytes=300, reads=3), 3)
    figures = measured.figures()
    assert figures["decode_tok_s"] == pytest.approx(4 / 0.008)
    assert figures["miss_rate"] == pytest.approx(0.05)
    assert figures["hit_rate"] == pytest.approx(0.95)
    assert figures["miss_rate_p99"] == pytest.approx(0.08)
    assert figures["io_share"] == pytest.approx(1 / 16)
    assert figures["bytes_per_token"] == pytest.approx(75)


@pytest.mark.parametrize(("percent", "value"), [(50, 5), (90, 9), (99, 10), (100, 10)])
def test_percentile_is_of_what_was_seen(percent: int, value: int) -> None:
    assert percentile(range(1, 11), percent) == value
