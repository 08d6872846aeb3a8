"""A dReLU model with real activations, in bundles: every mode, residency and cache, one result.

The file is 144 MB and no package has it: `tests/support/models.py` tells where it may lie.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from polyneuron import Engine, EngineConfig
from polyneuron.config import FeedForwardMode
from polyneuron.io.gguf_file import read_header
from polyneuron.io.ncf_format import Layout
from polyneuron.io_report import LayerActivity
from polyneuron.model.convert import convert
from polyneuron.model.tokenizer import Tokenizer
from tests.support.counting_reference import CountingReference
from tests.support.local_engine import GREEDY, LocalEngine
from tests.support.models import DRELU, NO_DRELU
from tests.support.predictors import write_oracle

pytestmark = pytest.mark.skipif(not DRELU.exists(), reason=NO_DRELU)

DENSE, EXACT = FeedForwardMode.DENSE, FeedForwardMode.EXACT
TEXT = Path(__file__).resolve().parents[1] / "data" / "text" / "genesis_1_12.txt"
PROMPT_TOKENS, NUM_TOKENS = 24, 4
COUNTED_TOKENS = 48
SHARE_BOUND = 0.005
"""Of a layer's neurons. Activations in 8 bits move values that are next to zero across it."""
MEAN_BOUND = 0.001


@pytest.fixture(scope="module")
def tokens() -> list[int]:
    """The beginning of a text."""
    tokenizer = Tokenizer.from_metadata(read_header(DRELU).metadata)
    return tokenizer.encode(TEXT.read_text())[:COUNTED_TOKENS]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[Layout, Path]]:
    """The model in both layouts."""
    folder = tmp_path_factory.mktemp("drelu")
    paths = {layout: folder / f"{layout}.ncf" for layout in Layout}
    for layout, path in paths.items():
        assert convert(DRELU, path, layout=layout).layout is layout
    yield paths
    for path in paths.values():
        path.unlink()


def logits_of(path: Path, tokens: list[int], **settings: object) -> list[str]:
    """Sums of two requests' logits: one that meets the cache as it was filled, one a used one."""
    with LocalEngine(path, num_ctx=64, **settings) as engine:
        prompt = tokens[:PROMPT_TOKENS]
        results = [engine.generate(each, NUM_TOKENS) for each in (prompt, prompt[::-1])]
    joined = [b"".join(row.tobytes() for row in result.logits) for result in results]
    return [hashlib.sha256(logits).hexdigest() for logits in joined]


@pytest.fixture(scope="module")
def resident(files: dict[Layout, Path], tokens: list[int]) -> dict[Layout, list[str]]:
    """What each layout gives with everything in memory and every neuron computed."""
    return {
        layout: logits_of(path, tokens, mode=DENSE, num_workers=1) for layout, path in files.items()
    }


class TestOneResult:
    @pytest.mark.parametrize("num_workers", [1, 2])
    @pytest.mark.parametrize("share", [0.1, 0.4, 0.8, 1.0])
    def test_exact_equals_dense(
        self,
        files: dict[Layout, Path],
        tokens: list[int],
        resident: dict[Layout, list[str]],
        share: float,
        num_workers: int,
    ) -> None:
        path = files[Layout.BUNDLES]
        got = logits_of(path, tokens, mode=EXACT, ffn_resident=share, num_workers=num_workers)
        assert got == resident[Layout.BUNDLES]

    def test_a_perfect_predictor_equals_exact(
        self,
        files: dict[Layout, Path],
        tokens: list[int],
        resident: dict[Layout, list[str]],
    ) -> None:
        path = files[Layout.BUNDLES]
        predictors = write_oracle(path)
        try:
            for share in (0.3, 0.8, None):
                got = logits_of(path, tokens, mode=FeedForwardMode.PREDICTED, ffn_resident=share)
                assert got == resident[Layout.BUNDLES]
        finally:
            predictors.unlink()

    @pytest.mark.parametrize("layout", list(Layout))
    @pytest.mark.parametrize("share", [0.1, 0.8])
    def test_streamed_dense_equals_resident(
        self,
        files: dict[Layout, Path],
        tokens: list[int],
        resident: dict[Layout, list[str]],
        share: float,
        layout: Layout,
    ) -> None:
        got = logits_of(files[layout], tokens, mode=DENSE, ffn_resident=share)
        assert got == resident[layout]

    @pytest.mark.ray
    def test_actors_give_the_same(
        self, files: dict[Layout, Path], tokens: list[int], resident: dict[Layout, list[str]]
    ) -> None:
        """A part of the neurons is read while tokens are computed."""
        config = EngineConfig(num_ctx=64, num_workers=2, max_sequences=1, deterministic=True)
        path, prompt = files[Layout.BUNDLES], tokens[:PROMPT_TOKENS]
        with Engine(str(path), config, ffn_resident=0.8, mode=EXACT) as engine:
            answers = [
                engine.generate(each, max_tokens=NUM_TOKENS, sampling=GREEDY, ignore_eos=True)
                for each in (prompt, prompt[::-1])
            ]
        assert [answer.logits_sha256 for answer in answers] == resident[Layout.BUNDLES]
        for answer in answers:
            assert answer.io.hit_rate is not None and 0 < answer.io.hit_rate < 1


class TestActivity:
    def test_counted_shares_are_the_references(
        self, files: dict[Layout, Path], tokens: list[int]
    ) -> None:
        """Gates above zero, and products of gate and up, against a float32 forward pass."""
        reference = CountingReference(DRELU, np.float32)
        reference.logits(np.array(tokens))
        with LocalEngine(files[Layout.BUNDLES], max_tokens=1) as engine:
            engine.score(tokens, len(tokens) - 1)
            counted = engine.activity()
        assert {layer.tokens for layer in counted} == {len(tokens)}
        gated = shares(counted, "gated_share") - np.array(reference.gated_shares)
        active = shares(counted, "active_share") - np.array(reference.active_shares)
        for name, gap in (("gated", gated), ("active", active)):
            print(f"{name}: largest gap {np.abs(gap).max():.4f}, mean {gap.mean():+.4f}")
            assert np.abs(gap).max() < SHARE_BOUND
            assert abs(gap.mean()) < MEAN_BOUND
        assert 0.15 < np.mean(reference.active_shares) < 0.3


def shares(layers: list[LayerActivity], name: str) -> NDArray[np.float64]:
    """One figure of every layer."""
    return np.array([getattr(layer, name) for layer in layers])
