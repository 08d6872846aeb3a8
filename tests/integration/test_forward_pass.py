"""The step program computes the model: every family, and the same bits however it is cut up."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from polyneuron.kernels import isa
from polyneuron.kernels.quant import StorageType
from tests.support.families import FAMILY_CASES, gguf_path, golden_path
from tests.support.local_engine import LocalEngine, LocalResult
from tests.support.quantised_reference import QuantisedReference
from tests.support.reference_model import ReferenceModel
from tests.support.tiny_gguf import TinyModel, write_tiny_gguf

F32 = NDArray[np.float32]

# Of the largest logit. Float weights: what the KV cache's float16 rounds, and float32 sums.
FLOAT_BOUND = 1.5e-3
# Quantised weights meet activations in 8 bits: root of the mean square over the logits' own.
QUANTISED_BOUND = 0.06
# The same against a reference that rounds activations too; a rounding that falls the other way, for
# a difference in the last bit, costs a row up to 1e-2, and one layer leaves few of those.
ARITHMETIC_BOUND = 2e-6
NUM_DECODED = 12
BASE = TinyModel(num_heads=6, num_kv_heads=2, head_dim=32, d_model=192, d_ff=256, num_layers=3)


def run(
    path: Path, prompt: list[int], num_tokens: int = NUM_DECODED, **settings: Any
) -> LocalResult:
    with LocalEngine(
        path, **{"num_ctx": 128, "num_workers": 2, "num_npu_threads": 0} | settings
    ) as e:
        return e.generate(prompt, num_tokens)


def bits(results: list[LocalResult]) -> list[tuple[list[int], bytes]]:
    return [(r.tokens, np.concatenate(r.logits).tobytes()) for r in results]


def reference_logits(path: Path, prompt: list[int], result: LocalResult) -> NDArray[np.float64]:
    """What a float64 forward pass says of the same tokens, one row for each generated one."""
    history = np.array(prompt + result.tokens[:-1])
    rows: NDArray[np.float64] = ReferenceModel(path).logits(history)[len(prompt) - 1 :]
    return rows


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = replace(BASE, tensor_type="Q4_1", embedding_type="Q8_0")
    return write_tiny_gguf(tmp_path_factory.mktemp("model") / "q4_1.gguf", model)


@pytest.fixture
def prompt() -> list[int]:
    return [int(i) for i in np.random.default_rng(5).integers(0, 299, 70)]


@pytest.mark.parametrize("units", [(1, 0), (2, 0), (1, 1), (2, 2)])
@pytest.mark.parametrize("case", FAMILY_CASES)
class TestFamilies:
    def test_logits_equal_transformers(self, case: str, units: tuple[int, int]) -> None:
        """Prefill of prompts around a KV block's end, against goldens by another program."""
        golden = np.load(golden_path(case))
        bound = FLOAT_BOUND * np.abs(golden["logits"]).max()
        tokens = golden["token_ids"].tolist()
        workers, npu = units
        with LocalEngine(
            gguf_path(case), num_ctx=64, num_workers=workers, num_npu_threads=npu
        ) as engine:
            for length in (1, 2, 31, 32, 33, len(tokens)):
                logits = engine.generate(tokens[:length], 1).logits[0]
                np.testing.assert_allclose(logits, golden["logits"][length - 1], atol=bound)

    def test_decode_equals_reference(self, case: str, units: tuple[int, int]) -> None:
        tokens = np.load(golden_path(case))["token_ids"].tolist()[:25]
        workers, npu = units
        result = run(gguf_path(case), tokens, num_workers=workers, num_npu_threads=npu)
        expected = reference_logits(gguf_path(case), tokens, result)
        bound = FLOAT_BOUND * np.abs(expected).max()
        np.testing.assert_allclose(np.stack(result.logits), expected, atol=bound)


@pytest.mark.parametrize(
    "tensor_type", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q6_K"]
)
class TestStorage:
    def test_logits_are_near_the_reference(
        self, tensor_type: str, tmp_path: Path, prompt: list[int]
    ) -> None:
        model = replace(BASE, d_model=256, head_dim=64, num_heads=4, tensor_type=tensor_type)
        path = write_tiny_gguf(tmp_path / "m.gguf", model)
        result = run(path, prompt)
        expected = reference_logits(path, prompt, result)
        gap = np.stack(result.logits) - expected
        relative = float(np.sqrt(np.mean(gap**2) / np.mean(expected**2)))
        is_float = tensor_type in ("F32", "F16")
        print(f"{tensor_type}: {relative:.2e} of the logits' rms")
        assert relative < (FLOAT_BOUND if is_float else QUANTISED_BOUND)


@pytest.mark.parametrize("tensor_type", ["Q4_0", "Q4_1", "Q5_0", "Q8_0"])
class TestArithmetic:
    def test_logits_equal_rounded_reference(
        self, tensor_type: str, tmp_path: Path, prompt: list[int]
    ) -> None:
        """What is left when the reference rounds activations and cache alike: nothing."""
        path = write_tiny_gguf(
            tmp_path / "m.gguf",
            replace(
                BASE, num_layers=1, d_model=256, num_heads=4, head_dim=64, tensor_type=tensor_type
            ),
        )
        result = run(path, prompt[:9])
        history = np.array(prompt[:9] + result.tokens[:-1])
        expected = QuantisedReference(path).logits(history)[8:]
        square = np.mean((np.stack(result.logits) - expected) ** 2, axis=1)
        relative = np.sqrt(square / np.mean(expected**2))
        print(f"{tensor_type}: rows {np.sort(relative).round(7)}")
        assert np.count_nonzero(relative < ARITHMETIC_BOUND) >= 0.75 * len(relative)


class TestSameBits:
    @pytest.fixture(autouse=True)
    def restore_isa(self) -> Iterator[None]:
        before = isa.active()
        yield
        isa.select(before)

    @pytest.fixture
    def alone(self, quantised: Path, prompt: list[int]) -> LocalResult:
        return run(quantised, prompt, num_workers=1)

    @pytest.mark.parametrize("units", [(2, 0), (3, 0), (1, 1), (2, 1), (2, 2)])
    def test_number_of_executors_changes_nothing(
        self, quantised: Path, prompt: list[int], alone: LocalResult, units: tuple[int, int]
    ) -> None:
        workers, npu = units
        result = run(quantised, prompt, num_workers=workers, num_npu_threads=npu)
        assert bits([result]) == bits([alone])

    @pytest.mark.parametrize("chunk", [1, 7, 32, 69, 512])
    @pytest.mark.parametrize("npu", [0, 2])
    def test_chunks_of_prefill_change_nothing(
        self, quantised: Path, prompt: list[int], alone: LocalResult, chunk: int, npu: int
    ) -> None:
        result = run(quantised, prompt, max_tokens=chunk, num_npu_threads=npu)
        assert bits([result]) == bits([alone])

    @pytest.mark.parametrize("name", isa.supported())
    def test_instruction_set_changes_nothing(
        self, quantised: Path, prompt: list[int], alone: LocalResult, name: str
    ) -> None:
        assert bits([run(quantised, prompt, isa_name=name)]) == bits([alone])

    @pytest.mark.parametrize("case", ["llama_biases", "qwen3", "bamboo", "gemma2", "gemma3"])
    def test_float_weights_are_as_exact(self, case: str, prompt: list[int]) -> None:
        """Without quantised activations too: other kernels run there."""
        found = [
            run(gguf_path(case), prompt, max_tokens=chunk, num_workers=workers, isa_name=name)
            for chunk, workers in ((1, 1), (17, 2), (512, 3))
            for name in isa.supported()
        ]
        assert all(bits([one]) == bits([found[0]]) for one in found)

    def test_batch_changes_nothing(self, quantised: Path, prompt: list[int]) -> None:
        """Three sequences of different lengths in one decode step, against each alone."""
        prompts = [prompt, prompt[10:43], prompt[:3]]
        with LocalEngine(quantised, num_ctx=128, max_sequences=3) as engine:
            together = engine.run_all([engine.request(each, NUM_DECODED) for each in prompts])
            assert max(len(plan.rows) for plan in engine.plans if len(plan.logit_rows) > 1) == 3
            apart = [engine.generate(each, NUM_DECODED) for each in prompts]
        assert bits(together) == bits(apart)

    def test_used_blocks_change_nothing(self, quantised: Path, prompt: list[int]) -> None:
        """A sequence in blocks that others have filled is as one in a fresh cache."""
        with LocalEngine(quantised, num_ctx=128, max_sequences=2) as engine:
            first = engine.generate(prompt, NUM_DECODED)
            engine.run_all([engine.request(prompt[::-1], 40), engine.request([7] * 100, 20)])
            assert bits([engine.generate(prompt, NUM_DECODED)]) == bits([first])

    def test_prefill_equals_decode(self, quantised: Path, prompt: list[int]) -> None:
        """The generated tokens fed as a prompt give the logits they were generated with."""
        with LocalEngine(quantised, num_ctx=128) as engine:
            result = engine.generate(prompt, NUM_DECODED)
            for n in range(1, NUM_DECODED):
                again = engine.generate(prompt + result.tokens[:n], 1)
                assert again.logits[0].tobytes() == result.logits[n].tobytes()

    def test_full_context_is_used(self, quantised: Path, prompt: list[int]) -> None:
        """Up to the last position: prompt and answer fill the context."""
        result = run(quantised, prompt, 128 - len(prompt))
        assert len(result.tokens) == 128 - len(prompt)
        expected = reference_logits(quantised, prompt, result)
        gap = np.stack(result.logits) - expected
        assert float(np.sqrt(np.mean(gap**2) / np.mean(expected**2))) < QUANTISED_BOUND


def test_storage_types_are_all_met(tmp_path: Path) -> None:
    """The types above lead to every storage type that a model's weights can have."""
    met = set()
    for tensor_type in ("F32", "F16", "Q4_0", "Q4_1", "Q8_0"):
        path = write_tiny_gguf(tmp_path / "m.gguf", TinyModel(tensor_type=tensor_type))
        with LocalEngine(path, num_ctx=32) as engine:
            met |= {place.storage for place in engine.layout.weights.values()}
    assert met == {None, *(storage for storage in StorageType if storage.is_for_weights)}
