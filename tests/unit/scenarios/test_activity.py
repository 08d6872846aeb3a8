"""Statistics of neurons: what is stated is what is drawn."""

from itertools import pairwise

import numpy as np
import pytest

from polyneuron.errors import ConfigError
from polyneuron.kernels.simulation import CacheKind, StepFlag, StepSimulation
from polyneuron.scenarios.activity import NUM_LEVELS, Activity, alias_table
from tests.support.simulated import activity

NEURONS = 1024
COSTS = dict.fromkeys(
    (
        "predict", "gate_row", "up_down_row", "gate_token", "up_down_token", "neuron", "miss",
        "first_read", "second_read", "run_read", "run_neuron", "latency_ns", "tail_ns",
        "tail_share", "barrier_ns", "attention_ns", "npu_ns",
    ),
    1,
)  # fmt: skip


def drawn(stats: Activity, steps: int, seed: int = 1, experts: tuple[int, int] = (1, 1)) -> tuple:
    """Bits (steps, neurons) of the first unit's neurons, and experts (steps, used)."""
    place = np.arange(NEURONS, dtype=np.uint32)
    simulation = StepSimulation(
        stats.tables(NEURONS, *experts, place), num_layers=1, cluster_neurons=128,
        max_sequences=1, cache_kind=CacheKind.ALL, num_slots=0, seed=seed,
    )  # fmt: skip
    simulation.configure(
        {**COSTS, "joint": 65536}, num_cores=2, flags=StepFlag(0), hot_neurons=0, first_bytes=1,
        second_bytes=1, bundle_bytes=1, merge_gap=0, queue_depth=1,
    )  # fmt: skip
    simulation.begin(0)
    levels = stats.draw_levels(np.random.default_rng(seed), NEURONS, steps)
    bits, chosen = [], []
    for level in levels:
        simulation.step([0], [level])
        chosen.append(simulation.chosen_experts(0)[0].copy())
        bits.append(np.unpackbits(simulation.active_bits(0).view(np.uint8), bitorder="little"))
    return np.array(bits)[:, :NEURONS], np.array(chosen)


class TestActivity:
    @pytest.mark.parametrize("overlap", [0.35, 0.6, 0.9])
    def test_drawn_neurons_have_stated_statistics(self, overlap: float) -> None:
        stats = activity(overlap=overlap)
        bits, _ = drawn(stats, 600)
        both = (bits[1:] & bits[:-1]).sum() / bits[1:].sum()
        assert bits.mean() == pytest.approx(0.15, rel=0.05)
        assert both == pytest.approx(overlap, abs=0.04)

    def test_rates_hold_by_rank(self) -> None:
        stats = activity(overlap=0.4)
        bits, _ = drawn(stats, 800)
        groups = bits.mean(axis=0).reshape(8, -1).mean(axis=1)
        wanted = stats.rates(NEURONS).reshape(8, -1).mean(axis=1)
        np.testing.assert_allclose(groups, wanted, rtol=0.12, atol=0.005)

    def test_bursts_leave_rates_alone(self) -> None:
        bits, _ = drawn(activity(burst=1.0), 800)
        assert bits.mean() == pytest.approx(0.15, rel=0.06)

    def test_seed_decides_everything(self) -> None:
        first, second = drawn(activity(), 5, seed=3)[0], drawn(activity(), 5, seed=3)[0]
        assert np.array_equal(first, second)
        assert not np.array_equal(first, drawn(activity(), 5, seed=4)[0])

    def test_rates_have_their_mean(self) -> None:
        for skew in (0.0, 2.0, 9.0):
            assert activity(skew=skew).rates(512).mean() == pytest.approx(0.15, rel=1e-6)

    def test_experts_are_kept_as_often_as_stated(self) -> None:
        _, chosen = drawn(activity(expert_overlap=0.8), 800, experts=(8, 2))
        kept = np.mean([len(set(a) & set(b)) / 2 for a, b in pairwise(chosen)])
        assert all(a != b for a, b in chosen)
        # Kept by chance 0.8, or drawn again.
        assert 0.8 < kept < 0.88

    def test_levels_end_with_all_new(self) -> None:
        assert activity().levels()[-1] == 1.0
        assert max(activity(burst=3.0).draw_levels(np.random.default_rng(1), 512, 500)) == (
            NUM_LEVELS - 1
        )


class TestTable:
    @pytest.mark.parametrize(
        ("table", "complaint"),
        [
            ({"skew": 1, "overlap": 0.5}, "active: missing"),
            ({"active": 0.1, "skew": 1, "overlap": 0.5, "activ": 1}, "activ: not a key"),
            ({"active": 1.5, "skew": 1, "overlap": 0.5}, "at most 1"),
            ({"active": "0.1", "skew": 1, "overlap": 0.5}, "give a number"),
            ({"active": 0, "skew": 1, "overlap": 0.5}, "needs some neurons"),
        ],
    )
    def test_slips_are_named(self, table: dict, complaint: str) -> None:
        with pytest.raises(ConfigError, match=complaint):
            Activity.from_table(table, "file: activity")


def test_alias_table_draws_in_proportion() -> None:
    weights = np.array([1.0, 2.0, 5.0, 0.5])
    share, other = alias_table(weights)
    kept = share / 2**32
    chances = kept.copy()
    np.add.at(chances, other, 1.0 - kept)
    np.testing.assert_allclose(chances / 4, weights / weights.sum(), atol=1e-6)
