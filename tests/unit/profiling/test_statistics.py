"""What is counted of a layer's neurons, against plain loops."""

import numpy as np

from polyneuron.profiling.neuron_order import bundle_order, split_by_company
from polyneuron.profiling.statistics import (
    carried_by,
    group_counts,
    overlap_of,
    tail_coactivation,
)


def activity(seed: int = 0, tokens: int = 80, neurons: int = 12) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.random((tokens, neurons)) < np.linspace(0.05, 0.9, neurons)


def test_groups_take_tokens_far_apart() -> None:
    active = np.zeros((10, 1), bool)
    active[[0, 5], 0] = True  # with batches of two: tokens 0 and 5 are one group
    assert group_counts(active, 1).tolist() == [2]
    assert group_counts(active, 2).tolist() == [1]
    assert group_counts(active, 4).tolist() == [2]  # 0 2 4 6 and 1 3 5 7: 8 and 9 are left out
    assert group_counts(active, 8).tolist() == [1]


def test_carried_by_the_hottest() -> None:
    assert carried_by(np.array([0.6, 0.2, 0.1, 0.1]), 0.5) == 0.8
    assert carried_by(np.zeros(4), 0.5) == 0.0


def test_overlap_leaves_out_where_sequences_begin() -> None:
    active = np.array([[1, 1, 0], [1, 0, 0], [0, 0, 1], [0, 1, 1]], bool)
    got, by_chance = overlap_of(active, (0, 2))
    assert got == 2 / 3  # token 1 has one of its one, token 3 one of its two
    assert by_chance == (0.25 + 0.25 + 0.25) / 1.5


def test_tail_is_counted_over_all_pairs() -> None:
    active = activity()
    counts = active.sum(axis=0)
    tail = [i for i in np.argsort(counts, kind="stable")[:6] if counts[i]]
    pairs = [(i, j) for i in tail for j in tail if i != j]
    given = [(active[:, i] & active[:, j]).sum() / counts[i] for i, j in pairs]
    got, expected = tail_coactivation(active)
    assert np.isclose(got, np.mean(given))
    assert np.isclose(expected, np.mean([counts[j] / len(active) for _, j in pairs]))


def test_silent_tail_has_no_company() -> None:
    assert tail_coactivation(np.zeros((5, 8), bool)) == (0.0, 0.0)


def test_order_begins_with_the_hottest() -> None:
    active = activity(neurons=40)
    order = bundle_order(active)
    assert sorted(order) == list(range(40))
    rates = active.mean(axis=0)[order]
    assert (np.diff(rates[:20]) <= 0).all()
    assert rates[:20].min() >= rates[20:].max()


def test_company_stays_together() -> None:
    rng = np.random.default_rng(0)
    topic = rng.integers(0, 4, 600)
    group = rng.permutation(np.repeat(np.arange(4), 64))
    active = (topic[:, None] == group) & (rng.random((600, 256)) < 0.5)
    found = split_by_company(active)
    assert sorted(np.concatenate(found)) == list(range(256))
    assert all(len(columns) <= 64 for columns in found)
    purity = [np.bincount(group[columns]).max() / len(columns) for columns in found]
    assert np.mean(purity) > 0.9
