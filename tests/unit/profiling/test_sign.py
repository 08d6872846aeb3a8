"""Sign predictors: what signs hold, and what alpha does."""

from dataclasses import replace

import numpy as np
import pytest

from polyneuron.io.predictor_file import PredictorInput
from polyneuron.kernels.gemv import FeedForwardKind
from polyneuron.kernels.quant import StorageType
from polyneuron.profiling.kinds import settings_of
from polyneuron.profiling.predictors import Fitted
from polyneuron.profiling.sign_fit import fit_sign, sign_rows
from tests.support.planted_layer import planted

FFN = PredictorInput.FFN
DRELU, REGLU = FeedForwardKind.DRELU, FeedForwardKind.REGLU


def signs(alpha: float = 0.0, feed_forward: FeedForwardKind = DRELU, kept: float = 0.97) -> Fitted:
    settings = settings_of("sign", feed_forward, StorageType.Q4, input=FFN, kept=kept, alpha=alpha)
    return fit_sign(planted(), settings)


def test_rows_keep_signs_and_size() -> None:
    gate = np.random.default_rng(0).standard_normal((3, 64)).astype(np.float32)
    rows = sign_rows(gate)
    assert (np.sign(rows) == np.sign(gate)).all()
    assert np.allclose(np.abs(rows[:, :32]), np.abs(gate[:, :32]).mean(axis=1, keepdims=True))


def test_more_alpha_names_more() -> None:
    reports = [signs(alpha).report for alpha in (0.8, 1.0, 1.25, 2.0)]
    for name in ("predicted", "recall", "kept"):
        values = [getattr(report, name) for report in reports]
        assert values == sorted(values) and values[0] < values[-1]


@pytest.mark.parametrize("feed_forward", [DRELU, REGLU])
def test_alpha_one_is_a_plain_majority(feed_forward: FeedForwardKind) -> None:
    assert (signs(1.0, feed_forward).predictor.threshold == 0.0).all()


def test_alpha_outweighs_votes_against() -> None:
    """alpha * P > N for mean P + N, with the votes counted apart."""
    fitted, x = signs(1.5, REGLU), planted().ffn_input[:360]
    rows = fitted.predictor.fc2
    total = np.abs(x).mean(axis=0) @ np.abs(rows).T
    votes_for, votes_against = (total + (x @ rows.T)) / 2, (total - (x @ rows.T)) / 2
    wanted = 1.5 * votes_for > votes_against
    assert ((x @ rows.T > fitted.predictor.threshold) == wanted).mean() > 0.9999


@pytest.mark.parametrize("alpha", [0.8, 1.0, 1.5])
def test_report_tells_alpha(alpha: float) -> None:
    assert signs(alpha).report.alpha == pytest.approx(alpha, rel=1e-4)


def test_alpha_follows_the_share_asked_for() -> None:
    few, many = (signs(kept=kept).report for kept in (0.9, 0.99))
    assert 0.0 < few.alpha < many.alpha


def test_up_signs_name_fewer_for_the_same_share() -> None:
    both, gate = signs().report, signs(feed_forward=REGLU).report
    assert both.kept == pytest.approx(gate.kept, abs=0.02)
    assert both.predicted < 0.95 * gate.predicted
    assert both.multiply_adds == 2 * gate.multiply_adds


def test_the_same_alpha_at_another_share_is_the_same() -> None:
    one, other = signs(1.2, kept=0.9), signs(1.2, kept=0.99)
    assert one.report == other.report
    assert replace(one.report, alpha=0.0) != one.report
