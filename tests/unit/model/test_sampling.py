"""The sampler against a plain reference, its neutral values, and what its choice depends on."""

import math
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from polyneuron.errors import ConfigError, EngineError
from polyneuron.model.sampling import (
    SETTINGS,
    Sampler,
    SamplingParams,
    log_probabilities,
    log_probability,
)

F32 = NDArray[np.float32]
OFF = SamplingParams(top_k=0, top_p=1.0, min_p=0.0, temperature=1.0, seed=1)
GREEDY = SamplingParams(temperature=0.0)

LOGITS = st.lists(
    st.integers(-64, 64).map(lambda n: n / 8), min_size=1, max_size=40
).map(lambda values: np.array(values, np.float32))  # fmt: skip
PARAMS = st.builds(
    SamplingParams,
    repeat_last_n=st.sampled_from([-1, 0, 3, 64]),
    repeat_penalty=st.sampled_from([1.0, 1.3, 0.7]),
    frequency_penalty=st.sampled_from([0.0, 0.5]),
    presence_penalty=st.sampled_from([0.0, -0.25]),
    top_k=st.sampled_from([-1, 0, 1, 5, 40]),
    typical_p=st.sampled_from([1.0, 0.9, 0.3]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    temperature=st.sampled_from([-1.0, 0.0, 0.3, 0.8, 2.0]),
    seed=st.integers(0, 5),
)


def _reference_penalised(params: SamplingParams, recent: list[int], logits: F32) -> F32:
    window = recent if params.repeat_last_n < 0 else recent[-params.repeat_last_n :]
    window = window if params.repeat_last_n else []
    out = logits.copy()
    for token in set(window):
        factor = np.float32(params.repeat_penalty)
        out[token] = out[token] * factor if out[token] <= 0 else out[token] / factor
        out[token] -= np.float32(window.count(token)) * np.float32(params.frequency_penalty)
        out[token] -= np.float32(params.presence_penalty)
    return out


def _reference_kept(params: SamplingParams, logits: F32) -> list[tuple[int, float]]:
    """Tokens a draw may choose and their logits, by the definition of each step."""
    kept = sorted(((i, float(v)) for i, v in enumerate(logits)), key=lambda c: (-c[1], c[0]))
    kept = kept[: params.top_k] if params.top_k > 0 else kept
    if params.typical_p < 1:
        shares = _shares(kept, 1.0)
        entropy = -sum(p * math.log(p) for p in shares)
        order = sorted(range(len(kept)), key=lambda i: (abs(-math.log(shares[i]) - entropy), i))
        kept = [kept[i] for i in sorted(_until(order, shares, params.typical_p, strict=True))]
    if params.top_p < 1:
        shares = _shares(kept, 1.0)
        kept = [kept[i] for i in _until(range(len(kept)), shares, params.top_p, strict=False)]
    if params.min_p > 0:
        kept = [c for c in kept if c[1] >= kept[0][1] + math.log(params.min_p)]
    return kept


def _shares(kept: list[tuple[int, float]], temperature: float) -> list[float]:
    weights = [math.exp((value - kept[0][1]) / temperature) for _, value in kept]
    return [weight / sum(weights) for weight in weights]


def _until(order: Any, shares: list[float], limit: float, strict: bool) -> list[int]:
    taken, mass = [], 0.0
    for i in order:
        taken.append(i)
        mass += shares[i]
        if mass > limit or (not strict and mass >= limit):
            break
    return taken


class TestChain:
    @given(PARAMS, LOGITS, st.data())
    def test_choice_is_the_references(self, params: SamplingParams, logits: F32, data: Any) -> None:
        token = st.integers(0, logits.size - 1)
        recent = data.draw(st.lists(token, max_size=8))
        chosen = Sampler(params, recent).sample(logits)
        penalised = _reference_penalised(params, recent, logits)
        if params.temperature <= 0:
            assert chosen == int(np.argmax(penalised))
            return
        kept = _reference_kept(params, penalised)
        # A sum that meets a limit exactly may fall to either side: compare where it does not.
        wider = _reference_kept(_nudged(params, 1e-9), penalised)
        narrower = _reference_kept(_nudged(params, -1e-9), penalised)
        if kept == wider == narrower:
            draw = np.random.Generator(np.random.PCG64(params.seed)).random()
            mass = np.cumsum(_shares(kept, params.temperature))
            close = np.abs(mass - draw).min() < 1e-9
            assert close or chosen == kept[int(np.searchsorted(mass, draw, side="right"))][0]
        assert chosen in [token_id for token_id, _ in wider]

    def test_shares_of_many_draws_are_the_probabilities(self) -> None:
        logits = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))
        sampler = Sampler(replace(OFF, min_p=0.2, temperature=2.0), [])
        counts = np.bincount([sampler.sample(logits) for _ in range(4000)], minlength=4)
        weights = np.sqrt([0.5, 0.3, 0.15, 0.0])  # temperature 2; min-p leaves out the last
        assert np.abs(counts / 4000 - weights / weights.sum()).max() < 0.03

    def test_logits_stay_as_they_are(self) -> None:
        logits = np.array([1, 2, 3], np.float32)
        logits.flags.writeable = False
        Sampler(SamplingParams(repeat_penalty=2.0, seed=1), [0, 1, 2]).sample(logits)
        assert logits.tolist() == [1, 2, 3]

    def test_penalty_counts_chosen_tokens_too(self) -> None:
        sampler = Sampler(replace(GREEDY, presence_penalty=5.0), [])
        logits = np.array([3, 2, 1], np.float32)
        assert [sampler.sample(logits) for _ in range(4)] == [0, 1, 2, 0]

    def test_penalty_forgets_after_the_window(self) -> None:
        sampler = Sampler(replace(GREEDY, presence_penalty=5.0, repeat_last_n=1), [])
        logits = np.array([3, 2, 1], np.float32)
        assert [sampler.sample(logits) for _ in range(4)] == [0, 1, 0, 1]


def _nudged(params: SamplingParams, step: float) -> SamplingParams:
    """The same with slightly higher or lower limits, neutral ones excepted."""
    typical_p = params.typical_p if params.typical_p == 1 else params.typical_p + step
    top_p = params.top_p if params.top_p in (0, 1) else params.top_p + step
    min_p = params.min_p if params.min_p in (0, 1) else params.min_p * (1 - step)
    return replace(params, typical_p=typical_p, top_p=top_p, min_p=min_p)


class TestGreedy:
    @pytest.mark.parametrize("temperature", [0.0, -0.5])
    def test_lowest_id_wins_among_equals(self, temperature: float) -> None:
        params = SamplingParams(temperature=temperature)
        assert Sampler(params, []).sample(np.array([1, 7, 7, 2], np.float32)) == 1

    def test_seed_does_not_matter(self) -> None:
        logits = np.random.default_rng(3).normal(size=1000).astype(np.float32)
        picks = {Sampler(replace(GREEDY, seed=seed), []).sample(logits) for seed in (-1, 0, 9)}
        assert picks == {int(np.argmax(logits))}


class TestNeutralValues:
    def test_defaults_are_those_of_llama_cpp(self) -> None:
        defaults = {field.name: field.default for field in fields(SamplingParams)}
        assert defaults == {
            "repeat_last_n": 64,
            "repeat_penalty": 1.0,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            "top_k": 40,
            "typical_p": 1.0,
            "top_p": 0.95,
            "min_p": 0.05,
            "temperature": 0.8,
            "seed": -1,
        }
        assert set(SETTINGS) == set(defaults)

    @given(PARAMS, LOGITS)
    def test_neutral_step_leaves_every_token(self, params: SamplingParams, logits: F32) -> None:
        """With all steps neutral each token can be drawn, whatever the others' limits would do."""
        neutral: dict[str, Any] = {
            name: type(getattr(params, name))(setting.neutral)
            for name, setting in SETTINGS.items()
            if name not in ("seed", "temperature")
        }
        sampler = Sampler(SamplingParams(**neutral, temperature=1e6, seed=params.seed), [0] * 9)
        drawn = {sampler.sample(logits) for _ in range(40 * logits.size)}
        assert len(drawn) == logits.size

    @given(LOGITS, st.sampled_from([("top_k", 0), ("top_k", -1), ("top_p", 1.0), ("min_p", 0.0),
                                    ("typical_p", 1.0), ("repeat_last_n", 0)]))  # fmt: skip
    def test_neutral_value_equals_no_limit(self, logits: F32, neutral: tuple[str, Any]) -> None:
        loose: dict[str, Any] = {
            "top_k": 10_000,
            "top_p": 1.0,
            "min_p": 0.0,
            "typical_p": 1.0,
            "repeat_last_n": 1,
        }
        name, value = neutral
        first = Sampler(replace(OFF, **{name: loose[name]}), [0])
        second = Sampler(replace(OFF, **{name: value}), [0])
        assert [first.sample(logits) for _ in range(9)] == [second.sample(logits) for _ in range(9)]


class TestSeed:
    def test_same_seed_gives_the_same_tokens(self) -> None:
        logits = np.random.default_rng(5).normal(size=500).astype(np.float32)
        first, second = (Sampler(SamplingParams(seed=42), [1, 2]) for _ in range(2))
        other = Sampler(SamplingParams(seed=43), [1, 2])
        tokens = [first.sample(logits) for _ in range(50)]
        other.sample(logits)  # a request beside it changes nothing
        assert [second.sample(logits) for _ in range(50)] == tokens
        assert [other.sample(logits) for _ in range(50)] != tokens

    def test_random_seed_is_told_and_repeats(self) -> None:
        logits = np.zeros(1000, np.float32)
        first = Sampler(replace(OFF, seed=-1), [])
        second = Sampler(replace(OFF, seed=first.seed), [])
        assert [first.sample(logits) for _ in range(9)] == [second.sample(logits) for _ in range(9)]
        assert Sampler(replace(OFF, seed=-1), []).seed != first.seed


class TestRefusals:
    @pytest.mark.parametrize(
        ("changes", "flag"),
        [
            ({"top_p": 1.5}, "--top-p"),
            ({"top_p": -0.1}, "--top-p"),
            ({"min_p": 2.0}, "--min-p"),
            ({"typical_p": -1.0}, "--typical"),
            ({"temperature": math.nan}, "--temp"),
            ({"temperature": math.inf}, "--temp"),
            ({"temperature": "hot"}, "--temp"),
            ({"top_k": 1.5}, "--top-k"),
            ({"top_k": True}, "--top-k"),
            ({"repeat_penalty": 0.0}, "--repeat-penalty"),
            ({"repeat_last_n": -2}, "--repeat-last-n"),
            ({"seed": -2}, "--seed"),
            ({"seed": 2**64}, "--seed"),
        ],
    )
    def test_value_out_of_range_names_the_flag(self, changes: dict[str, Any], flag: str) -> None:
        with pytest.raises(ConfigError, match=f"^{flag}: "):
            SamplingParams(**changes)

    @pytest.mark.parametrize("params", [GREEDY, SamplingParams(seed=1), replace(OFF, min_p=0.1)])
    def test_broken_logits_are_an_error(self, params: SamplingParams) -> None:
        for value in (math.nan, math.inf, -math.inf):
            with pytest.raises(EngineError, match="largest logit is"):
                Sampler(params, []).sample(np.full(50, value, np.float32))


@given(LOGITS, st.integers(1, 50))
def test_log_probabilities_are_normalised(logits: F32, k: int) -> None:
    found = log_probabilities(logits, k)
    expected = logits.astype(np.float64) - np.log(np.exp(logits.astype(np.float64)).sum())
    order = sorted(range(logits.size), key=lambda i: (-logits[i], i))[:k]
    assert [i for i, _ in found] == order
    assert [value for _, value in found] == pytest.approx(expected[order].tolist(), abs=1e-9)


class TestCandidates:
    def test_each_has_the_next_seed(self) -> None:
        params = SamplingParams(seed=7, top_k=3)
        drawn = params.for_candidates(3)
        assert [one.seed for one in drawn] == [7, 8, 9]
        assert all(replace(one, seed=7) == params for one in drawn)

    def test_seeds_go_round(self) -> None:
        assert [p.seed for p in SamplingParams(seed=2**64 - 1).for_candidates(2)] == [2**64 - 1, 0]

    def test_random_seed_is_drawn_once(self) -> None:
        first, second = SamplingParams(seed=-1).for_candidates(2)
        assert second.seed == first.seed + 1 > 0

    def test_one_candidate_is_the_request(self) -> None:
        assert SamplingParams(seed=-1).for_candidates(1) == [SamplingParams(seed=-1)]


@pytest.mark.parametrize("token_id", [0, 2])
def test_log_probability_is_one_of_all(token_id: int) -> None:
    logits = np.array([5.0, -2.0, 80.0], dtype=np.float32)
    assert log_probability(logits, token_id) == dict(log_probabilities(logits, 3))[token_id]
