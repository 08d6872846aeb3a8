"""Requests together: whoever comes, goes or shares a prompt meanwhile, each gets its own bits."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyneuron.actors.messages import SubmitRequest
from polyneuron.config import Phase
from polyneuron.io.ncf_format import Layout
from polyneuron.io.predictor_file import PredictorInput
from polyneuron.model.convert import convert
from polyneuron.model.sampling import SamplingParams
from tests.support.local_engine import GREEDY, LocalEngine, LocalResult
from tests.support.predictors import write_random
from tests.support.tiny_gguf import TinyModel, write_tiny_gguf

CHUNK = 16
END_IDS = list(range(0, 290, 12))
"""Many, so that drawn answers end at different lengths."""
DRAWN = SamplingParams(temperature=2.0, top_k=0, top_p=1.0, min_p=0.0, seed=5)
SHAPE = {"d_model": 96, "num_heads": 6, "num_kv_heads": 2, "head_dim": 32, "d_ff": 160}
MODELS = {
    "tiles": TinyModel(**SHAPE, tensor_type="Q4_1", embedding_type="Q8_0"),
    "exact": TinyModel(**SHAPE, family="bamboo", num_layers=3, tensor_type="Q4_0"),
    "predicted": TinyModel(**SHAPE, family="bamboo", tensor_type="Q8_0"),
}


@pytest.fixture(scope="module", params=MODELS)
def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LocalEngine]:
    """In memory, and with half of the neurons read as they are needed, or as some are guessed."""
    path: Path = tmp_path_factory.mktemp("model") / "model.gguf"
    write_tiny_gguf(path, MODELS[request.param])
    settings = {"num_ctx": 192, "max_tokens": CHUNK, "max_sequences": 4}
    if request.param != "tiles":
        convert(path, path.with_suffix(".ncf"), layout=Layout.BUNDLES)
        path = path.with_suffix(".ncf")
        settings |= {"ffn_resident": 0.5, "mode": request.param}
    if request.param == "predicted":
        write_random(path, input=PredictorInput.FFN, rank=32, share=0.3)
    with LocalEngine(path, **settings) as opened:
        yield opened


def prompt_of(length: int, first: int = 3) -> list[int]:
    return [3 + (first + i * 7) % 285 for i in range(length)]


def bits(result: LocalResult) -> tuple[list[int], str, list[bytes], list[float]]:
    rows = [row.tobytes() for row in result.logits]
    return result.tokens, result.finish_reason, rows, result.scores


def alone(engine: LocalEngine, request: SubmitRequest) -> LocalResult:
    """What the same request gets when nobody else is there."""
    sampling = SamplingParams(**request.sampling)
    return engine.generate(
        request.prompt, request.max_tokens, sampling=sampling, end_ids=request.end_ids,
        score_answer=request.score_answer,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Arrival:
    """A group of candidates and the step before which it comes."""

    step: int
    prompt_length: int
    limits: tuple[int, ...]
    seed: int


ARRIVALS = st.lists(
    st.builds(
        Arrival,
        step=st.integers(0, 30),
        prompt_length=st.sampled_from([1, 2, 15, 16, 31, 32, 33, 64, 75, 130]),
        limits=st.lists(st.integers(1, 25), min_size=1, max_size=4).map(tuple),
        seed=st.integers(0, 5),
    ),
    min_size=1,
    max_size=6,
)


class TestSameBits:
    @settings(max_examples=12)
    @given(arrivals=ARRIVALS)
    def test_company_changes_nothing(self, engine: LocalEngine, arrivals: list[Arrival]) -> None:
        """Requests and candidates that come and end at any time, several prompts in the queue."""
        groups = [
            (
                one.step,
                engine.candidates(
                    prompt_of(one.prompt_length, one.seed),
                    one.limits,
                    sampling=SamplingParams(temperature=2.0, top_k=0, min_p=0.0, seed=one.seed),
                    end_ids=END_IDS,
                    score_answer=len(one.limits) > 1,
                ),
            )
            for one in arrivals
        ]
        together = engine.run_arriving(groups)
        requests = [request for _, group in groups for request in group]
        for request, result in zip(requests, together, strict=True):
            assert bits(result) == bits(alone(engine, request))

    @pytest.mark.parametrize("length", [1, 16, 31, 32, 33, 64, 70])
    def test_candidates_equal_requests_of_their_own(self, engine: LocalEngine, length: int) -> None:
        """The prompt computed once, whatever of its last block is shared or copied."""
        group = engine.candidates(prompt_of(length), [20, 9, 14, 1], sampling=DRAWN)
        first = len(engine.plans)
        results = engine.run_arriving([(0, group)])
        plans = engine.plans[first:]
        assert sum(len(p.rows) for p in plans if p.phase is Phase.PREFILL) == length
        assert [bits(r) for r in results] == [bits(alone(engine, each)) for each in group]
        assert len({tuple(r.tokens) for r in results}) == 4

    def test_equal_seeds_draw_equal_answers(self, engine: LocalEngine) -> None:
        """Greedy candidates are all alike, and the i-th drawn one is what seed + i gives."""
        (one, other) = engine.run_arriving([(0, engine.candidates(prompt_of(40), [12, 12]))])
        assert bits(one) == bits(other)
        drawn = engine.run_arriving([(0, engine.candidates([5], [12] * 3, sampling=DRAWN))])
        sampling = SamplingParams(temperature=2.0, top_k=0, top_p=1.0, min_p=0.0, seed=7)
        assert drawn[2].tokens == engine.generate([5], 12, sampling=sampling).tokens

    @pytest.mark.parametrize("step", [0, 1, 3, 5, 6, 9])
    def test_cancelled_candidate_leaves_the_others(self, engine: LocalEngine, step: int) -> None:
        """Also the one that computes the prompt: another goes on with it."""
        group = engine.candidates(prompt_of(75), [8, 8, 8], sampling=DRAWN)
        first, *others = engine.run_arriving([(0, group)], [(step, group[0])])
        assert [bits(r) for r in others] == [bits(alone(engine, each)) for each in group[1:]]
        assert first.finish_reason == "cancelled"
        assert first.tokens == alone(engine, group[0]).tokens[: len(first.tokens)]

    def test_scores_are_the_tokens_log_probabilities(self, engine: LocalEngine) -> None:
        prompt = prompt_of(33)
        for result in engine.run_arriving(
            [(0, engine.candidates(prompt, [9, 5], sampling=DRAWN, score_answer=True))]
        ):
            rows = np.stack(result.logits).astype(np.float64)
            chosen = rows[np.arange(len(rows)), result.tokens]
            expected = chosen - np.logaddexp.reduce(rows, axis=1)
            np.testing.assert_allclose(result.scores, expected, atol=1e-9)


class TestTurns:
    def test_long_prompt_stalls_nobody(self, engine: LocalEngine) -> None:
        """Between two chunks of it, everybody who answers gets a token."""
        short = engine.request(prompt_of(5), 40)
        long = engine.request(prompt_of(150), 3)
        first = len(engine.plans)
        results = engine.run_arriving([(0, [short]), (4, [long])])
        phases = [plan.phase for plan in engine.plans[first:]]
        chunks = [i for i, phase in enumerate(phases) if phase is Phase.PREFILL]
        assert len(chunks) == 1 + -(-150 // CHUNK)
        assert all(later - earlier == 2 for earlier, later in itertools.pairwise(chunks[1:]))
        assert [bits(r) for r in results] == [bits(alone(engine, r)) for r in (short, long)]

    def test_batch_sizes_are_told(self, engine: LocalEngine) -> None:
        """By the token whose step had another size than the one before."""
        group = engine.candidates(prompt_of(40), [3, 5, 9, 9], sampling=GREEDY)
        results = engine.run_arriving([(0, group)])
        assert [r.batch_sizes for r in results] == [
            [(1, 4)],
            [(1, 4), (3, 3)],
            [(1, 4), (3, 3), (5, 2)],
            [(1, 4), (3, 3), (5, 2)],
        ]
