"""The KV cache on actors: pages come as contexts grow, a full context ends a request."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from polyneuron import Engine
from polyneuron.errors import ContextError
from polyneuron.planning.attention import kv_position_bytes
from tests.support.engines import GREEDY, MODEL, PROMPT, held_bytes
from tests.support.program import run
from tests.support.tiny_gguf import write_tiny_gguf

pytestmark = pytest.mark.ray

NUM_CTX = 32768


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kv")
    return write_tiny_gguf(folder / "long.gguf", replace(MODEL, context_length=NUM_CTX))


class TestPages:
    def test_a_long_context_costs_what_it_holds(self, path: Path) -> None:
        """Of 32,768 positions none are in memory at first, then about those that were computed."""
        settings = {"num_ctx": NUM_CTX, "num_workers": 1, "max_sequences": 1}
        with Engine(str(path), kv_type="q8", **settings) as engine:
            whole = engine.layout.spans["kv"].num_bytes
            assert whole >= NUM_CTX * kv_position_bytes(engine.spec, engine.config.kv_type)
            assert held_bytes(engine, "kv") == 0
            engine.generate(PROMPT * 8, max_tokens=4, sampling=GREEDY)
            held = held_bytes(engine, "kv")
            positions = 320 + 4
        wanted = positions * kv_position_bytes(engine.spec, engine.config.kv_type)
        assert wanted <= held < 2 * wanted < whole // 16


class TestFullContext:
    def test_ends_by_length(self, path: Path) -> None:
        with Engine(str(path), num_ctx=64, num_workers=1, max_sequences=2) as engine:
            answer = engine.generate(PROMPT, sampling=GREEDY, ignore_eos=True)
            assert answer.finish_reason == "length"
            assert len(answer.tokens) == 64 - len(PROMPT)
            asked = engine.generate(PROMPT, max_tokens=1000, sampling=GREEDY, ignore_eos=True)
            assert (asked.tokens, asked.finish_reason) == (answer.tokens, "length")
            both = engine.generate(PROMPT, sampling=GREEDY, ignore_eos=True, best_of=2)
            assert (both.tokens, both.finish_reason) == (answer.tokens, "length")
            with pytest.raises(ContextError, match="the prompt has 64 tokens, the context 64"):
                engine.generate(PROMPT + PROMPT[:24])

    def test_run_says_so(self, path: Path, capfd: pytest.CaptureFixture[str]) -> None:
        words = ("-m", path, "-p", "abc", "-c", "48", "-n", "-1", "--ignore-eos", "--temp", "0")
        assert run("run", *words, "--kv-type", "q4", "-t", "1") == 0
        err = capfd.readouterr().err
        assert "ended by length" in err
        assert "context 48 (keys and values as q4, lossy)" in err
        assert "KV cache q4" in err and "rms off" in err
