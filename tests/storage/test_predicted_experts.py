"""Predicted mode of experts: a router, then a predictor of each chosen expert's neurons."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from polyneuron.config import FeedForwardMode
from polyneuron.io.device_wrappers import Fault, FaultDevice, FaultKind
from polyneuron.io.predictor_file import PredictorInput
from tests.support import one_result
from tests.support.local_engine import LocalEngine
from tests.support.one_result import (
    NUM_TOKENS,
    PROMPT,
    assert_together_as_alone,
    predicted_logits_of,
)
from tests.support.predictors import write_oracle_models, write_random
from tests.support.sparse_models import late_reads
from tests.support.tiny_gguf import TinyModel

PREDICTED, EXACT = FeedForwardMode.PREDICTED, FeedForwardMode.EXACT
DRELU = TinyModel(
    family="turbosparsemixtral", num_layers=3, d_model=64, d_ff=96, num_experts=8, num_used=2,
    tied_head=False, tensor_type="Q8_0",
)  # fmt: skip
MODELS = {
    "drelu": DRELU,
    "drelu_q4": replace(DRELU, tensor_type="Q4_0", num_used=3),
    "drelu_f16": replace(DRELU, tensor_type="F16", num_experts=5, num_used=1, d_ff=320),
    "reglu": replace(DRELU, family="llama", activation="relu", d_ff=160),
    "shared": replace(DRELU, family="qwen2moe", activation="relu", shared_d_ff=64, num_used=4),
}
SHARES = (0.0, 0.3, 0.6, None)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A file of each model, perfect predictors beside it."""
    return write_oracle_models(tmp_path_factory.mktemp("named_experts"), MODELS)


@pytest.fixture(scope="module")
def exact(files: dict[str, Path]) -> dict[str, list[bytes]]:
    """What each model gives in exact mode, in memory."""
    return {name: predicted_logits_of(path, mode=EXACT) for name, path in files.items()}


@pytest.fixture
def model(files: dict[str, Path], tmp_path: Path) -> Path:
    """The dReLU model under a name that other predictors may be written beside."""
    path = tmp_path / "drelu.ncf"
    path.symlink_to(files["drelu"])
    return path


class TestPerfectPredictors:
    """They name what exact mode computes: byte for byte the same, wherever neurons lie."""

    @pytest.mark.parametrize("name", MODELS)
    @pytest.mark.parametrize("share", SHARES)
    def test_residencies(
        self, files: dict[str, Path], exact: dict[str, list[bytes]], name: str, share: float | None
    ) -> None:
        assert predicted_logits_of(files[name], ffn_resident=share, max_sequences=1) == exact[name]

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
            files["shared"], ffn_resident=0.4, num_workers=num_workers, num_npu_threads=0,
            matrix_barrier=matrix_barrier, keep_neurons=keep_neurons,
        )  # fmt: skip
        assert got == exact["shared"]

    @pytest.mark.parametrize("max_tokens", [1, 2, 4])
    def test_prompts_in_chunks_and_token_by_token(
        self, files: dict[str, Path], exact: dict[str, list[bytes]], max_tokens: int
    ) -> None:
        got = predicted_logits_of(files["drelu_q4"], ffn_resident=0.3, max_tokens=max_tokens)
        assert got == exact["drelu_q4"]

    def test_late_and_unordered_reads(
        self, files: dict[str, Path], exact: dict[str, list[bytes]]
    ) -> None:
        assert (
            predicted_logits_of(files["drelu"], ffn_resident=0.3, wrap=late_reads())
            == exact["drelu"]
        )

    @pytest.mark.parametrize("kind", [FaultKind.EIO, FaultKind.SHORT_READ])
    def test_a_read_that_fails_once_is_tried_again(
        self, files: dict[str, Path], exact: dict[str, list[bytes]], kind: FaultKind
    ) -> None:
        got = predicted_logits_of(
            files["drelu"],
            ffn_resident=0.3,
            wrap=lambda device: FaultDevice(device, Fault(kind, 3)),
        )
        assert got == exact["drelu"]

    @pytest.mark.parametrize("name", ["drelu", "shared"])
    @pytest.mark.parametrize("share", [0.5, None])
    def test_sequences_together_and_alone(
        self, files: dict[str, Path], name: str, share: float | None
    ) -> None:
        prompts = [PROMPT, PROMPT[::-1], PROMPT[2:7]]
        with LocalEngine(
            files[name], ffn_resident=share, max_sequences=3, mode=PREDICTED
        ) as engine:
            assert_together_as_alone(engine, prompts)

    @pytest.mark.parametrize("isa_name", ["scalar", "avx2"])
    def test_any_isa(
        self, files: dict[str, Path], exact: dict[str, list[bytes]], isa_name: str
    ) -> None:
        got = one_result.logits_on(isa_name, files["drelu"], ffn_resident=0.4, mode=PREDICTED)
        assert got == exact["drelu"]


class TestOtherPredictors:
    """Lossy ones: how the rows came, and who computed them, must still change nothing."""

    @pytest.mark.parametrize("input", list(PredictorInput))
    @pytest.mark.parametrize(("rank", "is_twice"), [(0, False), (0, True), (32, False)])
    def test_one_result(
        self, model: Path, input: PredictorInput, rank: int, is_twice: bool
    ) -> None:
        write_random(model, input=input, rank=rank, share=0.4, is_twice=is_twice)
        resident = predicted_logits_of(model)
        assert predicted_logits_of(model, ffn_resident=0.3) == resident
        assert (
            predicted_logits_of(model, ffn_resident=0.3, num_workers=1, num_npu_threads=0)
            == resident
        )
        assert predicted_logits_of(model, ffn_resident=0.4, matrix_barrier=True) == resident
        assert predicted_logits_of(model, ffn_resident=0.4, lookahead=False) == resident

    def test_it_is_lossy(self, model: Path, exact: dict[str, list[bytes]]) -> None:
        write_random(model, input=PredictorInput.FFN, rank=32, share=0.4)
        assert predicted_logits_of(model) != exact["drelu"]

    def test_naming_everything_is_exact(self, model: Path, exact: dict[str, list[bytes]]) -> None:
        write_random(model, input=PredictorInput.FFN, rank=32, share=1.0)
        assert predicted_logits_of(model, ffn_resident=0.4) == exact["drelu"]

    @pytest.mark.parametrize("rank", [0, 32])
    def test_sequences_do_not_change_each_other(self, model: Path, rank: int) -> None:
        """A token scores the neurons of its own experts alone."""
        write_random(model, input=PredictorInput.FFN, rank=rank, share=0.4)
        prompts = [PROMPT, PROMPT[::-1], PROMPT[2:7]]
        with LocalEngine(model, ffn_resident=0.5, max_sequences=3, mode=PREDICTED) as engine:
            assert_together_as_alone(engine, prompts)


class TestCache:
    def test_only_named_neurons_of_chosen_experts_are_read(self, model: Path) -> None:
        """The first token reads each neuron that it names once, and nothing else."""
        write_random(model, input=PredictorInput.FFN, rank=32, share=0.4)
        with LocalEngine(model, ffn_resident=0.6, max_tokens=1, mode=PREDICTED) as engine:
            engine.generate(PROMPT[:1], 1)
            rows = engine.layout.bundles.rows  # type: ignore[union-attr]
            reads = engine.arena.neuron_reads(engine.layout.at("boards.reads"))
            named = sum(layer.predicted_share * rows.num_neurons for layer in engine.activity())
            chosen = DRELU.num_layers * DRELU.num_used * DRELU.d_ff
            assert 0 < round(named) < chosen
            assert int(reads.reads) == round(named)
            assert int(reads.bytes_read) == round(named) * rows.slot_bytes

    def test_the_least_holds_what_a_step_uses(self, files: dict[str, Path]) -> None:
        settings = {"ffn_resident": 0.0, "max_sequences": 2, "mode": PREDICTED}
        with LocalEngine(files["drelu"], **settings) as engine:
            assert engine.budget.cold_slots == 2 * DRELU.num_used * DRELU.d_ff

    def test_a_step_that_needs_every_slot_evicts_nothing_it_needs(
        self, model: Path, exact: dict[str, list[bytes]]
    ) -> None:
        """Every neuron of the chosen experts is named, and there are slots for just those."""
        write_random(model, input=PredictorInput.FFN, rank=32, share=1.0)
        settings = {"ffn_resident": 0.0, "max_sequences": 1, "max_tokens": 1}
        with LocalEngine(model, mode=PREDICTED, **settings) as engine:
            assert engine.budget.cold_slots == DRELU.num_used * DRELU.d_ff
            assert one_result.run(engine) == exact["drelu"]

    def test_hits_with_less_than_a_token_needs(self, model: Path) -> None:
        """The plan says so, and the cache still has some of what tokens use again."""
        write_random(model, input=PredictorInput.FFN, rank=32, share=0.4)
        settings = {"ffn_resident": 0.0, "max_sequences": 1, "max_tokens": 1}
        with LocalEngine(model, mode=PREDICTED, **settings) as engine:
            engine.generate(PROMPT, 24)
            reads = engine.arena.neuron_reads(engine.layout.at("boards.reads"))
            rows = engine.layout.bundles.rows  # type: ignore[union-attr]
            tokens = len(PROMPT) + 23
            named = sum(a.predicted_share * rows.num_neurons for a in engine.activity()) * tokens
            assert int(reads.reads) < 0.95 * named

    def test_activity_counts_the_named(self, files: dict[str, Path]) -> None:
        with LocalEngine(files["drelu"], ffn_resident=0.5, mode=PREDICTED) as engine:
            engine.generate(PROMPT, NUM_TOKENS)
            for layer in engine.activity():
                assert 0 < layer.active_share < layer.predicted_share < 2 / 8
                assert layer.gated_share == pytest.approx(layer.predicted_share)
