"""What every kind of predictor must do; each kind's test adds how one is made."""

from abc import ABC, abstractmethod
from pathlib import Path

import numpy as np
import pytest

from polyneuron.io.predictor_file import (
    LayerPredictor,
    PredictorInfo,
    PredictorInput,
    read_predictors,
    write_predictors,
)
from polyneuron.profiling.predictors import (
    Fitted,
    PredictorSettings,
    contributions,
    names,
    num_calibration,
    predictor_input,
)
from polyneuron.profiling.reorder import stored_layers
from tests.support.planted_layer import D_FF, D_MODEL, NUM_TOKENS, planted

KEPT = 0.95
SHARES = ("predicted", "cold_predicted", "active", "recall", "kept", "precision")

_MADE: dict[tuple[type, PredictorInput], tuple[PredictorSettings, Fitted]] = {}


class PredictorSuite(ABC):
    """Of a layer that is planted; `at` says what the predictor reads."""

    inputs: tuple[PredictorInput, ...] = tuple(PredictorInput)

    @abstractmethod
    def settings(self, at: PredictorInput, kept: float) -> PredictorSettings:
        """What is to be made."""

    @abstractmethod
    def fit(self, settings: PredictorSettings, seed: int = 0) -> Fitted:
        """Make it of `planted(seed)`."""

    @pytest.fixture(params=list(PredictorInput))
    def made(self, request: pytest.FixtureRequest) -> tuple[PredictorSettings, Fitted]:
        """One of each input, made once."""
        if request.param not in self.inputs:
            pytest.skip("this kind reads the other input")
        key = (type(self), request.param)
        if key not in _MADE:
            settings = self.settings(request.param, KEPT)
            _MADE[key] = settings, self.fit(settings)
        return _MADE[key]

    def test_arrays_have_their_shapes(self, made: tuple[PredictorSettings, Fitted]) -> None:
        settings, fitted = made
        found = fitted.predictor
        assert found.rank % 32 == 0
        assert found.fc1 is None or found.fc1.shape == (found.rank, D_MODEL)
        assert found.fc2.shape == (D_FF, found.rank or D_MODEL)
        assert found.threshold.shape == fitted.named.shape == (D_FF,)
        assert (found.up is not None) == settings.has_up
        for values in (found.fc1, found.fc2, found.threshold, found.up, fitted.named):
            assert values is None or (values.dtype == np.float32 and np.isfinite(values).all())

    def test_report_is_what_it_does_on_tokens_apart(
        self, made: tuple[PredictorSettings, Fitted]
    ) -> None:
        settings, fitted = made
        sample, report = planted(), fitted.report
        x = np.ascontiguousarray(predictor_input(sample, settings.input))
        named, apart = (
            names(fitted.predictor, x, settings),
            slice(num_calibration(NUM_TOKENS), None),
        )
        contribution = contributions(sample)[apart]
        active = contribution > 0
        assert report.predicted == pytest.approx(named[apart].mean())
        assert report.recall == pytest.approx(named[apart][active].mean())
        assert report.precision == pytest.approx(active[named[apart]].mean())
        kept = contribution[named[apart]].sum() / contribution.sum()
        assert report.kept == pytest.approx(kept, abs=1e-4)
        assert fitted.named == pytest.approx(named.mean(axis=0), abs=1e-6)
        assert all(0.0 <= getattr(report, name) <= 1.0 for name in SHARES)
        assert report.rank == fitted.predictor.rank

    def test_it_is_worth_having(self, made: tuple[PredictorSettings, Fitted]) -> None:
        report = made[1].report
        assert report.kept > KEPT - 0.05
        assert report.recall > 0.7
        assert report.predicted < 0.9 and report.precision > 1.1 * report.active

    def test_same_tokens_same_predictor(self, made: tuple[PredictorSettings, Fitted]) -> None:
        settings, first = made
        second = self.fit(settings)
        for name in ("fc1", "fc2", "threshold", "up"):
            one, other = getattr(first.predictor, name), getattr(second.predictor, name)
            assert (one is None and other is None) or (one == other).all()
        assert first.report == second.report

    def test_stored_and_read_it_names_the_same(
        self, made: tuple[PredictorSettings, Fitted], tmp_path: Path
    ) -> None:
        settings, fitted = made
        path = tmp_path / "layer.predictors"
        write(path, settings, fitted)
        found = read_predictors(path, "k" * 64, 1, (D_FF, D_MODEL))
        (stored,) = stored_layers(found)
        x = np.ascontiguousarray(predictor_input(planted(), settings.input))
        ours = names(fitted.predictor, x, settings)
        assert (names(stored, x, settings) == ours).mean() > 0.9999
        assert found.info.report["kept"] == fitted.report.kept
        size = sum(tensor.num_bytes for tensor in found.tensors.values())
        assert fitted.report.num_bytes == size
        work = sum(t.rows * t.cols for t in found.tensors.values() if t.storage is not None)
        assert fitted.report.multiply_adds == work
        assert found.named == pytest.approx(fitted.named[None], abs=1e-4)

    def test_other_shares_name_other_numbers(self) -> None:
        at = self.inputs[-1]
        few, many = (self.fit(self.settings(at, kept)).report for kept in (0.8, 0.99))
        assert few.predicted < many.predicted and few.kept < many.kept


def write(path: Path, settings: PredictorSettings, fitted: Fitted) -> None:
    """One layer's file."""
    info = PredictorInfo(
        settings.kind, settings.input, settings.is_relu, settings.fc1_type, settings.fc2_type,
        fitted.report.plain(), settings.has_up,
    )  # fmt: skip
    layers: list[LayerPredictor] = [fitted.predictor]
    ranks, shape = [fitted.report.rank], (D_FF, D_MODEL)
    write_predictors(path, "k" * 64, info, ranks, layers, shape, named=fitted.named[None])
