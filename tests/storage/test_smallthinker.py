"""SmallThinker: experts chosen before attention, layers without rotation, windows in the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from polyneuron.config import FeedForwardMode, Phase
from polyneuron.errors import UnsupportedError
from polyneuron.io.gguf_file import read_header
from polyneuron.kernels.arena import OpKind
from polyneuron.model.architecture import describe
from polyneuron.model.convert import convert
from polyneuron.model.spec import ModelSpec
from polyneuron.planning.source import open_source
from polyneuron.planning.step_program import compile_program
from tests.support.local_engine import LocalEngine
from tests.support.one_result import (
    NUM_TOKENS,
    PROMPT,
    assert_together_as_alone,
    logits_of,
)
from tests.support.predictors import write_oracle_models
from tests.support.reference_model import ReferenceModel
from tests.support.sparse_models import late_reads
from tests.support.tiny_gguf import TinyModel, write_tiny_gguf

SOFTMAX = TinyModel(
    family="smallthinker", num_layers=6, d_model=64, d_ff=96, num_experts=8, num_used=3,
    window=5, tensor_type="Q8_0",
)  # fmt: skip
MODELS = {"softmax": SOFTMAX, "sigmoid": replace(SOFTMAX, is_sigmoid=True, tensor_type="F16")}
FLOAT_BOUND = 1e-3  # of the largest logit
GLOBAL = (0, 4)
"""The first layer of every four."""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_oracle_models(tmp_path_factory.mktemp("smallthinker"), MODELS)


@pytest.fixture(scope="module")
def resident(files: dict[str, Path]) -> dict[str, list[bytes]]:
    """What each model gives when everything is in memory."""
    return {name: logits_of(path) for name, path in files.items()}


def with_experts(**changes: bool) -> Callable[[ModelSpec], ModelSpec]:
    """A change to what a description says of the mixture."""

    def changed(spec: ModelSpec) -> ModelSpec:
        assert spec.experts is not None
        return replace(spec, experts=replace(spec.experts, **changes))

    return changed


def with_block(**changes: int) -> Callable[[ModelSpec], ModelSpec]:
    """A change to what it says of layers."""
    return lambda spec: replace(spec, block=replace(spec.block, **changes))


class TestForwardPass:
    def expected(self, source: Path, tokens: list[int]) -> np.ndarray:
        reference = ReferenceModel(source)
        reference.cache_dtype = np.float16
        return reference.logits(np.array(tokens))[len(PROMPT) - 1 : -1]

    @pytest.mark.parametrize("name", MODELS)
    def test_logits_are_near_the_reference(self, name: str, tmp_path: Path) -> None:
        source = write_tiny_gguf(tmp_path / "a.gguf", replace(MODELS[name], tensor_type="F32"))
        convert(source, tmp_path / "a.ncf")
        with LocalEngine(tmp_path / "a.ncf", ffn_resident=0.4) as engine:
            result = engine.generate(PROMPT, NUM_TOKENS)
        expected = self.expected(source, PROMPT + result.tokens)
        difference = np.abs(np.array(result.logits) - expected).max()
        assert difference < FLOAT_BOUND * np.abs(expected).max()
        assert result.tokens == expected.argmax(axis=-1).tolist()

    @pytest.mark.parametrize(
        ("name", "wrong"),
        [
            pytest.param("softmax", with_experts(is_early=False), id="late router"),
            pytest.param("softmax", with_experts(is_sigmoid=True), id="sigmoid"),
            pytest.param("sigmoid", with_experts(is_sigmoid=False), id="softmax"),
            pytest.param("softmax", with_block(is_global_unrotated=False), id="all rotated"),
            pytest.param("softmax", with_block(is_first_global=False), id="last global"),
            pytest.param("softmax", with_block(window=0), id="no window"),
            pytest.param("softmax", with_block(window_period=3), id="other period"),
        ],
    )
    def test_a_wrong_rule_would_show(
        self, name: str, wrong: Callable[[ModelSpec], ModelSpec], tmp_path: Path
    ) -> None:
        source = write_tiny_gguf(tmp_path / "a.gguf", replace(MODELS[name], tensor_type="F32"))
        model = ReferenceModel(source)
        right = model.logits(np.array(PROMPT))
        model.spec = wrong(model.spec)
        assert np.abs(model.logits(np.array(PROMPT)) - right).max() > 1e-2 * np.abs(right).max()


class TestOneResult:
    @pytest.mark.parametrize("name", MODELS)
    @pytest.mark.parametrize("share", [0.0, 0.4])
    @pytest.mark.parametrize("lookahead", [False, True])
    def test_residencies(
        self,
        files: dict[str, Path],
        resident: dict[str, list[bytes]],
        name: str,
        share: float,
        lookahead: bool,
    ) -> None:
        got = logits_of(files[name], ffn_resident=share, lookahead=lookahead, max_sequences=1)
        assert got == resident[name]

    @pytest.mark.parametrize("num_workers", [1, 3])
    @pytest.mark.parametrize("keep_neurons", [False, True])
    def test_late_reads_and_worker_counts(
        self,
        files: dict[str, Path],
        resident: dict[str, list[bytes]],
        num_workers: int,
        keep_neurons: bool,
    ) -> None:
        got = logits_of(
            files["softmax"], ffn_resident=0.3, num_workers=num_workers, num_npu_threads=0,
            keep_neurons=keep_neurons, wrap=late_reads(),
        )  # fmt: skip
        assert got == resident["softmax"]

    @pytest.mark.parametrize("max_tokens", [1, 2, 4])
    def test_prompts_in_chunks_and_token_by_token(
        self, files: dict[str, Path], resident: dict[str, list[bytes]], max_tokens: int
    ) -> None:
        got = logits_of(files["sigmoid"], ffn_resident=0.3, max_tokens=max_tokens)
        assert got == resident["sigmoid"]

    @pytest.mark.parametrize("mode", [FeedForwardMode.DENSE, FeedForwardMode.PREDICTED])
    @pytest.mark.parametrize("share", [0.4, None])
    def test_other_modes(
        self,
        files: dict[str, Path],
        resident: dict[str, list[bytes]],
        mode: FeedForwardMode,
        share: float | None,
    ) -> None:
        """All neurons of chosen experts, and those that perfect predictors name."""
        assert logits_of(files["softmax"], mode=mode, ffn_resident=share) == resident["softmax"]

    def test_sequences_together_and_alone(self, files: dict[str, Path]) -> None:
        with LocalEngine(files["softmax"], ffn_resident=0.5, max_sequences=3) as engine:
            assert_together_as_alone(engine, [PROMPT, PROMPT[::-1], PROMPT[2:7]])


class TestProgram:
    @pytest.mark.parametrize("lookahead", [False, True])
    def test_missing_experts_are_ordered_before_attention(
        self, files: dict[str, Path], lookahead: bool
    ) -> None:
        with LocalEngine(files["softmax"], ffn_resident=0.4, lookahead=lookahead) as engine:
            ops = compile_program(engine.source.spec, engine.layout, Phase.DECODE)
        kinds = [op.kind for op in ops if op.layer == 2]
        assert kinds.index(OpKind.ROUTE) < kinds.index(OpKind.ATTENTION)
        is_before = kinds.index(OpKind.EXPERTS) < kinds.index(OpKind.ATTENTION)
        assert is_before is lookahead and kinds.count(OpKind.EXPERTS) == 1

    def test_global_layers_are_not_rotated(self, files: dict[str, Path]) -> None:
        with LocalEngine(files["softmax"]) as engine:
            ops = compile_program(engine.source.spec, engine.layout, Phase.DECODE)
        for op in ops:
            if op.kind is OpKind.ROPE_KV:
                assert (op.rotary_dim == 0) is (op.layer in GLOBAL)
            if op.kind is OpKind.ATTENTION:
                assert op.rows == (0 if op.layer in GLOBAL else 5)


class TestFiles:
    @pytest.mark.parametrize("name", MODELS)
    def test_description_survives(self, files: dict[str, Path], name: str) -> None:
        spec = describe(read_header(files[name].with_suffix(".gguf")))
        assert spec == MODELS[name].spec()
        assert open_source(files[name]).spec == spec

    def test_without_a_window_every_layer_is_rotated(self, tmp_path: Path) -> None:
        key = {"smallthinker.attention.sliding_window": 0}
        spec = describe(read_header(write_tiny_gguf(tmp_path / "a.gguf", SOFTMAX, metadata=key)))
        assert all(spec.block.is_rotated(layer) for layer in range(6))
        assert not any(spec.block.window_of(layer) for layer in range(6))

    def test_other_gates_are_refused(self, tmp_path: Path) -> None:
        path = write_tiny_gguf(
            tmp_path / "a.gguf", SOFTMAX, metadata={"smallthinker.expert_gating_func": 3}
        )
        with pytest.raises(UnsupportedError, match="expert_gating_func"):
            describe(read_header(path))
