"""Mixtures of experts on actors: one result wherever they lie, in every mode, and after losses."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from polyneuron.config import FeedForwardMode
from polyneuron.model.convert import convert
from tests.support.engines import GREEDY, MODEL, PROMPT, open_engine
from tests.support.predictors import write_oracle
from tests.support.tiny_gguf import write_tiny_gguf

pytestmark = pytest.mark.ray

EXACT, PREDICTED = FeedForwardMode.EXACT, FeedForwardMode.PREDICTED


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """dReLU experts in bundles, perfect predictors beside them."""
    model = replace(
        MODEL, family="turbosparsemixtral", num_experts=8, num_used=2, d_ff=160,
        tensor_type="Q4_0", tied_head=False,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("experts")
    convert(write_tiny_gguf(folder / "experts.gguf", model), folder / "experts.ncf")
    write_oracle(folder / "experts.ncf")
    return folder / "experts.ncf"


def result(path: Path, **settings: object) -> tuple[list[int], str | None]:
    with open_engine(path, max_sequences=1, **settings) as engine:
        answer = engine.generate(PROMPT, max_tokens=8, sampling=GREEDY, ignore_eos=True)
        return answer.tokens, answer.logits_sha256


def test_one_result_in_every_mode(experts: Path) -> None:
    """Whole experts cached, or the neurons that predictors name."""
    resident = result(experts, mode=EXACT)
    assert result(experts, mode=EXACT, ffn_resident=0.3) == resident
    assert result(experts, mode=PREDICTED, ffn_resident=0.3) == resident


def test_a_lost_reader_changes_no_token(experts: Path) -> None:
    with open_engine(experts, mode=PREDICTED, ffn_resident=0.3, max_sequences=1) as engine:
        first = engine.generate(PROMPT, max_tokens=8, sampling=GREEDY)
        os.kill(engine.actors.pids["I/O actor"], signal.SIGKILL)
        again = engine.generate(PROMPT, max_tokens=8, sampling=GREEDY)
        assert (again.tokens, again.logits_sha256) == (first.tokens, first.logits_sha256)
