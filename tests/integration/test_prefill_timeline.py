"""What a timeline tells of a long prompt whose layers pass through the stage."""

from __future__ import annotations

import pytest

from polyneuron.io.ncf_format import Layout
from polyneuron.model.convert import convert
from polyneuron.tracing.recording import Step
from tests.bench.prefill import hidden_reads, whole_prompts
from tests.support.engines import LONG_PROMPT, open_engine, write_model

pytestmark = pytest.mark.ray

NUM_PROMPT, CHUNK = 300, 128


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> list[Step]:
    """The whole chunks of a prompt of two and a half, with half of the layers on flash."""
    folder = tmp_path_factory.mktemp("prompt")
    convert(write_model(folder), folder / "tiny.ncf", layout=Layout.TILES)
    timeline = folder / "prompt.jsonl"
    settings = {"max_tokens": CHUNK, "ffn_resident": 0.5, "trace": str(timeline)}
    with open_engine(folder / "tiny.ncf", **settings) as engine:
        engine.generate(LONG_PROMPT[:NUM_PROMPT], max_tokens=2)
    return whole_prompts(timeline, CHUNK)


def test_chunks_are_told(steps: list[Step]) -> None:
    assert [step.tokens for step in steps] == [CHUNK, CHUNK]
    assert {(step.phase, step.graph) for step in steps} == {("prefill", "prefill")}


def test_reads_and_waiting_for_them_are_counted(steps: list[Step]) -> None:
    for step in steps:
        assert step.bytes and step.reads
        assert step.compute_ns and step.stall_ns is not None
        assert 0 <= step.stall_ns <= step.executor_ns


def test_share_that_waits_is_a_share(steps: list[Step]) -> None:
    told = hidden_reads("tiny", [{"other_cores": 0.0}], steps)
    share = float(told.measured.split("%")[0])
    assert 0.0 <= share <= 100.0
    assert share == pytest.approx(
        100 * sum(step.stall_ns or 0 for step in steps) / sum(s.executor_ns for s in steps),
        abs=0.06,
    )
