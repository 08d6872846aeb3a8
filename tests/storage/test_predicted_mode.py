"""Predicted mode: with a perfect predictor it is exact mode, byte for byte, wherever rows lie."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from polyneuron.config import FeedForwardMode
from polyneuron.errors import ConfigError
from polyneuron.io.device_wrappers import Fault, FaultDevice, FaultKind
from polyneuron.io.ncf_format import Layout
from polyneuron.io.predictor_file import PredictorInput, tensor_name
from polyneuron.kernels import isa
from polyneuron.kernels.quant import StorageType
from polyneuron.model.convert import convert
from tests.support.local_engine import LocalEngine
from tests.support.one_result import (
    NUM_TOKENS,
    PROMPT,
    assert_together_as_alone,
    predicted_logits_of,
)
from tests.support.predictors import write_oracle_models, write_random
from tests.support.sparse_models import late_reads, sparse_models
from tests.support.tiny_gguf import write_tiny_gguf

MODELS = sparse_models(4)
DRELU = MODELS["drelu"]
SHARES = (0.3, 0.6, None)
PREDICTED, EXACT = FeedForwardMode.PREDICTED, FeedForwardMode.EXACT


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A file in bundles of each model, perfect predictors beside it."""
    return write_oracle_models(tmp_path_factory.mktemp("predicted"), MODELS)


@pytest.fixture(scope="module")
def exact(files: dict[str, Path]) -> dict[str, list[bytes]]:
    """What each model gives in exact mode, in memory."""
    return {name: predicted_logits_of(path, mode=EXACT) for name, path in files.items()}


class TestPerfectPredictor:
    @pytest.mark.parametrize("name", MODELS)
    @pytest.mark.parametrize("share", SHARES)
    @pytest.mark.parametrize("hot_clusters", [(), (1,), (5, 2), (99,)])
    def test_residencies_and_hot_clusters(
        self,
        files: dict[str, Path],
        exact: dict[str, list[bytes]],
        name: str,
        share: float | None,
        hot_clusters: tuple[int, ...],
    ) -> None:
        got = predicted_logits_of(files[name], ffn_resident=share, hot_clusters=hot_clusters)
        assert got == exact[name]

    @pytest.mark.parametrize("num_workers", [1, 2, 3])
    @pytest.mark.parametrize("matrix_barrier", [False, True])
    @pytest.mark.parametrize("keep_neurons", [False, True])
    def test_variants_and_worker_counts(
        self,
        files: dict[str, Path],
        exact: dict[str, list[bytes]],
        num_workers: int,
        matrix_barrier: bool,
        keep_neurons: bool,
    ) -> None:
        got = predicted_logits_of(
            files["drelu"], ffn_resident=0.4, num_workers=num_workers, num_npu_threads=0,
            matrix_barrier=matrix_barrier, keep_neurons=keep_neurons, hot_clusters=(2,),
        )  # fmt: skip
        assert got == exact["drelu"]

    @pytest.mark.parametrize("share", [0.6, None])
    def test_hot_clusters_on_the_npu_executor(
        self, files: dict[str, Path], exact: dict[str, list[bytes]], share: float | None
    ) -> None:
        got = predicted_logits_of(
            files["drelu"], ffn_resident=share, hot_clusters=(3,), hot_on_npu=True
        )
        assert got == exact["drelu"]

    @pytest.mark.parametrize("max_tokens", [1, 2, 4])
    def test_prompt_in_chunks(
        self, files: dict[str, Path], exact: dict[str, list[bytes]], max_tokens: int
    ) -> None:
        settings = {"ffn_resident": 0.4, "max_tokens": max_tokens}
        assert predicted_logits_of(files["drelu"], **settings) == exact["drelu"]

    def test_late_and_unordered_reads(
        self, files: dict[str, Path], exact: dict[str, list[bytes]]
    ) -> None:
        assert (
            predicted_logits_of(files["drelu"], ffn_resident=0.3, wrap=late_reads())
            == exact["drelu"]
        )

    def test_a_read_that_fails_once_is_tried_again(
        self, files: dict[str, Path], exact: dict[str, list[bytes]]
    ) -> None:
        got = predicted_logits_of(
            files["drelu"],
            ffn_resident=0.3,
            wrap=lambda device: FaultDevice(device, Fault(FaultKind.EIO, 3)),
        )
        assert got == exact["drelu"]

    @pytest.mark.parametrize("hot_clusters", [(), (1, 3, 5)])
    def test_sequences_together_and_alone(
        self, files: dict[str, Path], hot_clusters: tuple[int, ...]
    ) -> None:
        prompts = [PROMPT, PROMPT[::-1], PROMPT[2:7]]
        settings = {
            "ffn_resident": 0.7, "max_sequences": 3, "mode": PREDICTED,
            "hot_clusters": hot_clusters,
        }  # fmt: skip
        with LocalEngine(files["drelu"], **settings) as engine:
            assert_together_as_alone(engine, prompts)


class TestOtherPredictors:
    """Lossy ones: how the rows came, and who computed them, must still change nothing."""

    @pytest.fixture
    def model(self, files: dict[str, Path], tmp_path: Path) -> Path:
        path = tmp_path / "drelu.ncf"
        path.symlink_to(files["drelu"])
        return path

    @pytest.mark.parametrize("input", list(PredictorInput))
    @pytest.mark.parametrize("rank", [0, 32])
    @pytest.mark.parametrize("is_relu", [False, True])
    def test_one_result(self, model: Path, input: PredictorInput, rank: int, is_relu: bool) -> None:
        write_random(model, input=input, rank=rank, share=0.4, is_relu=is_relu)
        resident = predicted_logits_of(model)
        assert predicted_logits_of(model, ffn_resident=0.3) == resident
        assert (
            predicted_logits_of(model, ffn_resident=0.3, num_workers=1, num_npu_threads=0)
            == resident
        )
        assert predicted_logits_of(model, ffn_resident=0.4, matrix_barrier=True) == resident
        if rank:
            assert predicted_logits_of(model, ffn_resident=0.4, lookahead=False) == resident

    @pytest.mark.parametrize("input", list(PredictorInput))
    @pytest.mark.parametrize("share", [0.4, None])
    def test_a_second_matrix_is_added(
        self, model: Path, input: PredictorInput, share: float | None
    ) -> None:
        """The same rows twice, and thresholds twice as high: the very same scores, doubled."""
        prompts = [PROMPT, PROMPT[::-1]]
        got = []
        for is_twice in (False, True):
            write_random(model, input=input, rank=0, share=0.4, is_twice=is_twice)
            settings = {"ffn_resident": share, "max_sequences": 2, "mode": PREDICTED}
            with LocalEngine(model, **settings) as engine:
                both = engine.run_all([engine.request(p, NUM_TOKENS) for p in prompts])
                named = [layer.predicted_share for layer in engine.activity()]
            got.append(([[row.tobytes() for row in one.logits] for one in both], named))
        assert got[0] == got[1]
        assert all(0.1 < share < 0.9 for share in got[0][1])

    def test_it_is_lossy(self, model: Path, exact: dict[str, list[bytes]]) -> None:
        write_random(model, input=PredictorInput.ATTENTION, rank=32, share=0.4)
        assert predicted_logits_of(model) != exact["drelu"]

    def test_naming_everything_is_exact(self, model: Path, exact: dict[str, list[bytes]]) -> None:
        write_random(model, input=PredictorInput.ATTENTION, rank=32, share=1.0)
        assert predicted_logits_of(model, ffn_resident=0.4) == exact["drelu"]

    def test_room_for_others_changes_no_prompt(self, model: Path) -> None:
        write_random(model, input=PredictorInput.ATTENTION, rank=32, share=0.4)
        got = []
        for max_sequences in (1, 4):
            with LocalEngine(model, mode=PREDICTED, max_sequences=max_sequences) as engine:
                rows = engine.generate(PROMPT[:3], 3).logits
                got.append([row.tobytes() for row in rows])
        assert got[0] == got[1]

    @pytest.mark.parametrize("last_rank", [0, 32, 96])
    def test_sequences_do_not_change_each_other(self, model: Path, last_rank: int) -> None:
        at = PredictorInput.ATTENTION
        write_random(model, input=at, rank=32, share=0.4, last_rank=last_rank)
        prompts = [PROMPT, PROMPT[::-1], PROMPT[2:7]]
        settings = {"ffn_resident": 0.5, "max_sequences": 3, "mode": PREDICTED, "max_tokens": 3}
        with LocalEngine(model, **settings) as engine:
            assert_together_as_alone(engine, prompts)


class TestBrokenScores:
    """A score that is no number names its neuron: nothing is dropped for a fault upstream."""

    @pytest.mark.parametrize("role", ["threshold", "fc1", "fc2"])
    @pytest.mark.parametrize("is_relu", [False, True])
    @pytest.mark.parametrize("isa_name", isa.built())
    def test_neurons_are_computed(
        self,
        files: dict[str, Path],
        exact: dict[str, list[bytes]],
        tmp_path: Path,
        role: str,
        is_relu: bool,
        isa_name: str,
    ) -> None:
        if isa_name not in isa.supported():
            pytest.skip(f"this CPU has no {isa_name}")
        path = tmp_path / "drelu.ncf"
        path.symlink_to(files["drelu"])
        at = PredictorInput.ATTENTION
        write_random(path, input=at, rank=32, share=0.4, is_relu=is_relu, fc1_type=StorageType.F32)
        before = isa.active()
        try:
            with LocalEngine(path, mode=PREDICTED, ffn_resident=0.4, isa_name=isa_name) as engine:
                for layer in range(DRELU.num_layers):
                    place = engine.layout.weights[tensor_name(layer, role)]
                    whole = engine.arena.view(place.offset, (place.num_bytes,), np.uint8)
                    whole[:] = 0xFF  # NaN as f16, and as f32
                rows = engine.generate(PROMPT, NUM_TOKENS).logits
                named = [layer.predicted_share for layer in engine.activity()]
        finally:
            isa.select(before)
        assert named == [1.0] * DRELU.num_layers
        assert [row.tobytes() for row in rows] == exact["drelu"][:NUM_TOKENS]


class TestBadInput:
    def test_without_predictors(self, files: dict[str, Path], tmp_path: Path) -> None:
        path = tmp_path / "bare.ncf"
        path.symlink_to(files["drelu"])
        with pytest.raises(ConfigError, match=r"--mode predicted: no predictors at .*profile"):
            LocalEngine(path, mode=PREDICTED)

    def test_another_models_predictors(self, files: dict[str, Path], tmp_path: Path) -> None:
        path = tmp_path / "other.ncf"
        path.symlink_to(files["reglu"])
        (tmp_path / "other.predictors").symlink_to(files["drelu"].with_suffix(".predictors"))
        with pytest.raises(ConfigError, match="another model"):
            LocalEngine(path, mode=PREDICTED)

    def test_a_model_of_tiles(self, tmp_path: Path) -> None:
        source = write_tiny_gguf(tmp_path / "tiny.gguf", DRELU)
        convert(source, tmp_path / "tiny.ncf", layout=Layout.TILES)
        with pytest.raises(ConfigError, match=r"--mode predicted: .*--layout bundles"):
            LocalEngine(tmp_path / "tiny.ncf", mode=PREDICTED)
