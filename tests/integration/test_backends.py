"""Back ends inside the step program: the same bits, or within a bound; and what fails goes on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from polyneuron.backends.backend import Buffers, Capabilities, Graph, ShapeBucket
from polyneuron.backends.native import NativeBackend, NativeGraph
from polyneuron.io.ncf_format import Layout
from polyneuron.model.convert import convert
from tests.support.families import FAMILY_CASES, gguf_path
from tests.support.local_engine import LocalEngine, LocalResult
from tests.support.reference_model import ReferenceModel
from tests.support.tiny_gguf import TinyModel, write_tiny_gguf

MODELLED = "native:gops=1e9"
"""A device without limits that matter."""
PROMPT = [(7 * i + 3) % 60 for i in range(50)]
NUM_TOKENS = 4
BASE = TinyModel(num_heads=6, num_kv_heads=2, head_dim=32, d_model=192, d_ff=320, num_layers=3)
FFN_OPS, ATTENTION_OPS = 2, 2
"""Of a layer: gate with up, down; q with k and v, output."""
OPS_PER_CHUNK = BASE.num_layers * (FFN_OPS + ATTENTION_OPS)


class RaisingBackend(NativeBackend):
    """Fails in a way nobody has thought of, from its n-th run on."""

    def __init__(self, runs: int) -> None:
        self.left = runs

    def run(self, graph: Graph) -> None:
        """As `Backend`; KeyError when its runs are used up."""
        if self.left == 0:
            raise KeyError("no such thing\nin two lines")
        self.left -= 1
        super().run(graph)


class SlowCompiler(NativeBackend):
    """Compiles nothing before a graph was asked for often; counts threads' runs."""

    def __init__(self) -> None:
        self.runs = 0

    def run(self, graph: Graph) -> None:
        """As `Backend`."""
        self.runs += 1
        super().run(graph)


class Choosy(NativeBackend):
    """Takes no weights of any kind."""

    def capabilities(self) -> Capabilities:
        """As `Backend`."""
        return replace(super().capabilities(), storages=frozenset())

    def compile(self, bucket: ShapeBucket) -> NativeGraph:
        """As `Backend`; must not be called."""
        raise AssertionError(f"compiled {bucket}")

    def bind(self, graph: Graph, buffers: Buffers) -> None:
        """As `Backend`; must not be called."""
        raise AssertionError("bound")


@pytest.fixture(scope="module", params=["Q4_0", "Q4_1", "Q8_0", "F16"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = replace(BASE, tensor_type=request.param, embedding_type="Q8_0")
    return write_tiny_gguf(tmp_path_factory.mktemp("model") / "model.gguf", model)


@pytest.fixture(scope="module")
def q4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = replace(BASE, tensor_type="Q4_0", embedding_type="Q8_0")
    return write_tiny_gguf(tmp_path_factory.mktemp("q4") / "model.gguf", model)


def engine(path: Path, npu: str = "native", **settings: Any) -> LocalEngine:
    fields = {"num_ctx": 128, "max_tokens": 32, "deterministic": True, "npu": npu}
    return LocalEngine(path, **fields | settings)


def run(path: Path, npu: str = "native", **settings: Any) -> LocalResult:
    with engine(path, npu, **settings) as opened:
        return opened.generate(PROMPT, NUM_TOKENS)


def bits(result: LocalResult) -> tuple[list[int], bytes]:
    return result.tokens, np.concatenate(result.logits).tobytes()


def computed_ops(opened: LocalEngine) -> int:
    assert opened.server is not None
    return opened.server.num_ops


def distance(found: NDArray[Any], wanted: NDArray[Any]) -> float:
    """Root of the mean square of the difference, over that of what is wanted."""
    return float(np.sqrt(np.mean((found - wanted) ** 2) / np.mean(wanted**2)))


class TestModelled:
    def test_same_bits_as_the_executors(self, path: Path) -> None:
        with engine(path, MODELLED) as opened:
            assert bits(opened.generate(PROMPT, NUM_TOKENS)) == bits(run(path))
            assert computed_ops(opened) == 2 * OPS_PER_CHUNK  # 50 tokens are two chunks of 32
            assert opened.notice() == ""

    @pytest.mark.parametrize("case", FAMILY_CASES)
    def test_every_family(self, case: str) -> None:
        with engine(gguf_path(case), MODELLED) as opened:
            assert bits(opened.generate(PROMPT, NUM_TOKENS)) == bits(run(gguf_path(case)))
            assert computed_ops(opened) > 0

    @pytest.mark.parametrize("threads", [1, 3])
    @pytest.mark.parametrize("chunk", [1, 7, 50])
    def test_any_number_of_threads_and_chunk(self, q4: Path, threads: int, chunk: int) -> None:
        settings = {"num_npu_threads": threads, "max_tokens": chunk}
        assert bits(run(q4, MODELLED, **settings)) == bits(run(q4))

    def test_compiles_beside_the_steps(self, q4: Path) -> None:
        backend = SlowCompiler()
        with engine(q4, backend=backend, deterministic=False) as opened:
            plain = bits(run(q4))
            results = [bits(opened.generate(PROMPT, NUM_TOKENS)) for _ in range(3)]
            assert results == [plain] * 3
            assert backend.runs > 0

    def test_streamed_layers(self, q4: Path, tmp_path: Path) -> None:
        ncf = tmp_path / "model.ncf"
        convert(q4, ncf, layout=Layout.TILES)
        with engine(ncf, MODELLED, ffn_resident=0.0) as opened:
            assert opened.layout.is_streaming
            assert bits(opened.generate(PROMPT, NUM_TOKENS)) == bits(run(ncf))
            assert computed_ops(opened) == 2 * OPS_PER_CHUNK

    def test_layers_of_bundles(self, tmp_path: Path) -> None:
        """Attention goes through the back end, neurons' rows through the executors."""
        ncf = tmp_path / "model.ncf"
        convert(gguf_path("llama_reglu"), ncf, layout=Layout.BUNDLES)
        with engine(ncf, MODELLED, ffn_resident=0.0) as opened:
            assert bits(opened.generate(PROMPT, NUM_TOKENS)) == bits(run(ncf))
            assert computed_ops(opened) > 0

    def test_memory_cap_is_kept(self, q4: Path) -> None:
        with engine(q4, "native:memory=100KB") as opened:
            assert bits(opened.generate(PROMPT, NUM_TOKENS)) == bits(run(q4))
            assert 0 < computed_ops(opened) < 2 * OPS_PER_CHUNK
            assert opened.notice() == ""

    def test_limit_of_graphs_is_kept(self, q4: Path) -> None:
        with engine(q4, "native:graphs=2") as opened:
            assert bits(opened.generate(PROMPT, NUM_TOKENS)) == bits(run(q4))
            assert opened.notice() == ""

    def test_takes_nothing(self, q4: Path) -> None:
        with engine(q4, backend=Choosy()) as opened:
            assert bits(opened.generate(PROMPT, NUM_TOKENS)) == bits(run(q4))
            assert computed_ops(opened) == 0


class TestFailures:
    @pytest.mark.parametrize("fault", ["compile", "bind", "run", "nan"])
    @pytest.mark.parametrize("call", [1, 3, 20])
    def test_native_goes_on(self, q4: Path, fault: str, call: int) -> None:
        with engine(q4, f"native:fail={fault}@{call}") as opened:
            assert bits(opened.generate(PROMPT, NUM_TOKENS)) == bits(run(q4))
            assert opened.server is not None
            if fault == "compile" and call == 20:  # so many shapes there are not
                assert opened.notice() == ""
                return
            assert opened.server.has_failed
            said = opened.notice()
            assert said
            before = computed_ops(opened)
            assert bits(opened.generate(PROMPT, NUM_TOKENS)) == bits(run(q4))
            assert computed_ops(opened) == before
            assert opened.notice() == said

    def test_any_exception(self, q4: Path) -> None:
        with engine(q4, backend=RaisingBackend(5)) as opened:
            assert bits(opened.generate(PROMPT, NUM_TOKENS)) == bits(run(q4))
            assert opened.notice() == "'no such thing\\nin two lines'"

    def test_failure_while_others_compile(self, q4: Path) -> None:
        with engine(q4, "native:fail=compile@2", deterministic=False) as opened:
            for _ in range(3):
                assert bits(opened.generate(PROMPT, NUM_TOKENS)) == bits(run(q4))


class TestOpenvino:
    """On its CPU device; no other was here."""

    QUANTISED_BOUND = 0.04
    """Root of the mean square over the logits' own. Products agree to 2e-6; where one falls on the
    other side of a rounding to 8 bits, a row changes by up to 1e-2 (as in test_forward_pass.py)."""
    FLOAT_BOUND = 0.005
    """The same where only the head's input is rounded to 8 bits."""
    AS_FAR = 1.25
    """How much further from a float64 forward pass than native it may be."""

    def test_within_the_bound(self, path: Path, request: pytest.FixtureRequest) -> None:
        pytest.importorskip("openvino", reason="the extra `openvino` is not installed")
        native = run(path)
        with engine(path, "openvino") as opened:
            result = opened.generate(PROMPT, NUM_TOKENS)
            assert opened.notice() == ""
            assert computed_ops(opened) == 2 * OPS_PER_CHUNK
        assert result.tokens == native.tokens
        ours, theirs = native.logits[0], result.logits[0]
        is_float = "F16" in request.node.name
        bound = self.FLOAT_BOUND if is_float else self.QUANTISED_BOUND
        assert 0 < distance(theirs, ours) <= bound
        exact = ReferenceModel(path).logits(np.array(PROMPT))[-1]
        assert distance(theirs, exact) <= self.AS_FAR * distance(ours, exact)

    def test_compiles_beside_the_steps(self, q4: Path) -> None:
        pytest.importorskip("openvino", reason="the extra `openvino` is not installed")
        with engine(q4, "openvino", deterministic=False) as opened:
            for _ in range(50):
                opened.generate(PROMPT, 1)
                if computed_ops(opened):
                    break
            assert computed_ops(opened) > 0
            assert opened.notice() == ""
