"""What lies beside a model's file is used: counts of its neurons, and its predictors' report."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from polyneuron.errors import ConfigError
from polyneuron.io.predictor_file import model_key
from polyneuron.io.profile_file import BATCHES, LayerProfile, Profile, profile_path, write_profile
from polyneuron.planning.hotness import CACHE_LOSS
from polyneuron.planning.known_model import known_hotness, known_model, predictor_work
from polyneuron.planning.source import ModelSource
from tests.support.made_up_device import make_device, make_predictors, shape_source

TOKENS = 100


@pytest.fixture
def source(tmp_path: Path) -> ModelSource:
    return replace(shape_source("bamboo-7b", 4), path=tmp_path / "model.ncf")


def put_profile(source: ModelSource, gated: int, key: str | None = None) -> None:
    """Every fourth neuron is gated in so many of the tokens, and active in half of them."""
    num = source.spec.d_ff
    counts = np.zeros((len(BATCHES), num), np.uint32)
    counts[:, ::4] = gated
    zeros = np.zeros(num, np.float32)
    order = np.arange(num, dtype=np.uint32)
    layer = LayerProfile(counts // 2, counts, zeros, zeros, order, {})
    key = key or model_key(source.manifest)
    profile = Profile(key, TOKENS, "0" * 64, (layer,) * source.spec.num_layers)
    write_profile(profile_path(source.path), profile)


class TestHotness:
    def test_without_profile_it_is_supposed(self, source: ModelSource) -> None:
        assert not known_hotness(source, source.spec.d_ff).is_measured

    def test_counts_become_rates(self, source: ModelSource) -> None:
        put_profile(source, gated=60)
        hotness = known_hotness(source, source.spec.d_ff)
        assert hotness.is_measured
        assert hotness.needed() == pytest.approx(0.6 / 4)
        assert hotness.active_share == pytest.approx(0.5)
        assert hotness.hit_rate(0.25) == pytest.approx(1.0 - CACHE_LOSS)

    def test_another_models_profile_is_refused(self, source: ModelSource) -> None:
        put_profile(source, gated=60, key="1" * 64)
        with pytest.raises(ConfigError, match="of another model file"):
            known_model(source, make_device(), 256)


class TestPredictors:
    def test_report_tells_what_is_predicted(self, source: ModelSource) -> None:
        hotness = known_hotness(source, source.spec.d_ff)
        work = predictor_work(make_predictors(source), hotness)
        assert work.is_early
        assert work.asked.needed() == pytest.approx(0.18, rel=0.35)  # none more often than always
        assert 0.9 < work.found.needed() / hotness.needed() < 1
        assert work.hidden is not None
        assert (work.hidden.cols, work.scores.cols) == (4096, 1024)

    def test_silent_reports_count_as_usual(self, source: ModelSource) -> None:
        file = make_predictors(source)
        silent = replace(file, info=replace(file.info, report={}))
        hotness = known_hotness(source, source.spec.d_ff)
        work = predictor_work(silent, hotness)
        assert 0.8 * hotness.needed() < work.found.needed() < hotness.needed()
        assert work.found.needed() < work.asked.needed() < 2 * hotness.needed()

    def test_counts_of_each_neuron_come_before_means(self, source: ModelSource) -> None:
        named = np.zeros((source.spec.num_layers, source.spec.d_ff), np.float32)
        named[:, ::2] = 0.4  # half of the neurons, wherever they lie
        file = replace(make_predictors(source), named=named)
        work = predictor_work(file, known_hotness(source, source.spec.d_ff))
        assert work.asked.needed() == pytest.approx(0.2)
        assert work.asked.hit_rate(0.5) == pytest.approx(1.0 - CACHE_LOSS)
        assert work.asked.needed(1, 0.5) == pytest.approx(0.0, abs=1e-9)

    def test_clusters_keep_the_order_of_the_file(self, source: ModelSource) -> None:
        """What is named often but lies late is not what stays."""
        num, size = source.spec.d_ff, 448
        named = np.zeros((source.spec.num_layers, num), np.float32)
        named[:, -size:] = 0.5
        file, hotness = replace(make_predictors(source), named=named), known_hotness(source, num)
        late, anywhere = (predictor_work(file, hotness, each).asked for each in (size, 0))
        share = size / num
        assert late.needed(1, 0.0, share) == pytest.approx(0.0, abs=1e-9)
        assert late.needed(1, 1 - share) == pytest.approx(0.5 * share)
        assert anywhere.needed(1, 0.0, share) == pytest.approx(0.5 * share)
        assert late.hit_rate(share) == pytest.approx(1.0 - CACHE_LOSS)
