"""What a plan expects of a mixture of experts: chosen clusters, long reads, its own memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from polyneuron.config import EngineConfig
from polyneuron.planning.budget import fit
from polyneuron.planning.cost_model import DENSE, CostModel, Knobs, StepCost
from polyneuron.planning.planner import Planner
from polyneuron.planning.source import ModelSource, open_source
from polyneuron.planning.work import model_work
from tests.support.made_up_device import make_device
from tests.support.tiny_gguf import TinyModel, write_tiny_gguf

MODEL = TinyModel(
    d_model=256, d_ff=512, num_experts=8, num_used=2, tied_head=False, tensor_type="Q8_0"
)
CONFIG = EngineConfig(num_ctx=64, num_workers=2, num_npu_threads=0, max_sequences=1)


@pytest.fixture
def source(tmp_path: Path) -> ModelSource:
    return open_source(write_tiny_gguf(tmp_path / "tiny.gguf", MODEL))


def cost(source: ModelSource, slots: int, batch: int = 1) -> StepCost:
    """A decode step with so many slots for clusters; 0: everything is in memory."""
    model = CostModel(model_work(source), make_device(), None)
    knobs = Knobs(DENSE, 2, num_resident=MODEL.num_layers, cold_slots=slots)
    return model.step(knobs, batch)


def kept(source: ModelSource) -> int:
    """Clusters of the whole model."""
    rows = model_work(source).rows
    assert rows is not None
    return MODEL.num_layers * rows.num_neurons // rows.slot_neurons


def test_in_memory_nothing_is_read(source: ModelSource) -> None:
    assert cost(source, 0).bytes_read == 0


def test_an_empty_cache_reads_the_chosen_share(source: ModelSource) -> None:
    almost = cost(source, 1)
    layer_bytes = sum(section.num_bytes for section in source.manifest.sections[1:])
    assert almost.bytes_read == pytest.approx(layer_bytes * 2 / 8, rel=0.02)
    assert almost.reads == pytest.approx(kept(source) * 2 / 8, rel=0.02)


def test_more_slots_read_less(source: ModelSource) -> None:
    total = kept(source)
    costs = [cost(source, total * share // 4) for share in (1, 2, 3, 4)]
    assert [one.hit_rate for one in costs] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    reads = [one.bytes_read for one in costs]
    assert reads == sorted(reads, reverse=True)
    assert reads[-1] == 0


def test_sequences_share_experts(source: ModelSource) -> None:
    alone, together = cost(source, 4), cost(source, 4, batch=4)
    assert alone.bytes_read < together.bytes_read < 4 * alone.bytes_read


def test_plan_of_smooth_experts_is_dense(source: ModelSource) -> None:
    config = replace(CONFIG, ffn_resident=0.5)
    model = CostModel(model_work(source), make_device(), None)
    planner = Planner(source, config, 1 << 34, model, private=lambda _: 0)
    plan = planner.plan()
    assert plan.chosen.knobs.mode == DENSE
    assert 0 < plan.chosen.budget.cold_slots < kept(source)
    assert plan.chosen.budget.total_bytes <= planner.limit_bytes


def test_fewer_sequences_need_less_memory(source: ModelSource) -> None:
    """The least cache holds the experts of one layer that a step may use at once."""
    least = []
    for sequences in (1, 2, 4):
        config = replace(CONFIG, max_sequences=sequences, ffn_resident=0.0)
        least.append(fit(source, config, 1 << 34, 0).cold_slots)
    assert least == [least[0], 2 * least[0], 4 * least[0]]
