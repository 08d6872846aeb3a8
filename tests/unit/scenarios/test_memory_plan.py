"""What a budget buys, and which neurons are hot."""

from dataclasses import replace

import pytest

from polyneuron.errors import ConfigError
from polyneuron.scenarios.engine_settings import EngineSettings, Policy
from polyneuron.scenarios.memory_plan import MAX_HOT_SHARE, choose_hot, plan_memory
from polyneuron.scenarios.step_costs import TRAITS, Conditions, StepCosts
from tests.support.simulated import device, shape

GIB = 1 << 30
SETTINGS = EngineSettings(num_ctx=512, max_sequences=1)


def costs(policy: Policy = Policy.POWERINFER2, is_resident: bool = True) -> StepCosts:
    return StepCosts(
        device(), shape(), TRAITS[policy], Conditions(), is_resident, 1 << 32, 32
    )  # fmt: skip


class TestPlanMemory:
    def test_seven_gib_leave_mixtral_the_papers_cache(self) -> None:
        settings = replace(SETTINGS, memory_bytes=7 * GIB)
        model = shape("turbosparse-mixtral-47b")
        plan = plan_memory(settings, model, 0, "here")
        # PAPER 3.4: 400 MB, 1.8 % of the weights.
        assert plan.slots * model.slot == pytest.approx(0.4 * GIB, rel=0.25)
        assert plan.slots / model.total_neurons == pytest.approx(0.018, rel=0.25)

    @pytest.mark.parametrize("gib", [8, 11, 19])
    def test_plan_keeps_to_its_budget(self, gib: int) -> None:
        settings = replace(SETTINGS, memory_bytes=gib * GIB)
        plan = plan_memory(settings, shape("turbosparse-mixtral-47b"), 0, "here")
        assert 0.99 * gib * GIB < plan.used_bytes <= gib * GIB

    def test_share_is_of_neurons(self) -> None:
        model = shape()
        plan = plan_memory(replace(SETTINGS, ffn_resident=0.5), model, 0, "here")
        assert plan.slots == model.total_neurons // 2 and not plan.is_resident
        assert plan_memory(replace(SETTINGS, ffn_resident=1.0), model, 0, "here").is_resident

    def test_too_little_is_refused_with_the_least(self) -> None:
        with pytest.raises(ConfigError, match=r"needs \d+(\.\d+)? [MG]iB"):
            plan_memory(replace(SETTINGS, memory_bytes=GIB // 2), shape(), 0, "here")


class TestChooseHot:
    def test_larger_batches_have_more_hot_neurons(self) -> None:
        model = shape()
        hot = [choose_hot(costs(), model.total_neurons, batch, 512) for batch in (1, 2, 3, 4)]
        assert hot == sorted(hot) and hot[0] < hot[-1] <= model.neurons

    def test_hot_neurons_leave_slots_for_cold_ones(self) -> None:
        model = shape()
        for slots in (0, model.total_neurons // 8, model.total_neurons // 2):
            hot = choose_hot(costs(is_resident=False), slots, 4, 512)
            assert hot * model.units <= MAX_HOT_SHARE * slots

    def test_no_npu_no_hot_neurons(self) -> None:
        assert choose_hot(costs(Policy.PIPELINE), shape().total_neurons, 1, 512) == 0
        lost = replace(costs(), now=Conditions(has_npu=False))
        assert choose_hot(lost, shape().total_neurons, 1, 512) == 0
