"""Trained predictors: the forward pass and loss in numpy and in torch, the search for a rank."""

import importlib.util
import itertools
from collections.abc import Callable

import numpy as np
import pytest

from polyneuron.errors import ConfigError
from polyneuron.io.predictor_file import PredictorInput
from polyneuron.kernels.gemv import FeedForwardKind
from polyneuron.kernels.quant import StorageType
from polyneuron.profiling import mlp_training
from polyneuron.profiling.kinds import settings_of
from polyneuron.profiling.low_rank_fit import calibrated
from polyneuron.profiling.mlp_fit import Tried, climbed, first_rank, logit_thresholds, start_of
from polyneuron.profiling.mlp_training import Mlp, Tokens, loss_of, mean_active, train
from polyneuron.profiling.predictors import PredictorSettings, scores
from tests.support.planted_layer import D_FF, D_MODEL, planted

FFN = PredictorInput.FFN
needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="torch is not installed"
)
SETTINGS = PredictorSettings("mlp", FFN, 0.95, 32, is_relu=True)


def random_mlp(seed: int = 0) -> Mlp:
    rng = np.random.default_rng(seed)
    parts = (rng.standard_normal(shape) for shape in ((32, D_MODEL), (D_FF, 32), (D_FF,)))
    return Mlp(*(part.astype(np.float32) for part in parts))


def tokens() -> Tokens:
    known = calibrated(planted(), SETTINGS)
    return Tokens(known.x, known.contribution)


def test_without_torch_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlp_training.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs the extra train: pip install 'polyneuron\[train"):
        settings_of("mlp", FeedForwardKind.DRELU, StorageType.Q4)


def test_logits_are_the_engines_scores() -> None:
    made, x = random_mlp(), planted().ffn_input
    engine = scores(made.fc1, made.fc2, x, SETTINGS) + made.bias
    logits = made.logits(x)
    assert np.corrcoef(engine.ravel(), logits.ravel())[0, 1] > 0.98  # 4 and 8 bits


def test_the_start_is_the_low_rank_map() -> None:
    known = calibrated(planted(), SETTINGS)
    start = start_of(known, planted().weights.deciding.values(), 32, SETTINGS)
    logits, gate = start.logits(known.x), known.gate
    together = [np.corrcoef(logits[:, i], gate[:, i])[0, 1] for i in range(D_FF)]
    assert np.median(together) > 0.8


def test_loss_weighs_active_neurons_by_what_they_contribute() -> None:
    contribution = np.array([[0.0, 1.0, 3.0]], np.float32)
    mean = mean_active(contribution)
    logits = np.array([[0.5, -0.2, 0.1]], np.float32)
    parts = [np.log1p(np.exp(0.5)), 0.5 * np.log1p(np.exp(0.2)), 1.5 * np.log1p(np.exp(-0.1))]
    assert mean == 2.0
    assert loss_of(logits, contribution, mean) == pytest.approx(np.mean(parts))
    assert mean_active(np.zeros((2, 2), np.float32)) == 1.0


def tried(costs: dict[int, float], seen: list[int]) -> Callable[[int], Tried]:
    def attempt(rank: int) -> Tried:
        seen.append(rank)
        return Tried(rank, np.zeros(1, np.float32), 0, costs[rank])

    return attempt


@pytest.mark.parametrize(
    ("costs", "best", "order"),
    [
        ({64: 5.0, 128: 4.0, 256: 6.0}, 128, [64, 128, 256]),
        ({64: 5.0, 128: 6.0, 32: 4.0}, 32, [64, 128, 32]),
        ({64: 5.0, 128: 6.0, 32: 7.0}, 64, [64, 128, 32]),
        ({64: 5.0, 128: 4.0, 256: 3.0}, 256, [64, 128, 256]),
    ],
)
def test_rank_grows_or_shrinks_while_that_is_cheaper(
    costs: dict[int, float], best: int, order: list[int]
) -> None:
    seen: list[int] = []
    assert climbed(64, 256, tried(costs, seen)).rank == best
    assert seen == order


def test_first_rank_follows_sparsity_and_skew() -> None:
    rng = np.random.default_rng(0)
    even = rng.random((400, 200)) < 0.2
    denser = rng.random((400, 200)) < 0.4
    skewed = rng.random((400, 200)) < np.where(np.arange(200) < 40, 0.9, 0.025)
    assert first_rank(denser, 1024) > first_rank(even, 1024) > first_rank(skewed, 1024) >= 32
    assert first_rank(even, 64) == 32


def test_thresholds_are_the_same_at_any_scale_of_logits() -> None:
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((400, 8)).astype(np.float32)
    contribution = np.maximum(logits - 0.3, 0)
    contribution[:, 0] = 0  # never worth it
    named = []
    for scale, shift in ((1, 0), (0.01, 3), (300, -500)):
        moved = np.float32(scale) * logits + np.float32(shift)
        least = logit_thresholds(moved, contribution, np.ones(8), 0.95)
        assert np.isfinite(least).all()
        named.append(moved >= least)
    assert (named[0] == named[1]).mean() > 0.999 and (named[0] == named[2]).mean() > 0.999
    kept = contribution[named[2]].sum() / contribution.sum()
    assert 0.94 < kept < 0.99


@needs_torch
class TestTraining:
    def test_torch_computes_the_same_loss(self) -> None:
        import torch

        made, given = random_mlp(), tokens()
        mean = mean_active(given.contribution)
        weights = [torch.from_numpy(w) for w in (made.fc1, made.fc2, made.bias)]
        x, contribution = torch.from_numpy(given.x), torch.from_numpy(given.contribution)
        theirs = float(mlp_training.torch_loss(torch, weights, x, contribution, mean))
        assert theirs == pytest.approx(
            loss_of(made.logits(given.x), given.contribution, mean), rel=1e-4
        )

    def test_each_round_tells_the_tokens_better(self) -> None:
        given = tokens()
        states = list(itertools.islice(train(random_mlp(), given, seed=0), 5))
        mean = mean_active(given.contribution)
        losses = [loss_of(state.logits(given.x), given.contribution, mean) for state in states]
        assert losses == sorted(losses, reverse=True) and losses[-1] < 0.8 * losses[0]

    def test_seeds_give_the_same_or_other_bytes(self) -> None:
        given = tokens()
        first, again, other = (
            next(itertools.islice(train(random_mlp(), given, seed=seed), 2, None))
            for seed in (1, 1, 2)
        )
        assert (first.fc1 == again.fc1).all() and (first.fc2 == again.fc2).all()
        assert (first.fc1 != other.fc1).any()

    def test_nothing_active_can_be_trained_on(self) -> None:
        given = Tokens(tokens().x, np.zeros((len(tokens().x), D_FF), np.float32))
        state = next(itertools.islice(train(random_mlp(), given, seed=0), 1, None))
        assert np.isfinite(state.fc1).all() and np.isfinite(state.fc2).all()
