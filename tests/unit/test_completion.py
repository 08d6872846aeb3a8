"""The figures of a finished request."""

from __future__ import annotations

from dataclasses import replace

import pytest

from polyneuron.actors.io_counters import IoCounters
from polyneuron.actors.messages import RequestOutcome
from polyneuron.completion import (
    BestOf,
    CandidateReport,
    RequestIo,
    io_of,
    timings_of,
    token_statistics,
)

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


class TestBestOf:
    @pytest.mark.parametrize(
        ("means", "chosen"),
        [
            ([-2.0, -1.0, -3.0], 1),
            ([-1.5, -1.0, -1.0], 1),
            ([-1.0, -1.0], 0),
            ([None, -9.0], 1),
            ([None, None], 0),
        ],
    )
    def test_likeliest_is_chosen_and_of_equals_the_first(
        self, means: list[float | None], chosen: int
    ) -> None:
        assert BestOf.among(CandidateReport(m, 3, "stop") for m in means).chosen == chosen

    def test_object_lists_all(self) -> None:
        reports = [CandidateReport(-2.0, 5, "length"), CandidateReport(None, 0, "cancelled")]
        assert BestOf.among(reports).as_dict() == {
            "n": 2,
            "chosen": 0,
            "candidates": [
                {"mean_logprob": -2.0, "n": 5, "finish_reason": "length"},
                {"mean_logprob": None, "n": 0, "finish_reason": "cancelled"},
            ],
        }


class TestIo:
    def test_figures_of_a_token(self) -> None:
        decode = IoCounters(8000, 4, 12 * MS, hits=90, misses=10)
        outcome = replace(make_outcome([10 * MS, 30 * MS]), decode_io=decode, miss_rates=[0.0, 0.2])
        assert io_of(outcome, num_workers=2).as_dict() == {
            "bytes_per_token": 4000.0,
            "reads_per_token": 2.0,
            "hit_rate": 0.9,
            "miss_rate_p99": pytest.approx(0.198),
            "critical_path_share": pytest.approx(12 / (2 * 40)),
        }

    def test_streamed_layers_have_no_hit_rate(self) -> None:
        outcome = replace(make_outcome([MS]), decode_io=IoCounters(8000, 4))
        io = io_of(outcome, 1)
        assert (io.bytes_per_token, io.hit_rate, io.miss_rate_p99) == (8000.0, None, None)
        assert io.critical_path_share == 0.0  # measured, and nothing was waited for

    @pytest.mark.parametrize("token_ns", [[], [MS]])
    def test_nothing_read_is_nothing_measured(self, token_ns: list[int]) -> None:
        assert set(io_of(make_outcome(token_ns), 2).as_dict().values()) == {None}

    def test_prompt_is_told_apart(self) -> None:
        outcome = replace(make_outcome([]), prefill_io=IoCounters(bytes_read=9))
        assert io_of(outcome, 2) == RequestIo(prefill=IoCounters(bytes_read=9))
