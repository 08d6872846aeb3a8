"""The plan is inside its memory, and no knob moved by hand makes it better."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyneuron.errors import ConfigError
from polyneuron.planning.cost_model import DENSE, EXACT, PREDICTED
from polyneuron.planning.planner import BATCHES, QUEUE_DEPTHS, Choice, Planner
from tests.support.made_up_device import make_device, make_planner, shape_source, with_predictors

MIB = 1 << 20
SMALL = shape_source("bamboo-7b", 4)
LEAST, ALL_IN = 1400 * MIB, 2400 * MIB
"""Of SMALL with two workers and a context of 1024: between them it cannot be wholly in memory."""


def neighbours(planner: Planner, choice: Choice) -> list[Choice]:
    """The same with one knob a step further."""
    knobs, hot, depths = choice.knobs, choice.hot_clusters, sorted(QUEUE_DEPTHS)
    at, ahead = depths.index(knobs.queue_depth), knobs.is_looking_ahead
    found = [
        planner.choice(choice.budget, hot, depth, ahead)
        for depth in depths[max(0, at - 1) : at + 2]
    ]
    moved = [(knobs.workers + step, hot) for step in (-1, 1)]
    if knobs.mode == PREDICTED:
        found.append(planner.choice(choice.budget, hot, knobs.queue_depth, not ahead))
        moved += [(knobs.workers, hot + step) for step in (-1, 1)]
    for workers, clusters in moved:
        if 1 <= workers <= planner.config.num_workers and 0 <= clusters <= 32:
            budget = planner.budget(knobs.mode, workers, clusters)
            if budget is not None:
                found.append(planner.choice(budget, clusters, knobs.queue_depth, ahead))
    return found


class TestPlan:
    @settings(max_examples=6)
    @given(
        memory=st.integers(LEAST, 2 * ALL_IN), reads=st.floats(3e3, 4e5),
        cpu_ns=st.floats(500, 2e4), cores=st.sampled_from([1, 2, 4]), predicts=st.booleans(),
    )  # fmt: skip
    def test_no_knob_moved_by_hand_gains(
        self, memory: int, reads: float, cpu_ns: float, cores: int, predicts: bool
    ) -> None:
        device = make_device(cores=cores, reads_per_s=reads, cpu_ns=cpu_ns)
        with with_predictors():
            planner = make_planner(memory, SMALL, device, predicts=predicts)
            plan = planner.plan()
            best = plan.chosen.cost.tokens_per_s
            for other in neighbours(planner, plan.chosen):
                assert other.cost.tokens_per_s <= 1.05 * best
        for choice in plan.best_of_mode.values():
            assert choice.cost.tokens_per_s <= 1.05 * best

    @settings(max_examples=6)
    @given(
        memory=st.integers(LEAST, 2 * ALL_IN), more=st.integers(0, ALL_IN), predicts=st.booleans()
    )
    def test_more_memory_is_never_slower(self, memory: int, more: int, predicts: bool) -> None:
        with with_predictors():
            few, many = (
                make_planner(limit, SMALL, predicts=predicts).plan().chosen
                for limit in (memory, memory + more)
            )
        assert many.cost.tokens_per_s >= 0.97 * few.cost.tokens_per_s

    @settings(max_examples=6)
    @given(memory=st.integers(LEAST, 2 * ALL_IN))
    def test_never_above_the_limit(self, memory: int) -> None:
        with with_predictors():
            plan = make_planner(memory, SMALL, predicts=True).plan()
        for choice in [*plan.best_of_mode.values(), *plan.by_batch.values()]:
            assert choice.budget.total_bytes <= memory

    def test_predicted_says_that_it_is_lossy(self) -> None:
        with with_predictors():
            plan = make_planner(3600 * MIB, predicts=True, mode=PREDICTED).plan()
        assert plan.reason().startswith("predicted (lossy): ")
        hot = [choice.hot_clusters for choice in plan.by_batch.values()]
        assert max(hot) <= plan.chosen.budget.residency.pinned_clusters

    def test_files_in_another_order_have_no_hot_part(self) -> None:
        source = shape_source()
        sections = [replace(section, neuron_ids=None) for section in source.manifest.sections]
        manifest = replace(source.manifest, sections=tuple(sections))
        planner = make_planner(3600 * MIB, replace(source, manifest=manifest))
        assert planner.hot_sizes() == [0]
        assert make_planner(3600 * MIB).hot_sizes()[-1] == 32

    def test_predicted_without_predictors_says_where_they_come_from(self) -> None:
        with pytest.raises(ConfigError, match="make them with polyneuron profile"):
            make_planner(3600 * MIB, mode=PREDICTED).plan()

    def test_exact_wins_where_neurons_are_zero(self) -> None:
        plan = make_planner(3600 * MIB).plan()
        assert plan.chosen.knobs.mode == EXACT
        assert set(plan.by_batch) == set(BATCHES)
        assert plan.reason().startswith("exact: ") and "against dense" in plan.reason()

    def test_exact_mode_cannot_look_ahead(self) -> None:
        planner = make_planner(3600 * MIB)
        budget = planner.budget(EXACT, 2)
        assert budget is not None
        ahead, not_ahead = (planner.choice(budget, 0, 32, ahead) for ahead in (True, False))
        assert ahead.cost == not_ahead.cost and not ahead.knobs.is_looking_ahead

    def test_mode_that_was_asked_for_is_kept(self) -> None:
        plan = make_planner(3600 * MIB, mode=DENSE).plan()
        assert plan.chosen.knobs.mode == DENSE
        assert set(plan.best_of_mode) == {DENSE}

    def test_tiles_are_dense(self) -> None:
        plan = make_planner(3 << 30, shape_source("mistral-7b")).plan()
        assert plan.chosen.knobs.mode == DENSE
        assert plan.chosen.cost.bytes_read > 0

    def test_too_little_memory_names_the_least(self) -> None:
        with pytest.raises(ConfigError, match="needs at least"):
            make_planner(300 * MIB).plan()

    @pytest.mark.parametrize("gain, workers", [(2.0, 8), (1.2, 8), (1.005, 4), (0.7, 4)])
    def test_slower_cores_join_only_where_they_gain(self, gain: float, workers: int) -> None:
        """Four fast cores and four slow ones, which together give `gain` of the fast ones."""
        device = make_device(cores=8)
        fast = [replace(r, threads=4, bytes_per_s=r.bytes_per_s / 2) for r in device.kernels]
        both = [
            replace(row, bytes_per_s=row.bytes_per_s / 2 * gain) if row.threads == 8 else row
            for row in device.kernels
        ]
        kernels = (*both, *(row for row, was in zip(fast, device.kernels, strict=True)
                            if was.threads == 8 and was.tokens == 1))  # fmt: skip
        device = replace(device, kernels=kernels)
        planner = make_planner(8 << 30, shape_source("mistral-7b"), device)
        planner = replace(
            planner, config=replace(planner.config, num_workers=4), core_counts=(4, 8)
        )
        assert planner.worker_counts()[0] == 4
        assert planner.plan().chosen.knobs.workers == workers

    def test_many_cores_are_tried_where_kinds_change(self) -> None:
        planner = make_planner(3 << 30)
        planner = replace(
            planner, config=replace(planner.config, num_workers=6), core_counts=(6, 14, 20)
        )
        assert planner.worker_counts() == [6, 20, 19, 14, 10, 5]

    def test_reader_gets_a_core_where_reads_are_dear(self) -> None:
        """Each read costs a core as much as computing does: one worker less is no loss."""
        device = make_device(reads_per_s=4e5, cpu_ns=3e4)
        assert make_planner(3300 * MIB, device=device).plan().chosen.cost.waiting_share > 0.3
