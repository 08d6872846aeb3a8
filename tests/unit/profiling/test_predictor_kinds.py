"""Each kind of predictor in the suite that all must pass."""

import importlib.util

import numpy as np
import pytest

from polyneuron.io.predictor_file import PredictorInput
from polyneuron.io.predictor_import import PredictorImport, open_import
from polyneuron.kernels.gemv import FeedForwardKind
from polyneuron.kernels.quant import StorageType
from polyneuron.profiling.kinds import fit_of, settings_of
from polyneuron.profiling.low_rank_fit import fit_low_rank
from polyneuron.profiling.predictors import Fitted, PredictorSettings
from tests.support.planted_layer import planted
from tests.unit.profiling.predictor_suite import PredictorSuite

DRELU, REGLU = FeedForwardKind.DRELU, FeedForwardKind.REGLU
FFN = PredictorInput.FFN


class KindSuite(PredictorSuite):
    """A kind that is made by its name alone."""

    kind = ""
    feed_forward = DRELU

    def settings(self, at: PredictorInput, kept: float) -> PredictorSettings:
        return settings_of(self.kind, self.feed_forward, StorageType.F32, input=at, kept=kept)

    def fit(self, settings: PredictorSettings, seed: int = 0) -> Fitted:
        return fit_of(settings, None)(planted(seed), settings)


class TestLowRank(KindSuite):
    kind = "low-rank"


class TestSigns(KindSuite):
    kind = "sign"


class TestSignsOfGateAlone(KindSuite):
    kind = "sign"
    feed_forward = REGLU


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
class TestTrained(KindSuite):
    kind = "mlp"


class TestOracle(KindSuite):
    kind = "oracle"
    inputs = (FFN,)

    def test_other_shares_name_other_numbers(self) -> None:
        few, many = (self.fit(self.settings(FFN, kept)).report for kept in (0.8, 0.99))
        assert few == many and few.kept == 1.0  # it has no threshold to choose

    def test_it_names_open_gates(self) -> None:
        sample = planted()
        fitted = self.fit(self.settings(FFN, 0.9))
        assert fitted.named == pytest.approx((sample.gate > 0).mean(axis=0), abs=2 / 480)
        assert fitted.report.recall == 1.0


@pytest.fixture(scope="module")
def matrices(tmp_path_factory: pytest.TempPathFactory) -> PredictorImport:
    """The low-rank map as somebody's matrices with ReLU between: directions and their opposites."""
    settings = settings_of("low-rank", DRELU, StorageType.F32, input=FFN, kept=0.9, rank=32)
    low_rank = fit_low_rank(planted(), settings).predictor
    assert low_rank.fc1 is not None
    fc1 = np.vstack([low_rank.fc1, -low_rank.fc1])
    fc2 = np.hstack([low_rank.fc2, -low_rank.fc2])
    folder = tmp_path_factory.mktemp("matrices")
    np.savez(folder / "model_0.npz", **{"fc1.weight": fc1, "fc2.weight": fc2})
    return open_import(folder)


class TestImported(PredictorSuite):
    inputs = (FFN,)

    @pytest.fixture(autouse=True)
    def _found(self, matrices: PredictorImport) -> None:
        self.found = matrices

    def settings(self, at: PredictorInput, kept: float) -> PredictorSettings:
        return settings_of("imported", DRELU, StorageType.F32, kept=kept, found=self.found)

    def fit(self, settings: PredictorSettings, seed: int = 0) -> Fitted:
        return fit_of(settings, self.found)(planted(seed), settings)
