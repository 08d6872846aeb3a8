"""The simulator's costs of a measured device are the planner's, and add up to its steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from polyneuron.planning.cost_model import EXACT, PREDICTED, CostModel, Knobs
from polyneuron.scenarios.device_model import DeviceModel
from polyneuron.scenarios.engine_settings import EngineSettings, Policy
from polyneuron.scenarios.measured_costs import (
    MeasuredCosts,
    engine_traits,
    measured_costs,
    shape_model,
)
from polyneuron.scenarios.script import load_script
from polyneuron.scenarios.simulation import SimulatedRun
from polyneuron.scenarios.step_costs import Conditions, StepCosts
from tests.support.made_up_device import make_device, make_model, shape_source
from tests.support.simulated import shape, write_script

GIB = 1 << 30
SOURCE = shape_source("bamboo-7b", 4)
PS = 1000.0


def costs_of(model: CostModel, knobs: Knobs, batch: int = 1, **now: float) -> MeasuredCosts:
    device = DeviceModel.of_profile(model.device, 8 * GIB)
    traits = engine_traits(Policy.POWERINFER2, knobs.mode, is_looking_ahead=True)
    rows = model.work.rows
    assert rows is not None
    one = replace(shape(), experts=1, neurons=rows.num_neurons, layers=4)
    return MeasuredCosts(
        device, one, traits, Conditions(**now), True, 1 << 32, knobs.queue_depth, model=model,
        knobs=knobs, batch=batch, prices=model.prices(knobs, batch), read_bytes=7168, missed=100.0,
    )  # fmt: skip


def added_up(costs: MeasuredCosts, kv_tokens: int) -> float:
    """A step of neurons that are all there, in ns, with as many of them as the planner counts."""
    model, each = costs.model, costs.cluster_costs(costs.knobs.hot_neurons)
    rows, hotness = model.work.rows, model.hotness
    assert rows is not None
    assert hotness is not None
    hot = costs.knobs.hot_neurons / rows.num_neurons
    is_predicted = costs.knobs.mode == PREDICTED
    rates = model.predictor.asked if is_predicted and model.predictor else hotness
    pairs = costs.batch * rows.num_neurons * rates.needed(1, hot)
    cold = costs.batch * rows.num_neurons * (1 - hot)
    ps = each["predict"] * cold + (each["gate_token"] + each["up_down_token"]) * pairs
    layer = costs.attention_ns(kv_tokens) + each["hot_ns"] + ps / PS / costs.num_cores
    return costs.outside_ns() + model.work.num_layers * layer


class TestOneModel:
    @pytest.mark.parametrize("mode", [EXACT, PREDICTED])
    @pytest.mark.parametrize("cores", [1, 2, 8])
    @pytest.mark.parametrize("hot", [0, 1344])
    def test_parts_add_up_to_the_planners_step(self, mode: str, cores: int, hot: int) -> None:
        model = make_model(SOURCE, make_device(cores=cores), predicts=True)
        hot = hot if mode == PREDICTED else 0
        knobs = Knobs(mode, cores, num_resident=4, hot_neurons=hot, pinned_neurons=14336)
        step = model.step(knobs)
        # The planner adds what its executors wait for each other; clusters are played instead.
        assert added_up(costs_of(model, knobs), model.positions) == pytest.approx(
            step.compute_ns, rel=0.06
        )

    def test_a_batch_costs_what_the_planner_says(self) -> None:
        model = make_model(SOURCE, make_device(), predicts=True)
        knobs = Knobs(PREDICTED, 2, num_resident=4, pinned_neurons=14336)
        step = model.step(knobs, 4)
        found = added_up(costs_of(model, knobs, 4), 4 * model.positions)
        assert found == pytest.approx(step.compute_ns, rel=0.06)

    def test_slow_cores_and_flash_take_longer(self) -> None:
        model = make_model(SOURCE, make_device(), predicts=True)
        knobs = Knobs(PREDICTED, 2, num_resident=4, cold_slots=20_000)
        usual, slow = costs_of(model, knobs), costs_of(model, knobs, cpu=0.5, flash=3.0)
        assert slow.outside_ns() == pytest.approx(2 * usual.outside_ns(), abs=1)
        assert slow.attention_ns(100) == pytest.approx(2 * usual.attention_ns(100), abs=2)
        assert slow.read_ps(7168) == pytest.approx(3 * usual.read_ps(7168), rel=1e-6)
        ratios = [slow.cluster_costs(0)[key] / usual.cluster_costs(0)[key]
                  for key in ("predict", "gate_token", "up_down_token", "miss")]  # fmt: skip
        assert ratios == pytest.approx([2.0] * 4, rel=1e-3)

    def test_reader_takes_of_the_workers_where_it_has_no_core(self) -> None:
        model = make_model(SOURCE, make_device(cores=4), predicts=True)
        knobs = Knobs(PREDICTED, 4, num_resident=4, cold_slots=20_000)
        shared, own = costs_of(model, knobs), costs_of(model, replace(knobs, workers=3))
        read = model.reads_of(8192, 32)
        assert shared.cluster_costs(0)["miss"] == round(model.missed_ns(read.cpu_ns) * PS)
        assert own.cluster_costs(0)["miss"] == 0
        assert own.read_ps(7168) >= shared.read_ps(7168)

    def test_few_reads_do_not_fill_the_queue(self) -> None:
        model = make_model(SOURCE, make_device(), predicts=True)
        many = costs_of(model, Knobs(PREDICTED, 2, num_resident=4, cold_slots=20_000))
        few = replace(many, missed=2.0)
        assert few.read_ps(7168) > many.read_ps(7168)
        alone = model.reads_of(8192, 1).latency_ns
        for costs in (few, many):
            assert costs.latency_ns + costs.read_ps(7168) / PS <= alone + 1


class TestShapes:
    def test_a_shape_has_the_planners_prices_too(self) -> None:
        device = DeviceModel.of_profile(make_device(), 8 * GIB)
        assert device.profile is not None
        settings = EngineSettings(ffn_resident=0.5)
        stated = StepCosts(
            device, shape(), engine_traits(Policy.POWERINFER2, PREDICTED, is_looking_ahead=True),
            Conditions(), False, 1 << 32, 32,
        )  # fmt: skip
        found = measured_costs(stated, settings, 1, 0, None)
        model = shape_model(shape(), device.profile)
        assert found.prices == model.prices(found.knobs)
        assert found.num_cores == device.profile.num_cores

    @pytest.mark.parametrize("policy", list(Policy))
    def test_every_policy_plays_on_a_measured_device(self, tmp_path: Path, policy: Policy) -> None:
        made = load_script(write_script(tmp_path, policy=policy))
        device = DeviceModel.of_profile(make_device(), 8 * GIB)
        figures = SimulatedRun(made, None, device).play()
        assert figures["tokens"] == 24
        assert (figures["decode_tok_s"] or 0) > 0

    def test_better_policies_are_faster_here_too(self, tmp_path: Path) -> None:
        device = DeviceModel.of_profile(make_device(), 8 * GIB)
        rates = []
        for policy in ("bundles", "cache", "pipeline"):
            made = load_script(write_script(tmp_path, policy=policy))
            rates.append(SimulatedRun(made, None, device).play()["decode_tok_s"] or 0)
        assert rates == sorted(rates)
        assert rates[0] < rates[-1]
