"""Mixtures of experts: near the plain forward pass, and one result wherever the experts lie."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from polyneuron.config import FeedForwardMode
from polyneuron.errors import ConfigError, PolyneuronError, UnsupportedError
from polyneuron.io.device_wrappers import Fault, FaultDevice, FaultKind
from polyneuron.io.gguf_file import read_header
from polyneuron.io.ncf_format import Layout
from polyneuron.model.architecture import describe
from polyneuron.model.convert import convert
from polyneuron.planning.source import open_source
from tests.support.local_engine import LocalEngine
from tests.support.one_result import (
    NUM_TOKENS,
    PROMPT,
    assert_together_as_alone,
    logits_of,
    logits_on,
)
from tests.support.reference_model import ReferenceModel
from tests.support.sparse_models import late_reads
from tests.support.tiny_gguf import TinyModel, write_tiny_gguf

MIXTRAL = TinyModel(
    num_layers=3, d_model=64, d_ff=96, num_experts=8, num_used=2, tied_head=False,
    tensor_type="Q8_0",
)  # fmt: skip
MODELS = {
    "mixtral": MIXTRAL,
    "qwen2moe": replace(MIXTRAL, family="qwen2moe", shared_d_ff=64, num_used=4, tensor_type="Q4_0"),
    "qwen3moe": replace(MIXTRAL, family="qwen3moe", num_used=3),
    "olmoe": replace(MIXTRAL, family="olmoe", num_experts=6, tensor_type="F16"),
    "drelu": replace(MIXTRAL, family="turbosparsemixtral"),
    "one_of_many": replace(MIXTRAL, num_used=1, d_ff=320),
}
SHARES = (0.0, 0.3, 0.6)
FLOAT_BOUND = 1e-3  # of the largest logit


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A neuron-cluster file of each model."""
    folder = tmp_path_factory.mktemp("experts")
    paths = {name: folder / f"{name}.ncf" for name in MODELS}
    for name, path in paths.items():
        convert(write_tiny_gguf(folder / f"{name}.gguf", MODELS[name]), path)
    return paths


@pytest.fixture(scope="module")
def resident(files: dict[str, Path]) -> dict[str, list[bytes]]:
    """What each model gives when everything is in memory."""
    return {name: logits_of(path) for name, path in files.items()}


class TestForwardPass:
    @pytest.mark.parametrize("name", MODELS)
    def test_logits_are_near_the_reference(self, name: str, tmp_path: Path) -> None:
        model = replace(MODELS[name], tensor_type="F32")
        source = write_tiny_gguf(tmp_path / "tiny.gguf", model)
        convert(source, tmp_path / "tiny.ncf")
        with LocalEngine(tmp_path / "tiny.ncf", ffn_resident=0.4) as engine:
            result = engine.generate(PROMPT, NUM_TOKENS)
        tokens = np.array(PROMPT + result.tokens)
        reference = ReferenceModel(source)
        reference.cache_dtype = np.float16
        expected = reference.logits(tokens)[len(PROMPT) - 1 : -1]
        difference = np.abs(np.array(result.logits) - expected).max()
        assert difference < FLOAT_BOUND * np.abs(expected).max()
        assert result.tokens == expected.argmax(axis=-1).tolist()

    def test_a_wrong_rule_would_show(self, files: dict[str, Path], tmp_path: Path) -> None:
        """Weights that are shares of all experts give other logits than normalised ones."""
        source = write_tiny_gguf(
            tmp_path / "other.gguf", MIXTRAL, metadata={"llama.expert_weights_norm": False}
        )
        convert(source, tmp_path / "other.ncf")
        assert logits_of(tmp_path / "other.ncf") != logits_of(files["mixtral"])


class TestOneResult:
    @pytest.mark.parametrize("name", MODELS)
    @pytest.mark.parametrize("share", SHARES)
    def test_residencies(
        self, files: dict[str, Path], resident: dict[str, list[bytes]], name: str, share: float
    ) -> None:
        with LocalEngine(files[name], ffn_resident=share, max_sequences=1) as engine:
            assert engine.layout.has_neuron_cache
        assert logits_of(files[name], ffn_resident=share) == resident[name]

    @pytest.mark.parametrize("num_workers", [1, 2, 3])
    @pytest.mark.parametrize("name", ["qwen2moe", "drelu"])
    def test_worker_counts(
        self,
        files: dict[str, Path],
        resident: dict[str, list[bytes]],
        name: str,
        num_workers: int,
    ) -> None:
        settings = {"num_workers": num_workers, "num_npu_threads": 0, "matrix_barrier": True}
        assert logits_of(files[name], ffn_resident=0.3, **settings) == resident[name]

    @pytest.mark.parametrize("max_tokens", [1, 2, 4])
    def test_prompts_in_chunks_and_token_by_token(
        self, files: dict[str, Path], resident: dict[str, list[bytes]], max_tokens: int
    ) -> None:
        got = logits_of(files["qwen2moe"], ffn_resident=0.3, max_tokens=max_tokens)
        assert got == resident["qwen2moe"]

    def test_forgetting_after_each_layer(
        self, files: dict[str, Path], resident: dict[str, list[bytes]]
    ) -> None:
        got = logits_of(files["mixtral"], ffn_resident=0.3, keep_neurons=False)
        assert got == resident["mixtral"]

    def test_late_and_unordered_reads(
        self, files: dict[str, Path], resident: dict[str, list[bytes]]
    ) -> None:
        got = logits_of(files["mixtral"], ffn_resident=0.3, wrap=late_reads())
        assert got == resident["mixtral"]

    @pytest.mark.parametrize("kind", [FaultKind.EIO, FaultKind.SHORT_READ])
    def test_a_read_that_fails_once_is_tried_again(
        self, files: dict[str, Path], resident: dict[str, list[bytes]], kind: FaultKind
    ) -> None:
        got = logits_of(
            files["mixtral"],
            ffn_resident=0.3,
            wrap=lambda device: FaultDevice(device, Fault(kind, 3)),
        )
        assert got == resident["mixtral"]

    @pytest.mark.parametrize("name", ["qwen2moe", "olmoe", "drelu"])
    @pytest.mark.parametrize("share", [0.5, None])
    def test_sequences_together_and_alone(
        self, files: dict[str, Path], name: str, share: float | None
    ) -> None:
        prompts = [PROMPT, PROMPT[::-1], PROMPT[2:7]]
        with LocalEngine(files[name], ffn_resident=share, max_sequences=3) as engine:
            assert_together_as_alone(engine, prompts)

    @pytest.mark.parametrize("isa_name", ["scalar", "avx2"])
    def test_any_isa(
        self, files: dict[str, Path], resident: dict[str, list[bytes]], isa_name: str
    ) -> None:
        got = logits_on(isa_name, files["qwen2moe"], ffn_resident=0.4)
        assert got == resident["qwen2moe"]

    @pytest.mark.parametrize("share", [0.4, None])
    def test_exact_equals_dense(
        self, files: dict[str, Path], resident: dict[str, list[bytes]], share: float | None
    ) -> None:
        """Leaving out neurons whose gate is shut changes no bit."""
        dense = logits_of(files["drelu"], mode=FeedForwardMode.DENSE, ffn_resident=share)
        assert dense == resident["drelu"]


class TestCache:
    def test_only_chosen_experts_are_read(self, files: dict[str, Path]) -> None:
        """The first token reads its experts' clusters, each once, and nothing else."""
        with LocalEngine(files["mixtral"], ffn_resident=0.6, max_tokens=1) as engine:
            engine.generate(PROMPT[:1], 1)
            rows = engine.layout.bundles.rows  # type: ignore[union-attr]
            reads = engine.arena.neuron_reads(engine.layout.at("boards.reads"))
            clusters = MIXTRAL.num_layers * MIXTRAL.num_used * MIXTRAL.d_ff // rows.cluster_neurons
            assert int(reads.reads) == clusters
            assert int(reads.bytes_read) == clusters * rows.cluster_neurons * rows.bundle_bytes

    def test_the_least_holds_what_a_step_uses(self, files: dict[str, Path]) -> None:
        with LocalEngine(files["mixtral"], ffn_resident=0.0, max_sequences=2) as engine:
            rows = engine.layout.bundles.rows  # type: ignore[union-attr]
            assert engine.budget.cold_slots == 2 * 2 * MIXTRAL.d_ff // rows.cluster_neurons

    def test_a_small_cache_is_told_of(self, files: dict[str, Path]) -> None:
        with LocalEngine(files["mixtral"], ffn_resident=0.0) as engine:
            assert any("experts" in text for text in engine.budget.warnings())
        with LocalEngine(files["mixtral"], ffn_resident=0.6) as engine:
            assert engine.budget.warnings() == []

    def test_activity_counts_the_chosen(self, files: dict[str, Path]) -> None:
        with LocalEngine(files["drelu"], ffn_resident=0.5) as engine:
            engine.generate(PROMPT, NUM_TOKENS)
            for layer in engine.activity():
                assert layer.predicted_share == pytest.approx(2 / 8)
                assert 0 < layer.active_share < layer.gated_share < layer.predicted_share


class TestFiles:
    @pytest.mark.parametrize("name", MODELS)
    def test_description_survives(self, files: dict[str, Path], name: str) -> None:
        spec = describe(read_header(files[name].with_suffix(".gguf")))
        assert spec == MODELS[name].spec()
        assert open_source(files[name]).spec == spec

    def test_tiles_are_refused(self, files: dict[str, Path], tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="--layout bundles"):
            convert(files["mixtral"].with_suffix(".gguf"), tmp_path / "x.ncf", layout=Layout.TILES)

    @pytest.mark.parametrize("mode", [FeedForwardMode.EXACT, FeedForwardMode.PREDICTED])
    def test_modes_that_cannot_be_are_refused(
        self, files: dict[str, Path], mode: FeedForwardMode
    ) -> None:
        with pytest.raises(ConfigError, match=f"--mode {mode}"):
            open_source(files["mixtral"]).resolve_mode(mode)

    def test_a_gguf_is_converted_before_it_runs(self, files: dict[str, Path]) -> None:
        source = open_source(files["mixtral"].with_suffix(".gguf"))
        assert source.layout_to_run(FeedForwardMode.AUTO, streams=False) is Layout.BUNDLES

    @pytest.mark.parametrize(
        ("metadata", "error"),
        [
            ({"llama.expert_used_count": 9}, "9 experts of 8"),
            ({"llama.expert_used_count": None}, "expert_used_count"),
            ({"llama.expert_count": 1}, "1 experts a layer"),
            ({"llama.expert_gating_func": 2}, "expert_gating_func"),
            ({"llama.leading_dense_block_count": 1}, "leading_dense_block_count"),
            ({"llama.expert_feed_forward_length": 33}, "multiples of 32"),
        ],
    )
    def test_bad_keys(self, tmp_path: Path, metadata: dict[str, object], error: str) -> None:
        path = write_tiny_gguf(tmp_path / "bad.gguf", MIXTRAL, metadata=metadata)
        with pytest.raises(PolyneuronError, match=error):
            describe(read_header(path))

    def test_experts_of_a_dense_family(self, tmp_path: Path) -> None:
        path = write_tiny_gguf(
            tmp_path / "bad.gguf", TinyModel(family="qwen3"), metadata={"qwen3.expert_count": 4}
        )
        with pytest.raises(UnsupportedError, match="expert_count"):
            describe(read_header(path))
