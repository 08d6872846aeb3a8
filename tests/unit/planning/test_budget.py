"""A model fitted into a budget: inside it, and with as many layers as fit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyneuron.config import EngineConfig
from polyneuron.errors import ConfigError
from polyneuron.io.ncf_format import Layout
from polyneuron.kernels.arena import MAX_EXECUTORS
from polyneuron.planning.budget import OPENVINO_BYTES, fit, private_estimate, resolve_config
from polyneuron.planning.bundles import Residency
from polyneuron.planning.layout import plan_layout
from polyneuron.planning.source import ModelSource, open_source
from tests.support.families import gguf_path
from tests.support.tiny_gguf import TinyModel, write_tiny_gguf

CONFIG = EngineConfig(num_ctx=64, num_workers=2, num_npu_threads=1, max_tokens=8)
PRIVATE = 1 << 20
GIB = 1 << 30


def make_source() -> ModelSource:
    return open_source(Path(gguf_path("llama_tied")))


def arena_bytes(num_resident: int) -> int:
    source = make_source()
    return plan_layout(source.manifest, source.spec, CONFIG, Residency(num_resident)).num_bytes


class TestFit:
    def test_everything_stays_when_it_fits(self) -> None:
        budget = fit(make_source(), CONFIG, GIB, PRIVATE)
        assert budget.num_resident == budget.num_layers
        assert (budget.streamed_bytes, budget.resident_ffn_fraction) == (0, 1.0)

    @given(limit=st.integers(PRIVATE, 8 << 20))
    def test_never_above_the_limit(self, limit: int) -> None:
        try:
            budget = fit(make_source(), CONFIG, limit, PRIVATE)
        except ConfigError:
            least = arena_bytes(0) + PRIVATE
            assert limit < least / 0.98 + (1 << 20)
            return
        assert budget.total_bytes <= limit
        more = budget.num_resident + 1
        if more <= budget.num_layers:
            assert arena_bytes(more) + PRIVATE > limit * 0.98 - 1

    def test_minimum_is_named_and_enough(self) -> None:
        with pytest.raises(ConfigError, match="at least") as refusal:
            fit(make_source(), CONFIG, PRIVATE, PRIVATE)
        named = int(str(refusal.value).split("at least ")[1].split(" MiB")[0])
        fit(make_source(), CONFIG, (named + 1) << 20, PRIVATE)

    @pytest.mark.parametrize("layout", list(Layout))
    @pytest.mark.parametrize("num_layers", [1, 2])
    @pytest.mark.parametrize("share", [None, 0.0, 1.0])
    def test_minimum_of_few_layers_is_the_least_that_fits(
        self, tmp_path: Path, num_layers: int, share: float | None, layout: Layout
    ) -> None:
        """Whole in memory they take less than the stage buffers they would pass through."""
        model = TinyModel(
            family="bamboo", num_layers=num_layers, d_model=256, d_ff=8192, tensor_type="Q8_0"
        )
        source = open_source(write_tiny_gguf(tmp_path / "few.gguf", model), layout)
        config = replace(CONFIG, ffn_resident=share)
        with pytest.raises(ConfigError, match="at least") as refusal:
            fit(source, config, PRIVATE, PRIVATE)
        named = int(str(refusal.value).split("at least ")[1].split(" MiB")[0])
        assert fit(source, config, (named + 1) << 20, PRIVATE).residency.cold_slots == 0
        with pytest.raises(ConfigError, match="at least"):
            fit(source, config, (named - 2) << 20, PRIVATE)

    @pytest.mark.parametrize("share", [-0.1, 1.5, float("nan")])
    def test_impossible_share_is_refused(self, share: float) -> None:
        with pytest.raises(ConfigError, match="ffn_resident"):
            replace(CONFIG, ffn_resident=share)

    def test_share_lowers_the_number_of_layers(self) -> None:
        budget = fit(make_source(), replace(CONFIG, ffn_resident=0.5), GIB, PRIVATE)
        assert budget.num_resident == round(budget.num_layers / 2)
        assert budget.streamed_bytes > 0

    def test_table_adds_up_to_the_limit(self) -> None:
        for share in (None, 0.0):
            budget = fit(make_source(), replace(CONFIG, ffn_resident=share), GIB, PRIVATE)
            assert sum(num_bytes for _, num_bytes in budget.rows()) == GIB

    def test_private_memory_grows_with_workers(self) -> None:
        assert private_estimate(replace(CONFIG, num_workers=8)) > private_estimate(CONFIG)


class TestResolveConfig:
    def test_graphs_of_a_back_end_come_on_top(self) -> None:
        plain, openvino = EngineConfig(), EngineConfig(npu="openvino")
        for measured in (0, 1 << 40):
            more = private_estimate(openvino, measured) - private_estimate(plain, measured)
            assert more == OPENVINO_BYTES
        assert private_estimate(plain, 1 << 40) == 1 << 40

    def test_context_beyond_the_models_is_refused(self) -> None:
        spec = make_source().spec
        with pytest.raises(ConfigError, match=str(spec.context_length)):
            resolve_config(EngineConfig(num_ctx=spec.context_length + 1), spec)

    def test_more_executors_than_places_are_refused(self) -> None:
        with pytest.raises(ConfigError, match=str(MAX_EXECUTORS)):
            resolve_config(EngineConfig(num_workers=MAX_EXECUTORS + 1), make_source().spec)

    def test_automatic_values_are_filled_in(self) -> None:
        config = resolve_config(EngineConfig(), make_source().spec)
        assert config.num_ctx > 0 and config.num_workers > 0 and config.num_npu_threads >= 0
