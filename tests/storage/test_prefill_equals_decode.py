"""A prompt's logits are those of its tokens decoded one by one, byte for byte."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from polyneuron.config import FeedForwardMode, Phase
from polyneuron.io.ncf_format import Layout
from polyneuron.model.convert import convert
from tests.support.local_engine import LocalEngine
from tests.support.sparse_models import drelu_model
from tests.support.tiny_gguf import TinyModel, write_tiny_gguf

NUM_PROMPT = 70
"""More than two KV blocks, no multiple of anything a kernel groups by."""
CHUNKS = (3, 7, 32, 33, 69, 512)
EXACT, DENSE = FeedForwardMode.EXACT, FeedForwardMode.DENSE


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    return [int(i) for i in np.random.default_rng(11).integers(0, 299, NUM_PROMPT)]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[Layout, Path]:
    """A gated model in tiles, and a sparse one in bundles."""
    folder = tmp_path_factory.mktemp("prefill")
    paths = {}
    dense = TinyModel(
        num_heads=6, num_kv_heads=2, head_dim=32, d_model=192, d_ff=256, num_layers=3,
        tensor_type="Q4_1", embedding_type="Q8_0",
    )  # fmt: skip
    for layout, model in ((Layout.TILES, dense), (Layout.BUNDLES, drelu_model(5))):
        source = write_tiny_gguf(folder / f"{layout}.gguf", model)
        paths[layout] = folder / f"{layout}.ncf"
        convert(source, paths[layout], layout=layout)
    return paths


def one_by_one(path: Path, prompt: list[int], **settings: object) -> list[bytes]:
    """Logits after 1, 2, 33 and all tokens, each a step of its own through the decode program."""
    with LocalEngine(path, max_tokens=1, max_sequences=1, **settings) as engine:
        rows = [engine.generate(prompt[:n], 1).logits[0] for n in (1, 2, 33, len(prompt))]
        assert {len(plan.rows) for plan in engine.plans} == {1}
    return [row.tobytes() for row in rows]


def in_chunks(path: Path, prompt: list[int], chunk: int, **settings: object) -> list[bytes]:
    """The same, of prompts computed in chunks."""
    with LocalEngine(path, max_tokens=chunk, **settings) as engine:
        rows = [engine.generate(prompt[:n], 1).logits[0] for n in (1, 2, 33, len(prompt))]
        prompts = [plan for plan in engine.plans if plan.phase is Phase.PREFILL]
        assert max(len(plan.rows) for plan in prompts) == min(chunk, len(prompt))
    return [row.tobytes() for row in rows]


@pytest.fixture(scope="module")
def expected(files: dict[Layout, Path], prompt: list[int]) -> dict[Layout, list[bytes]]:
    """Of each file one by one: tiles in memory, neurons of bundles read as they are needed."""
    return {
        Layout.TILES: one_by_one(files[Layout.TILES], prompt),
        Layout.BUNDLES: one_by_one(files[Layout.BUNDLES], prompt, mode=EXACT, ffn_resident=0.4),
    }


class TestPrefillEqualsDecode:
    @pytest.mark.parametrize("chunk", CHUNKS)
    @pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
    def test_tiles(
        self,
        files: dict[Layout, Path],
        expected: dict[Layout, list[bytes]],
        prompt: list[int],
        chunk: int,
        share: float,
    ) -> None:
        got = in_chunks(files[Layout.TILES], prompt, chunk, ffn_resident=share)
        assert got == expected[Layout.TILES]

    @pytest.mark.parametrize("chunk", CHUNKS)
    @pytest.mark.parametrize("mode", [EXACT, DENSE])
    @pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
    def test_bundles(
        self,
        files: dict[Layout, Path],
        expected: dict[Layout, list[bytes]],
        prompt: list[int],
        chunk: int,
        mode: FeedForwardMode,
        share: float,
    ) -> None:
        """Sparse reads of single neurons against layers that pass through in order."""
        got = in_chunks(files[Layout.BUNDLES], prompt, chunk, mode=mode, ffn_resident=share)
        assert got == expected[Layout.BUNDLES]

    @pytest.mark.parametrize("units", [(1, 0), (2, 1), (3, 2)])
    def test_any_executors(
        self,
        files: dict[Layout, Path],
        expected: dict[Layout, list[bytes]],
        prompt: list[int],
        units: tuple[int, int],
    ) -> None:
        workers, npu = units
        got = in_chunks(
            files[Layout.BUNDLES], prompt, 32,
            ffn_resident=0.4, num_workers=workers, num_npu_threads=npu,
        )  # fmt: skip
        assert got == expected[Layout.BUNDLES]


class TestLongPrompts:
    def test_two_thousand_positions(self, tmp_path: Path) -> None:
        """Blocks of tokens over 64 blocks of keys, in chunks that end inside of both."""
        model = TinyModel(
            num_heads=6, num_kv_heads=2, head_dim=32, d_model=192, num_layers=1,
            tensor_type="Q8_0", context_length=2048,
        )  # fmt: skip
        path = write_tiny_gguf(tmp_path / "long.gguf", model)
        prompt = [int(i) for i in np.random.default_rng(12).integers(0, 299, 2040)]
        settings = {"num_ctx": 2048, "num_workers": 1, "num_npu_threads": 0}
        rows = []
        for chunk in (1, 512, 700):
            with LocalEngine(path, max_tokens=chunk, max_sequences=1, **settings) as engine:
                rows.append(engine.generate(prompt, 1).logits[0].tobytes())
        assert rows[0] == rows[1] == rows[2]


class TestShortPrompts:
    @pytest.mark.parametrize("limit", [0, 1, 7, 33, 64])
    def test_either_program_gives_the_same(
        self,
        files: dict[Layout, Path],
        expected: dict[Layout, list[bytes]],
        prompt: list[int],
        limit: int,
    ) -> None:
        """Up to the limit neurons are read as they are needed, by a graph of decode."""
        settings = {"ffn_resident": 0.4, "sparse_prompt_tokens": limit}
        with LocalEngine(files[Layout.BUNDLES], max_tokens=512, **settings) as engine:
            rows = [engine.generate(prompt[:n], 1).logits[0] for n in (1, 2, 33, len(prompt))]
            sizes = [len(plan.rows) for plan in engine.plans]
            told = dict(zip(sizes, engine.graphs, strict=True))
        assert [row.tobytes() for row in rows] == expected[Layout.BUNDLES]
        assert told == {n: "decode.0" if n <= limit else "prefill" for n in (1, 2, 33, NUM_PROMPT)}

    def test_a_decode_step_is_one_at_any_limit(
        self, files: dict[Layout, Path], prompt: list[int]
    ) -> None:
        with LocalEngine(files[Layout.BUNDLES], sparse_prompt_tokens=0) as engine:
            engine.generate(prompt[:5], 3)
            assert engine.graphs == ["prefill", "decode.0", "decode.0"]


class TestHotSet:
    def test_stays_while_a_prompt_passes(
        self, files: dict[Layout, Path], prompt: list[int]
    ) -> None:
        """What decode has in memory is read no second time after a prompt (PAPER §1.4)."""
        with LocalEngine(files[Layout.BUNDLES], max_tokens=32, ffn_resident=0.9) as engine:
            cache = engine.cache()
            for _ in range(4):  # until what it needs has come and nothing of that is given up
                engine.generate(prompt[:1], 2)
            engine.generate(prompt[1:], 0)  # in chunks; their layers pass through the stage
            before = cache.counters()
            engine.generate(prompt[:1], 2)
            after = cache.counters()
        assert after.hits > before.hits
        assert after.misses == before.misses
