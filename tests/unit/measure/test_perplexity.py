"""Perplexity: llama-perplexity's way of counting, on known numbers and on a tiny model."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyneuron.errors import ConfigError
from polyneuron.measure.perplexity import Perplexity, chunks_of, measure
from tests.support.local_engine import LocalEngine
from tests.support.reference_model import ReferenceModel
from tests.support.tiny_gguf import TinyModel, write_tiny_gguf


def test_uniform_guess_gives_the_number_of_choices() -> None:
    total = Perplexity()
    total.add([math.log(1 / 50)] * 7)
    total.add([math.log(1 / 50)] * 3)
    assert total.ppl == pytest.approx(50)
    assert total.stderr == pytest.approx(0, abs=1e-5)
    assert (total.num_chunks, total.num_tokens) == (2, 10)


@given(st.lists(st.floats(-20, 0), min_size=2, max_size=50))
def test_standard_error_is_that_of_the_mean(log_probs: list[float]) -> None:
    total = Perplexity()
    total.add(log_probs)
    error_of_mean = np.std(log_probs, ddof=1) / math.sqrt(len(log_probs))
    assert total.stderr == pytest.approx(total.ppl * error_of_mean, rel=1e-4, abs=1e-4 * total.ppl)


def test_nothing_is_claimed_of_one_token_or_past_all_bounds() -> None:
    total = Perplexity()
    total.add([-1e6])
    assert total.stderr is None
    assert total.ppl == math.inf


def test_chunks_do_not_overlap_and_begin_with_bos() -> None:
    tokens = list(range(100, 131))
    assert chunks_of(tokens, 10, None) == [tokens[:10], tokens[10:20], tokens[20:30]]
    with_bos = chunks_of(tokens, 10, 1)
    assert with_bos == [[1, *tokens[n + 1 : n + 10]] for n in (0, 10, 20)]
    assert tokens == list(range(100, 131))


@pytest.mark.parametrize(("num_tokens", "num_ctx"), [(19, 10), (0, 4), (1023, 512)])
def test_short_text_is_refused_with_both_numbers(num_tokens: int, num_ctx: int) -> None:
    with pytest.raises(ConfigError, match=rf"{num_tokens} tokens.*at least {2 * num_ctx}"):
        chunks_of([5] * num_tokens, num_ctx, None)
    assert len(chunks_of([5] * (2 * num_ctx), num_ctx, None)) == 2


def test_context_without_a_second_half_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"-c 3.*at least 4"):
        chunks_of([5] * 100, 3, None)


@given(st.integers(4, 40))
def test_second_half_is_scored(num_ctx: int) -> None:
    asked: list[int] = []

    def score(tokens: Sequence[int], first: int) -> list[float]:
        asked.append(first)
        return [-1.0] * (len(tokens) - 1 - first)

    *_, total = measure(score, chunks_of(list(range(3 * num_ctx)), num_ctx, None))
    assert asked == [num_ctx // 2] * 3  # llama-perplexity: positions n_ctx/2 .. n_ctx-2 predict
    assert total.num_tokens == 3 * (num_ctx - num_ctx // 2 - 1)


@pytest.mark.parametrize("max_logit_rows", [1, 7, 64])
def test_tiny_model_matches_the_reference(tmp_path: Path, max_logit_rows: int) -> None:
    model = TinyModel(tensor_type="F32", embedding_type="F32")
    path = write_tiny_gguf(tmp_path / "tiny.gguf", model)
    rng = np.random.default_rng(5)
    tokens = rng.integers(3, len(model.vocabulary.tokens), 150).tolist()
    chunks = chunks_of(tokens, 48, 1)
    # Chunks of 20 tokens: a scored position may lie in any of several prefill steps.
    with LocalEngine(path, max_tokens=64, max_logit_rows=max_logit_rows) as engine:
        *_, total = measure(engine.score, chunks)
        scores = engine.score(chunks[0], 24)
    reference = ReferenceModel(path)
    expected = [_log_probs(reference, chunk)[24:] for chunk in chunks]
    np.testing.assert_allclose(scores, expected[0], atol=0.03)  # keys and values are f16
    mean = float(np.mean(np.concatenate(expected)))
    assert total.ppl == pytest.approx(math.exp(-mean), rel=5e-3)
    assert (total.num_chunks, total.num_tokens) == (3, 3 * 23)


def _log_probs(reference: ReferenceModel, tokens: list[int]) -> list[float]:
    """Log-probability of each token from the second on."""
    logits = reference.logits(np.array(tokens))
    rows = logits - logits.max(axis=-1, keepdims=True)
    rows = rows - np.log(np.exp(rows).sum(axis=-1, keepdims=True))
    return [float(rows[i, tokens[i + 1]]) for i in range(len(tokens) - 1)]
