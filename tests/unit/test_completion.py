"""The figures of a finished request."""

from __future__ import annotations

import pytest

from polyneuron.actors.messages import RequestOutcome
from polyneuron.completion import timings_of, token_statistics

MS = 1_000_000


def make_outcome(token_ns: list[int], prefill_ns: int = 0) -> RequestOutcome:
    return RequestOutcome(1, "stop", 100, prefill_ns, token_ns, 5 * MS, None, [], [])


class TestCompletion:
    def test_statistics_of_tokens(self) -> None:
        found = token_statistics([n * MS for n in range(1, 102)])
        assert found == {"mean": 51.0, "p50": 51.0, "p90": 91.0, "p99": 100.0}

    def test_no_tokens_have_no_statistics(self) -> None:
        assert set(token_statistics([]).values()) == {None}

    def test_first_token_is_prefills(self) -> None:
        timings = timings_of(make_outcome([10 * MS, 30 * MS], prefill_ns=50 * MS), 1.0, 3)
        assert timings.prompt_per_second == 2000.0
        assert timings.predicted_ms == 40.0
        assert timings.predicted_per_second == 50.0
        assert timings.outside_ms == 2.5

    @pytest.mark.parametrize("num_tokens", [0, 1])
    def test_rates_without_time_are_none(self, num_tokens: int) -> None:
        timings = timings_of(make_outcome([]), 1.0, num_tokens)
        assert timings.prompt_per_second is None
        assert timings.predicted_per_second is None
        assert timings.outside_ms is None
        assert timings.as_dict()["token_ms"] == dict.fromkeys(("mean", "p50", "p90", "p99"))
