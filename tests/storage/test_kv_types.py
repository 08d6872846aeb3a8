"""Keys and values as q8 and q4 in a whole model: one result, memory, error, what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from polyneuron.config import EngineConfig, KvType
from polyneuron.errors import ConfigError
from polyneuron.io_report import kv_rms_error
from polyneuron.model.locate import locate_model
from polyneuron.model.tokenizer import Tokenizer
from polyneuron.planning.attention import kv_position_bytes
from polyneuron.planning.budget import resolve_config
from tests.support.local_engine import LocalEngine
from tests.support.one_result import PROMPT, assert_together_as_alone, logits_of, logits_on
from tests.support.sources import text_of
from tests.support.tiny_gguf import TinyModel, write_tiny_gguf

MODEL = TinyModel(
    num_heads=6, num_kv_heads=2, head_dim=64, d_model=192, d_ff=256, num_layers=3,
    tensor_type="Q8_0",
)  # fmt: skip
LOSSY = (KvType.Q8, KvType.Q4)
TOKENS = [int(i) for i in np.random.default_rng(21).integers(0, 299, 70)]
# Of the largest logit, random weights: what rounding keys and values moves any logit by.
LOGIT_BOUNDS = {KvType.F16: 0.0, KvType.Q8: 0.08, KvType.Q4: 0.3}
RMS_BOUNDS = {KvType.Q8: (2e-3, 6e-3), KvType.Q4: (0.05, 0.11)}
# By bytes a head and position: f16 4 of 64 values and their scales.
BYTES_OF_HEAD = {KvType.F16: 256, KvType.Q8: 136, KvType.Q4: 72}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("kv") / "model.gguf", MODEL)


class TestOneResult:
    @pytest.mark.parametrize("kv_type", LOSSY)
    @pytest.mark.parametrize("chunk", [3, 33, 512])
    def test_prompts_equal_decode(self, path: Path, kv_type: KvType, chunk: int) -> None:
        with LocalEngine(path, max_tokens=1, kv_type=kv_type) as engine:
            alone = [engine.generate(TOKENS[:n], 1).logits[0].tobytes() for n in (1, 33, 70)]
        with LocalEngine(path, max_tokens=chunk, kv_type=kv_type) as engine:
            assert [
                engine.generate(TOKENS[:n], 1).logits[0].tobytes() for n in (1, 33, 70)
            ] == alone

    @pytest.mark.parametrize("kv_type", LOSSY)
    @pytest.mark.parametrize("isa_name", ["scalar", "avx2"])
    def test_any_isa(self, path: Path, kv_type: KvType, isa_name: str) -> None:
        assert logits_on(isa_name, path, kv_type=kv_type) == logits_of(path, kv_type=kv_type)

    @pytest.mark.parametrize("kv_type", LOSSY)
    def test_any_workers_and_batches(self, path: Path, kv_type: KvType) -> None:
        with LocalEngine(path, kv_type=kv_type, max_sequences=3, num_workers=3) as engine:
            assert_together_as_alone(engine, [PROMPT, PROMPT[2:], PROMPT[:4]])

    @pytest.mark.parametrize("kv_type", KvType)
    def test_candidates_share_blocks_of_their_prompt(self, path: Path, kv_type: KvType) -> None:
        """The last block of a prompt is copied for each of them, whatever it holds."""
        with LocalEngine(path, kv_type=kv_type, max_sequences=3) as engine:
            group = engine.candidates(TOKENS[:40], [5, 5, 5])
            together = engine.run_arriving([(0, group)])
            alone = engine.generate(TOKENS[:40], 5)
        expected = [row.tobytes() for row in alone.logits]
        assert [[row.tobytes() for row in each.logits] for each in together] == [expected] * 3


class TestError:
    @pytest.mark.parametrize("kv_type", KvType)
    def test_logits_stay_in_bounds(self, path: Path, kv_type: KvType) -> None:
        with LocalEngine(path) as engine:
            exact = engine.generate(TOKENS, 1).logits[0]
        with LocalEngine(path, kv_type=kv_type) as engine:
            got = engine.generate(TOKENS, 1).logits[0]
        off = float(np.abs(got - exact).max() / np.abs(exact).max())
        assert off <= LOGIT_BOUNDS[kv_type]
        assert (off > 0) == (kv_type is not KvType.F16)

    @pytest.mark.parametrize("kv_type", LOSSY)
    def test_what_is_stored_is_off_by_so_much(self, path: Path, kv_type: KvType) -> None:
        with LocalEngine(path, kv_type=kv_type) as engine:
            assert kv_rms_error(engine.arena, engine.layout) is None  # nothing stored yet
            engine.generate(TOKENS, 1)
            error = kv_rms_error(engine.arena, engine.layout)
        low, high = RMS_BOUNDS[kv_type]
        assert error is not None and low < error < high

    def test_f16_has_none_to_tell(self, path: Path) -> None:
        with LocalEngine(path) as engine:
            engine.generate(TOKENS, 1)
            assert kv_rms_error(engine.arena, engine.layout) is None


class TestMemory:
    @pytest.mark.parametrize("kv_type", KvType)
    def test_budget_counts_what_is_stored(self, path: Path, kv_type: KvType) -> None:
        with LocalEngine(path, kv_type=kv_type, num_ctx=256, max_sequences=2) as engine:
            spec, rows = engine.spec, dict(engine.budget.rows())
        assert kv_position_bytes(spec, kv_type) == 3 * 2 * BYTES_OF_HEAD[kv_type]
        # 256 positions of each sequence, in whole pages
        wanted = 2 * 256 * kv_position_bytes(spec, kv_type)
        assert wanted <= rows[f"KV cache ({kv_type})"] < wanted + 4096

    def test_heads_that_fill_no_blocks_are_refused(self) -> None:
        spec = replace(MODEL, head_dim=80).spec()
        for kv_type in LOSSY:
            with pytest.raises(ConfigError, match=f"--kv-type {kv_type}: .* have 80 values, .*f16"):
                resolve_config(EngineConfig(kv_type=kv_type), spec)
        assert resolve_config(EngineConfig(), spec).kv_type is KvType.F16

    def test_another_name_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="kv_type is 'q5': must be one of f16, q8, q4"):
            EngineConfig(kv_type="q5")  # type: ignore[arg-type]
        assert EngineConfig(kv_type="q8").kv_type is KvType.Q8  # type: ignore[arg-type]


class TestFullContext:
    @pytest.mark.parametrize("kv_type", KvType)
    @pytest.mark.parametrize("num_ctx", [64, 70])
    def test_ends_by_length_and_shifts_nothing(
        self, path: Path, kv_type: KvType, num_ctx: int
    ) -> None:
        """As many tokens as fit, each what a larger context gives; then the end."""
        with LocalEngine(path, kv_type=kv_type, num_ctx=256) as engine:
            roomy = engine.generate(TOKENS[:60], 20)
        with LocalEngine(path, kv_type=kv_type, num_ctx=num_ctx) as engine:
            full = engine.generate(TOKENS[:60], num_ctx - 60)
        assert full.finish_reason == "length"
        assert full.tokens == roomy.tokens[: num_ctx - 60]


@pytest.fixture(scope="module")
def scores() -> dict[KvType, np.ndarray]:
    """Log-probabilities of the same tokens by type."""
    try:
        path = locate_model("smollm2")
    except ConfigError as error:
        pytest.skip(str(error))
    text = text_of("docs/DESIGN.md")
    assert text is not None
    found = {}
    for kv_type in KvType:
        with LocalEngine(path, kv_type=kv_type, max_logit_rows=64, num_ctx=512) as engine:
            tokenizer = Tokenizer.from_metadata(engine.source.metadata, "smollm2")
            tokens = tokenizer.encode(text, parse_special=False)[:1536]
            chunks = [tokens[at : at + 512] for at in range(0, 1536, 512)]
            found[kv_type] = np.array([s for chunk in chunks for s in engine.score(chunk, 256)])
    return found


class TestRealModel:
    """SmolLM2 on this project's own design page; docs/DESIGN.md has figures of a long text."""

    @pytest.mark.parametrize(("kv_type", "bound"), [(KvType.Q8, 0.02), (KvType.Q4, 0.2)])
    def test_perplexity_rises_by_so_much(
        self, scores: dict[KvType, np.ndarray], kv_type: KvType, bound: float
    ) -> None:
        """765 tokens: int8 activations alone move the mean by about 0.004 with any change."""
        rise = float(np.mean(scores[KvType.F16] - scores[kv_type]))
        assert rise != 0 and abs(rise) < bound
