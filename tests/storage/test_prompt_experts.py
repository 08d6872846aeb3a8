"""A prompt reads the experts that its tokens chose, from where its router has decided on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from polyneuron.config import Phase
from polyneuron.io.block_device import ByteRange
from polyneuron.io.expert_pieces import ExpertPieces
from polyneuron.model.convert import convert
from polyneuron.planning import bundles
from polyneuron.planning.bundle_places import NUM_BUFFERS
from tests.support.local_engine import LocalEngine
from tests.support.reference_model import ReferenceModel
from tests.support.sparse_models import late_reads
from tests.support.tiny_gguf import TinyModel, write_tiny_gguf

MODEL = TinyModel(
    family="qwen3moe", num_layers=3, d_model=64, d_ff=64, num_experts=32, num_used=2,
    tied_head=False, tensor_type="Q8_0",
)  # fmt: skip
PROMPT = [3, 14, 15, 92]
LONG = [*range(3, 120)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prompt_experts")
    convert(write_tiny_gguf(folder / "tiny.gguf", MODEL), folder / "tiny.ncf")
    return folder / "tiny.ncf"


@pytest.fixture(params=[1, 3], ids=["an expert a piece", "pieces across experts"])
def small_pieces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two clusters of 32 neurons are an expert; a piece has two, or three."""
    clusters = 2 if request.param == 1 else 3
    monkeypatch.setattr(bundles, "PIECE_BYTES", clusters * 32 * 512)


def chosen_by(path: Path, tokens: list[int]) -> list[set[int]]:
    """The experts that some token chose, layer by layer, by the plain forward pass."""
    found: list[set[int]] = []

    class Watched(ReferenceModel):
        def _mixture(self, layer, x):  # type: ignore[no-untyped-def]
            weights = self.expert_weights(layer, x)
            found.append(set(np.flatnonzero(weights.any(axis=0)).tolist()))
            return super()._mixture(layer, x)

    Watched(path.with_suffix(".gguf")).logits(np.array(tokens))
    return found


@pytest.mark.usefixtures("small_pieces")
class TestPrompts:
    def test_only_chosen_experts_are_read_once_they_are_known(self, path: Path) -> None:
        """Beside them at most what the reader had ordered ahead: the buffers, a layer."""
        with LocalEngine(path, ffn_resident=0.2, max_sequences=1, max_tokens=64) as engine:
            engine.generate(PROMPT, 1)
            found = engine.layout.bundles
            assert found is not None and found.expert_pieces is not None
            pieces = found.expert_pieces
            read = int(engine.arena.layer_stream(engine.layout.at("boards.stream")).bytes_read)
        chosen = sum(map(len, chosen_by(path, PROMPT))) * pieces.expert_bytes
        ahead = (MODEL.num_layers + 1) * NUM_BUFFERS * pieces.piece_bytes
        whole = sum(s.num_bytes for s in found.loads(Phase.PREFILL))
        assert chosen + ahead < whole
        assert read <= chosen + ahead

    @pytest.mark.parametrize("is_late", [False, True])
    @pytest.mark.parametrize("prompt", [PROMPT, LONG])
    @pytest.mark.parametrize("max_tokens", [8, 64])
    def test_results_do_not_change(
        self, path: Path, prompt: list[int], max_tokens: int, is_late: bool
    ) -> None:
        got = []
        for share in (None, 0.2):
            settings = {"wrap": late_reads()} if is_late and share else {}
            with LocalEngine(
                path, ffn_resident=share, max_sequences=1, max_tokens=max_tokens, **settings
            ) as engine:
                for tokens in (prompt, prompt[::-1]):
                    got.append([row.tobytes() for row in engine.generate(tokens, 3).logits])
        assert got[:2] == got[2:]

    def test_a_long_prompt_reads_nearly_everything(self, path: Path) -> None:
        with LocalEngine(path, ffn_resident=0.2, max_sequences=1, max_tokens=128) as engine:
            engine.generate(LONG, 1)
            found = engine.layout.bundles
            assert found is not None and found.expert_pieces is not None
            read = int(engine.arena.layer_stream(engine.layout.at("boards.stream")).bytes_read)
        chosen = sum(map(len, chosen_by(path, LONG))) * found.expert_pieces.expert_bytes
        assert read >= chosen


class TestPieces:
    """Four experts of 8 KiB, pieces of 12 KiB."""

    PIECES = ExpertPieces(3, 12 << 10, 8 << 10)

    @pytest.mark.parametrize(
        ("load", "num_bytes", "chosen", "expected"),
        [
            (0, 12 << 10, (1, 1, 1, 1), [(0, 12)]),
            (0, 12 << 10, (0, 0, 1, 1), []),
            (0, 12 << 10, (1, 0, 1, 1), [(0, 8)]),
            (0, 12 << 10, (0, 1, 0, 0), [(8, 4)]),
            (1, 12 << 10, (0, 1, 0, 0), [(0, 4)]),
            (4, 12 << 10, (1, 0, 1, 1), [(4, 8)]),
            (2, 8 << 10, (0, 0, 0, 1), [(0, 8)]),
            (2, 12 << 10, (0, 0, 0, 1), [(0, 8)]),
        ],
    )
    def test_ranges(
        self,
        load: int,
        num_bytes: int,
        chosen: tuple[int, ...],
        expected: list[tuple[int, int]],
    ) -> None:
        found = list(self.PIECES.chosen_ranges(load, num_bytes, np.array(chosen, bool)))
        assert found == [ByteRange(start << 10, size << 10) for start, size in expected]


def test_dense_models_have_none(tmp_path: Path) -> None:
    model = replace(MODEL, family="bamboo", num_experts=None, num_used=None)
    convert(write_tiny_gguf(tmp_path / "a.gguf", model), tmp_path / "a.ncf")
    with LocalEngine(tmp_path / "a.ncf", ffn_resident=0.5) as engine:
        assert engine.layout.expert_pieces is None
