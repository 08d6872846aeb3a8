"""Every byte of the arena belongs to one thing, and everything lies inside it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyneuron.config import EngineConfig
from polyneuron.io.ncf_format import LINE_BYTES, Layout
from polyneuron.kernels.arena import HEADER_BYTES, PAGE_BYTES
from polyneuron.kernels.quant import TILE_ROWS, tile_bytes
from polyneuron.model.convert import convert
from polyneuron.planning.attention import SCRATCH_MAX_BYTES, scratch_bytes
from polyneuron.planning.bundles import Residency, RowsAre, spread
from polyneuron.planning.layout import (
    REGIONS,
    ArenaLayout,
    num_executors,
    plan_layout,
)
from polyneuron.planning.source import open_source
from tests.support.families import FAMILY_CASES, gguf_path

CONFIG = EngineConfig(num_ctx=70, num_workers=2, num_npu_threads=1, max_tokens=9, max_sequences=3)
CONFIGS = st.builds(
    EngineConfig,
    num_ctx=st.integers(1, 300),
    num_workers=st.integers(1, 5),
    num_npu_threads=st.integers(0, 5),
    max_tokens=st.integers(4, 600),
    max_sequences=st.integers(1, 4),
    max_requests=st.integers(1, 20),
    max_logit_rows=st.integers(4, 64),
    trace=st.sampled_from([None, "run.jsonl"]),
)


def make_layout(
    case: str = "llama_tied", config: EngineConfig = CONFIG, num_resident: int | None = None
) -> ArenaLayout:
    source = open_source(Path(gguf_path(case)))
    return plan_layout(
        source.manifest,
        source.spec,
        config,
        None if num_resident is None else Residency(num_resident),
    )


def check(layout: ArenaLayout) -> None:
    """Regions fill the arena one after another; parts and weights are disjoint inside theirs."""
    regions = [layout.spans[name] for name in REGIONS]
    assert regions[0].offset == HEADER_BYTES
    assert all(region.offset % PAGE_BYTES == 0 for region in regions)
    for region, after in pairwise(regions):
        assert region.offset + region.num_bytes == after.offset
    assert regions[-1].offset + regions[-1].num_bytes == layout.num_bytes
    parts = sorted(
        (span.offset, span.num_bytes, name)
        for name, span in layout.spans.items()
        if name not in REGIONS
    )
    for (offset, num_bytes, _), (following, *_) in pairwise(parts):
        assert offset + num_bytes <= following
    check_weights(layout)
    for offset, num_bytes, name in parts:
        region = layout.spans[name.split(".")[0]]
        assert region.offset <= offset
        assert offset + num_bytes <= region.offset + region.num_bytes
        assert offset % LINE_BYTES == 0


def check_weights(layout: ArenaLayout) -> None:
    """Weights of a section are disjoint and inside its place; streamed layers share theirs."""
    places = {place.section.name: place for place in layout.sections}
    assert len(places) == len(layout.sections)
    runs = sorted((w.stream_index, w.offset, w.end) for w in layout.weights.values())
    for (index, _, end), (next_index, start, _) in pairwise(runs):
        assert index != next_index or end <= start
    largest = max((place.section.num_bytes for place in layout.streamed), default=0)
    for index, start, end in runs:
        if index:
            stage = layout.spans["stage.0"]
            assert stage.offset <= start and end <= stage.offset + largest
        else:
            regions = [layout.spans["fixed"], layout.spans["hot"]]
            assert any(r.offset <= start and end <= r.offset + r.num_bytes for r in regions)


class TestResidency:
    @pytest.mark.parametrize("num_resident", [0, 1, 2])
    def test_streamed_layers_share_buffers(self, num_resident: int) -> None:
        layout = make_layout(num_resident=num_resident)
        num_layers = FAMILY_CASES["llama_tied"].spec().num_layers
        check(layout)
        assert [p.stream_index for p in layout.streamed] == list(
            range(1, num_layers - num_resident + 1)
        )
        assert (layout.num_buffers > 0) == bool(layout.streamed)
        assert all(place.offset % PAGE_BYTES == 0 for place in layout.sections)

    def test_streamed_layers_are_spread(self) -> None:
        assert spread(8, 4) == [1, 3, 5, 7]
        assert spread(4, 4) == []
        assert spread(3, 0) == [0, 1, 2]

    @pytest.mark.parametrize(
        "residency",
        [Residency(0), Residency(1), Residency(2), Residency(1, 64), Residency(2, 100)],
        ids=str,
    )
    def test_bundles_are_laid_out_apart(self, tmp_path: Path, residency: Residency) -> None:
        path = tmp_path / "bundles.ncf"
        convert(Path(gguf_path("bamboo")), path, layout=Layout.BUNDLES)
        source = open_source(path)
        layout = plan_layout(source.manifest, source.spec, CONFIG, residency)
        check(layout)
        bundles = layout.bundles
        assert bundles is not None
        kinds = Counter(layer.rows_are for layer in bundles.layers)
        kept = RowsAre.CACHED if residency.cold_slots else RowsAre.HOT
        assert kinds[kept] == residency.num_resident
        assert kinds[RowsAre.STREAMED] == 2 - residency.num_resident
        slots = layout.spans["cold.slots"]
        assert slots.num_bytes == residency.cold_slots * bundles.rows.slot_bytes
        assert layout.has_neuron_cache == (residency.cold_slots > 0)


class TestLayout:
    @pytest.mark.parametrize("case", FAMILY_CASES)
    def test_families_are_laid_out_apart(self, case: str) -> None:
        check(make_layout(case))

    @settings(max_examples=50)
    @given(config=CONFIGS)
    def test_any_configuration_is_laid_out_apart(self, config: EngineConfig) -> None:
        check(make_layout(config=config))

    def test_weights_have_room_for_whole_tiles(self) -> None:
        for place in make_layout("qwen2").weights.values():
            if place.storage is None:
                assert place.num_bytes >= 4 * place.cols
            else:
                tiles = -(-place.rows // TILE_ROWS)
                assert place.num_bytes == tiles * tile_bytes(place.storage, place.cols)

    def test_kv_cache_holds_every_slot_full(self) -> None:
        layout = make_layout()
        blocks = -(-CONFIG.num_ctx // 32)
        assert layout.num_kv_blocks == CONFIG.max_sequences * blocks
        spec = FAMILY_CASES["llama_tied"].spec()
        one = 2 * 2 * 32 * spec.head_dim * spec.num_kv_heads
        assert layout.kv_layer_bytes == layout.num_kv_blocks * one
        assert layout.spans["kv.blocks"].num_bytes == spec.num_layers * layout.kv_layer_bytes

    def test_every_executor_has_scratch(self) -> None:
        layout = make_layout()
        spec = FAMILY_CASES["llama_tied"].spec()
        group = spec.num_heads // spec.num_kv_heads
        assert num_executors(CONFIG) == 3
        for index in range(3):
            scratch = layout.spans[f"scratch.{index}"].num_bytes
            assert scratch >= 4 * group * 96
            assert scratch >= 4 * spec.d_model

    def test_short_prompts_take_room_for_their_sums(self, tmp_path: Path) -> None:
        """Of a file in bundles: partial sums of every cluster for every token."""
        convert(Path(gguf_path("bamboo")), tmp_path / "m.ncf", layout=Layout.BUNDLES)
        source, sizes = open_source(tmp_path / "m.ncf"), {}
        for tokens in (None, 0, 2, 48):
            config = replace(CONFIG, max_tokens=64, mode="exact", sparse_prompt_tokens=tokens)
            layout = plan_layout(source.manifest, source.spec, config)
            sizes[tokens] = layout.spans["activations.partials"].num_bytes
        assert sizes[None] == sizes[0] == sizes[2]  # a decode step of max_sequences
        assert sizes[48] == 16 * sizes[None]

    def test_scratch_for_many_tokens_is_bounded(self) -> None:
        """In a long context an executor takes fewer tokens at once, but always one."""
        spec = FAMILY_CASES["llama_tied"].spec()
        for num_ctx in (96, 4096, 1 << 20):
            long = replace(CONFIG, num_ctx=num_ctx, max_tokens=512)
            one = 4 * spec.num_heads // spec.num_kv_heads * num_ctx
            assert one <= scratch_bytes(spec, long) <= max(one, SCRATCH_MAX_BYTES)
        assert scratch_bytes(spec, replace(CONFIG, max_tokens=64)) > 64 * 4 * 96

    def test_trace_takes_room_only_when_on(self) -> None:
        assert make_layout().spans["trace"].num_bytes == 0
        assert make_layout(config=replace(CONFIG, trace="run.jsonl")).spans["trace"].num_bytes > 0

    def test_mailbox_holds_a_context(self) -> None:
        assert make_layout().spans["mailbox.0"].num_bytes >= 4 * CONFIG.num_ctx + 8
