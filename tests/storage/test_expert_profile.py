"""Profiles and predictors of experts: what the engine chooses and computes, and what is kept."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from polyneuron.config import FeedForwardMode
from polyneuron.errors import ConfigError
from polyneuron.io.ncf_reader import read_ncf
from polyneuron.io.predictor_file import PredictorInput, predictor_path
from polyneuron.io.profile_file import profile_path
from polyneuron.kernels.gemv import FeedForwardKind
from polyneuron.kernels.quant import StorageType
from polyneuron.model.convert import convert
from polyneuron.model.ncf_spec import spec_of
from polyneuron.planning.known_model import known_model
from polyneuron.planning.source import open_source
from polyneuron.profiling.calibration import Calibration, check_sparse
from polyneuron.profiling.expert_fit import LEAST_TOKENS
from polyneuron.profiling.kinds import OF_EXPERTS, settings_of
from polyneuron.profiling.predictors import PredictorSettings
from polyneuron.profiling.profile import Made, make_profile
from polyneuron.profiling.reorder import check_reorder
from polyneuron.profiling.thresholds import ALWAYS
from tests.support import one_result
from tests.support.local_engine import LocalEngine
from tests.support.made_up_device import make_device
from tests.support.reference_model import ReferenceModel
from tests.support.synthetic import small_settings, write_synth
from tests.support.tiny_gguf import TinyModel, write_tiny_gguf

PREDICTED, EXACT = FeedForwardMode.PREDICTED, FeedForwardMode.EXACT
TINY = TinyModel(
    family="turbosparsemixtral", num_layers=3, d_model=64, d_ff=96, num_experts=6, num_used=2,
    tied_head=False, tensor_type="F16",
)  # fmt: skip
SHAPE = {
    "num_layers": 2, "d_model": 256, "d_ff": 256, "num_heads": 4, "num_kv_heads": 2,
    "vocab_size": 1024,
}  # fmt: skip
TOKENS = [int(token) for token in np.random.default_rng(0).integers(3, 256, 300)]
KEPT = 0.98


def settings(kind: str, deciding: StorageType = StorageType.Q8) -> PredictorSettings:
    return settings_of(kind, FeedForwardKind.DRELU, deciding, kept=KEPT, has_experts=True)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny_experts")
    convert(write_tiny_gguf(folder / "tiny.gguf", TINY), folder / "tiny.ncf")
    return folder / "tiny.ncf"


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Planted sparsity and spectrum, 85 % of the chosen experts' neurons at rest."""
    folder = tmp_path_factory.mktemp("planted_experts")
    write_synth(folder, small_settings("turbosparse-mixtral-47b", **SHAPE, quant="q8"), twin=False)
    return folder / "synth.ncf"


def profiled(path: Path, kind: str) -> Made:
    tokens = [int(token) for token in np.random.default_rng(0).integers(3, 1024, 1024)]
    return make_profile(path, tokens, settings(kind))


class TestCalibration:
    def test_experts_and_activations_are_the_plain_passes(self, tiny: Path) -> None:
        sequences = [TOKENS[:40], TOKENS[40:75]]
        ncf = read_ncf(tiny)
        calibration = Calibration.begin(ncf, spec_of(ncf), sequences)
        model = ReferenceModel(tiny.with_suffix(".gguf"))
        for layer in calibration.expert_layers():
            names = model.names.layers[layer.layer_id]
            x = layer.ffn_input.astype(np.float64)
            weights = model.expert_weights(names, x)
            for found in layer.experts():
                chosen = np.flatnonzero(weights[:, found.expert])
                assert np.array_equal(found.tokens, chosen)
                rows = x[chosen]
                gate = rows @ model.weights[names.ffn_gate or ""][found.expert].T
                up = rows @ model.weights[names.ffn_up][found.expert].T
                hidden = np.maximum(gate, 0) * np.maximum(up, 0)
                hidden *= weights[chosen, found.expert][:, None]
                scale = np.abs(hidden).max()
                assert np.abs(found.sample.hidden - hidden).max() < 2e-3 * scale
                assert np.abs(found.sample.gate - gate).max() < 2e-3 * np.abs(gate).max()
                down = model.weights[names.ffn_down][found.expert]
                expected = np.linalg.norm(down, axis=0)
                assert found.sample.weights.down_norm == pytest.approx(expected, rel=1e-2)
                assert found.sample.weights.up_values() == pytest.approx(
                    model.weights[names.ffn_up][found.expert], abs=1e-3
                )

    def test_the_last_stream_is_the_engines(self, tiny: Path) -> None:
        ncf = read_ncf(tiny)
        calibration = Calibration.begin(ncf, spec_of(ncf), [TOKENS[:40]])
        for _ in calibration.expert_layers():
            pass
        model = ReferenceModel(tiny.with_suffix(".gguf"))
        stream = calibration.stream[-1:].astype(np.float64)
        normed = stream / np.sqrt(np.square(stream).mean() + model.spec.norm_eps)
        got = normed * model.weights["output_norm.weight"] @ model.weights["output.weight"].T
        with LocalEngine(tiny, mode=EXACT) as engine:
            expected = engine.generate(TOKENS[:40], 1).logits[0]
        assert np.abs(got[0] - expected).max() < 1e-2 * np.abs(expected).max()


@pytest.fixture(scope="module")
def made(planted: Path, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Low-rank predictors, which no other test replaces."""
    path = tmp_path_factory.mktemp("low_rank") / "synth.ncf"
    path.symlink_to(planted)
    return profiled(path, "low-rank")


@pytest.fixture
def own(planted: Path, tmp_path: Path) -> Path:
    """The planted model under a name that predictors may be written beside."""
    path = tmp_path / "synth.ncf"
    path.symlink_to(planted)
    return path


class TestProfile:
    def test_counts_are_of_all_neurons(self, made: Made) -> None:
        for layer in made.profile.layers:
            assert layer.active.shape == (4, 8 * SHAPE["d_ff"])
            assert layer.facts["active_share"] == pytest.approx(0.15 * 2 / 8, rel=0.15)
            shares = layer.facts["expert_shares"]
            assert sum(shares) == pytest.approx(2.0)
            assert max(shares) > 2 * min(shares)
            assert 0.25 < layer.facts["expert_overlap"] < 0.6
            active = layer.active[0].reshape(8, -1)
            assert np.all(active.max(axis=1) <= np.array(shares) * made.profile.num_tokens + 0.5)

    def test_a_plan_knows_how_often_neurons_are_named(self, made: Made) -> None:
        model = made.profile_path.with_suffix(".ncf")
        known = known_model(open_source(model), make_device(), 256)
        assert known.hotness is not None and known.predictor is not None
        assert known.hotness.is_measured and not known.predictor.is_early
        assert known.predictor.hidden is not None
        named = np.mean([report["predicted"] for report in made.report["layers"]])
        assert known.predictor.asked.needed() == pytest.approx(named, rel=0.15)

    def test_same_text_gives_the_same_bytes(self, made: Made, own: Path) -> None:
        profiled(own, "low-rank")
        assert profile_path(own).read_bytes() == made.profile_path.read_bytes()
        assert made.predictors_path is not None
        assert predictor_path(own).read_bytes() == made.predictors_path.read_bytes()


class TestPredictors:
    @pytest.mark.parametrize("kind", OF_EXPERTS)
    def test_keep_what_is_asked_for_and_name_few(self, own: Path, kind: str) -> None:
        made = profiled(own, kind)
        for report in made.report["layers"]:
            assert report["kept"] > KEPT - 0.015
            assert report["active"] < report["predicted"] < 0.5 * 2 / 8
            assert report["precision"] > 0.4

    @pytest.mark.parametrize("kind", OF_EXPERTS)
    def test_streamed_is_resident_byte_for_byte(self, own: Path, kind: str) -> None:
        profiled(own, kind)
        resident = one_result.logits_of(own, mode=PREDICTED)
        for share in (0.0, 0.3):
            got = one_result.logits_of(own, mode=PREDICTED, ffn_resident=share, max_sequences=1)
            assert got == resident

    def test_perfect_ones_are_exact_mode(self, tiny: Path) -> None:
        make_profile(tiny, TOKENS, settings("oracle", StorageType.F16))
        exact = one_result.logits_of(tiny, mode=EXACT)
        assert one_result.logits_of(tiny, mode=PREDICTED, ffn_resident=0.4) == exact

    def test_an_expert_that_few_tokens_chose_is_named_whole(self, tiny: Path) -> None:
        made = make_profile(tiny, TOKENS[:48], settings("low-rank"))
        source = open_source(tiny)
        found = source.predictors()
        assert found.named is not None
        shares = [layer.facts["expert_shares"] for layer in made.profile.layers]
        few = [
            (layer, expert)
            for layer, of_layer in enumerate(shares)
            for expert, share in enumerate(of_layer)
            if share * 48 < LEAST_TOKENS
        ]
        assert few
        for layer, expert in few:
            named = found.named[layer, expert * TINY.d_ff : (expert + 1) * TINY.d_ff]
            assert named == pytest.approx(shares[layer][expert], abs=1e-4)
        assert ALWAYS < -1e38

    def test_bytes_and_work_are_counted(self, made: Made) -> None:
        (report, *_) = made.report["layers"]
        rank, width, neurons = report["rank"], SHAPE["d_model"], 8 * SHAPE["d_ff"]
        assert report["multiply_adds"] == rank * width + neurons * 2 / 8 * rank
        total = sum(layer["num_bytes"] for layer in made.report["layers"])
        section = open_source(made.profile_path.with_suffix(".ncf")).predictors().section.num_bytes
        assert 0 <= section - total < 4096 + 64 * 3 * SHAPE["num_layers"]


class TestRefusals:
    @pytest.mark.parametrize("kind", ["mlp", "imported"])
    def test_kinds_that_are_not_made(self, kind: str) -> None:
        with pytest.raises(ConfigError, match=r"experts|--import"):
            settings(kind)

    def test_inputs_before_the_router(self) -> None:
        with pytest.raises(ConfigError, match="--input attention: experts are chosen behind"):
            settings_of(
                "low-rank", FeedForwardKind.DRELU, StorageType.Q4, has_experts=True,
                input=PredictorInput.ATTENTION,
            )  # fmt: skip

    def test_smooth_experts_have_nothing_to_profile(self, tmp_path: Path) -> None:
        source = write_tiny_gguf(tmp_path / "a.gguf", replace(TINY, family="qwen3moe"))
        with pytest.raises(ConfigError, match="never exactly zero"):
            check_sparse(source, open_source(source).spec)

    def test_an_order_of_experts(self, tiny: Path, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"--reorder .*would gain nothing"):
            check_reorder(tiny, tmp_path / "b.ncf", force=False)
