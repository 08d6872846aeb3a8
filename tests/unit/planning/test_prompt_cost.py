"""Short prompts are read neuron by neuron as far as that is cheaper."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyneuron.config import MAX_SPARSE_TOKENS, EngineConfig
from polyneuron.errors import ConfigError
from polyneuron.planning.cost_model import DENSE, EXACT, PREDICTED, Knobs
from polyneuron.planning.planner import Planner
from polyneuron.planning.prompt_cost import PromptCost
from tests.support.made_up_device import (
    make_device,
    make_model,
    make_planner,
    shape_source,
    with_predictors,
)

MIB = 1 << 20
SOURCE = shape_source()
LAYERS, NEURONS = 32, 14336
STREAM = LAYERS * make_model(SOURCE).work.layer_bytes
KNOBS = Knobs(EXACT, 2, 32, LAYERS, LAYERS * NEURONS // 3)


def cost(**device: Any) -> PromptCost:
    """A 7B with a third of its neurons in the cache."""
    return PromptCost(make_model(SOURCE, make_device(**device)), KNOBS, STREAM)


def tokens_of(planner: Planner) -> int | None:
    return planner.plan().chosen.budget.layout.config.sparse_prompt_tokens


class TestCosts:
    def test_reading_in_order_takes_the_disk_its_time(self) -> None:
        """3.6 GB at 2 GB/s, the first 8 MiB of them before anything is computed."""
        seconds = STREAM / 2e9 + 8 * MIB / 2e9
        assert cost().ordered_ns(1) == pytest.approx(1e9 * seconds)
        assert cost().ordered_ns(16) == cost().ordered_ns(1)

    def test_many_tokens_are_bound_by_kernels(self) -> None:
        fast = cost(bytes_per_s=1e12)
        assert fast.ordered_ns(512) > 4 * fast.ordered_ns(64)
        memory = replace(fast, stream_bytes=0, knobs=replace(KNOBS, cold_slots=0))
        assert memory.ordered_ns(512) < fast.ordered_ns(512)

    def test_dense_adds_every_down_row(self) -> None:
        memory = replace(cost(), stream_bytes=0)
        dense = replace(memory, knobs=replace(KNOBS, mode=DENSE))
        assert dense.ordered_ns(8) > memory.ordered_ns(8)

    def test_models_in_tiles_have_a_cost(self) -> None:
        tiles = make_model(shape_source("mistral-7b", 4))
        found = PromptCost(tiles, Knobs(DENSE, 2, num_resident=4), 0)
        assert 0 < found.ordered_ns(1) < found.ordered_ns(64)


class TestLimit:
    @settings(max_examples=30)
    @given(reads=st.floats(2e3, 4e5), order=st.floats(2e8, 8e9), share=st.floats(0.05, 0.95))
    def test_is_where_the_programs_meet(self, reads: float, order: float, share: float) -> None:
        knobs = replace(KNOBS, cold_slots=int(share * LAYERS * NEURONS))
        found = replace(cost(reads_per_s=reads, bytes_per_s=order), knobs=knobs)
        limit = found.sparse_tokens()
        assert 0 <= limit <= MAX_SPARSE_TOKENS
        if limit:
            assert found.sparse_ns(limit) <= found.ordered_ns(limit)
        if limit < MAX_SPARSE_TOKENS:
            assert found.sparse_ns(limit + 1) > found.ordered_ns(limit + 1)

    def test_follows_the_device_and_the_memory(self) -> None:
        usual = cost().sparse_tokens()
        assert 1 < usual < MAX_SPARSE_TOKENS
        assert cost(reads_per_s=2e5).sparse_tokens() > usual
        assert cost(bytes_per_s=8e9).sparse_tokens() < usual
        assert cost(reads_per_s=1e3).sparse_tokens() == 0
        more = replace(KNOBS, cold_slots=LAYERS * NEURONS * 2 // 3)
        assert replace(cost(), knobs=more).sparse_tokens() > usual


class TestPlanned:
    def test_plan_has_room_for_it_inside_its_budget(self) -> None:
        planner = make_planner(3400 * MIB, mode=EXACT)
        chosen = planner.plan().chosen
        config = chosen.budget.layout.config
        limit = PromptCost(planner.model, chosen.knobs, chosen.budget.prompt_bytes).sparse_tokens()
        assert config.sparse_prompt_tokens is not None
        assert abs(config.sparse_prompt_tokens - limit) <= 1  # chosen before its sums had room
        assert chosen.budget.total_bytes <= 3400 * MIB
        sums = chosen.budget.layout.spans["activations.partials"].num_bytes
        assert sums == config.decode_tokens * 32 * 4096 * 4

    def test_what_the_user_says_stays(self) -> None:
        assert tokens_of(make_planner(3400 * MIB, mode=EXACT, sparse_prompt_tokens=3)) == 3

    def test_tiles_experts_and_predictions_have_no_choice(self) -> None:
        assert tokens_of(make_planner(6000 * MIB, shape_source("mistral-7b", 4))) is None
        with with_predictors():
            assert tokens_of(make_planner(3400 * MIB, predicts=True, mode=PREDICTED)) is None


class TestConfig:
    @pytest.mark.parametrize("value", [-1, 65, True, 1.5])
    def test_other_values_are_refused(self, value: object) -> None:
        with pytest.raises(ConfigError, match=r"sparse_prompt_tokens is .*: must be .* 0 to 64"):
            EngineConfig(sparse_prompt_tokens=value)  # type: ignore[arg-type]

    def test_a_chunk_bounds_it(self) -> None:
        config = EngineConfig(max_sequences=2, max_tokens=16, sparse_prompt_tokens=40)
        assert (config.sparse_tokens, config.decode_tokens) == (16, 16)
        assert replace(config, mode=PREDICTED).sparse_tokens == 1
        assert replace(config, sparse_prompt_tokens=None).sparse_tokens == 2
        assert replace(config, sparse_prompt_tokens=0).decode_tokens == 2
