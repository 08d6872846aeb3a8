"""What the bench of candidates makes of the times of their steps."""

from __future__ import annotations

from polyneuron.actors.messages import RequestOutcome
from tests.bench.best_of import Side, make_requests, rows, step_times


def make_outcome(token_ns: list[int], batch_sizes: list[tuple[int, int]]) -> RequestOutcome:
    return RequestOutcome(
        1, "length", 9, 50, token_ns, 0, None, [], [], batch_sizes=batch_sizes
    )  # fmt: skip


def test_each_step_has_the_size_of_its_batch() -> None:
    outcome = make_outcome([40, 41, 30, 10], [(1, 4), (3, 3), (4, 1)])
    assert list(step_times(outcome)) == [(4, 40), (4, 41), (3, 30), (1, 10)]
    assert list(step_times(make_outcome([], []))) == []


def test_one_ends_every_few_tokens() -> None:
    requests = make_requests([1, 2], 3, every=5)
    assert [request["max_tokens"] for request in requests] == [6, 11, 16]
    assert [request["sampling"]["seed"] for request in requests] == [1, 2, 3]


def test_table_has_each_size_and_the_ratios() -> None:
    """Two candidates in half a second a step, against one by one in as much."""
    half = 500_000_000
    together = Side([[1, 2], [1, 2, 3]], half, [(2, half), (1, half)])
    apart = Side([[1, 2], [1, 2, 3]], 2 * half, [(1, half), (1, half), (1, half)])
    assert list(rows([together], [apart])) == [
        ("decode, 2 at once", "2", "4.00"),
        ("decode, 1 at once", "1", "2.00"),
        ("decode, candidates", "3", "3.00"),
        ("decode, in turn", "3", "2.00"),
        ("ratio, decode", "", "1.50x"),
        ("ratio, prompt included", "", "1.67x"),
    ]
