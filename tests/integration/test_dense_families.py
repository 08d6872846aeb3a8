"""Families that depart from Llama, with quantised weights: near the reference, and one result.

Weights of blocks in 4 bits take the paths that float ones do not: norms that write activations in
8 bits, a second norm's too, fused tensors cut at rows of blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from polyneuron.config import FeedForwardMode
from polyneuron.errors import ConfigError, FormatError
from polyneuron.io.ncf_format import Layout
from polyneuron.io.ncf_reader import read_ncf
from polyneuron.kernels import isa
from polyneuron.model.convert import convert
from polyneuron.model.ncf_spec import spec_of
from polyneuron.planning.source import open_source
from tests.support.families import DENSE_CASES, FAMILY_CASES
from tests.support.local_engine import LocalEngine
from tests.support.reference_model import ReferenceModel
from tests.support.tiny_gguf import TinyModel, write_tiny_gguf

NUM_PROMPT, NUM_DECODED = 45, 6
BOUND = 0.06  # root mean square of the difference over that of logits
PROMPT = [int(i) for i in np.random.default_rng(2).integers(0, 299, NUM_PROMPT)]


def quantised(case: str) -> TinyModel:
    """The case with wider matrices, in 4 bits."""
    model = FAMILY_CASES[case]
    return replace(
        model, d_model=128, head_dim=32, d_ff=160, tensor_type="Q4_0", embedding_type="Q8_0"
    )


@pytest.fixture(scope="module", params=DENSE_CASES)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    return write_tiny_gguf(folder / "model.gguf", quantised(request.param))


@pytest.fixture(autouse=True)
def restore_isa() -> Iterator[None]:
    before = isa.active()
    yield
    isa.select(before)


def rows(path: Path, **settings: object) -> list[bytes]:
    """Logits of a prompt's answer, as bytes."""
    with LocalEngine(path, num_ctx=64, **settings) as engine:
        result = engine.generate(PROMPT, NUM_DECODED)
    return [row.tobytes() for row in result.logits]


def test_logits_are_near_the_reference(path: Path) -> None:
    with LocalEngine(path, num_ctx=64) as engine:
        result = engine.generate(PROMPT, NUM_DECODED)
    history = np.array(PROMPT + result.tokens[:-1])
    expected = ReferenceModel(path).logits(history)[NUM_PROMPT - 1 :]
    gap = np.stack(result.logits) - expected
    assert float(np.sqrt(np.mean(gap**2) / np.mean(expected**2))) < BOUND


def test_prompts_equal_decode(path: Path) -> None:
    """In chunks of one, whole, and by the program of an NPU executor."""
    alone = rows(path, num_workers=1, num_npu_threads=0, max_tokens=1)
    for chunk, workers, npu in ((7, 2, 0), (33, 1, 1), (512, 3, 2)):
        assert rows(path, num_workers=workers, num_npu_threads=npu, max_tokens=chunk) == alone


def test_batch_changes_nothing(path: Path) -> None:
    """Sequences of different lengths in one decode step, some within their windows."""
    prompts = [PROMPT, PROMPT[5:38], PROMPT[:3]]
    with LocalEngine(path, num_ctx=64, max_sequences=3) as engine:
        together = engine.run_all([engine.request(each, NUM_DECODED) for each in prompts])
        assert max(len(plan.rows) for plan in engine.plans if len(plan.logit_rows) > 1) == 3
        alone = [engine.generate(each, NUM_DECODED) for each in prompts]
    for one, other in zip(together, alone, strict=True):
        assert (np.stack(one.logits) == np.stack(other.logits)).all()


def test_instruction_set_changes_nothing(path: Path) -> None:
    found = [rows(path, isa_name=name) for name in isa.supported()]
    assert all(one == found[0] for one in found)


def test_converted_and_streamed_equal_the_source(path: Path, tmp_path: Path) -> None:
    converted = tmp_path / "model.ncf"
    convert(path, converted, layout=Layout.TILES)
    assert spec_of(read_ncf(converted)) == ReferenceModel(path).spec
    expected = rows(path)
    for share in (0.0, 0.5, 1.0):
        assert rows(converted, ffn_resident=share) == expected


@pytest.mark.parametrize("case", DENSE_CASES)
def test_greedy_tokens_equal_the_reference(case: str, tmp_path: Path) -> None:
    """With weights in 32 bits."""
    model = replace(FAMILY_CASES[case], tensor_type="F32", embedding_type="F32", seed=100)
    path = write_tiny_gguf(tmp_path / "model.gguf", model)
    reference, tokens = ReferenceModel(path), PROMPT[:9]
    for _ in range(NUM_DECODED):
        tokens = [*tokens, int(reference.logits(np.array(tokens))[-1].argmax())]
    with LocalEngine(path, num_ctx=64) as engine:
        assert engine.generate(PROMPT[:9], NUM_DECODED).tokens == tokens[9:]


@pytest.mark.parametrize("case", ["gemma2", "gemma3"])
def test_bundles_are_refused_by_name(case: str, tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "model.gguf", FAMILY_CASES[case])
    with pytest.raises(ConfigError, match=rf"--layout bundles: {case} norms .* --layout tiles"):
        convert(path, tmp_path / "model.ncf", layout=Layout.BUNDLES)


@pytest.mark.parametrize("case", ["gemma", "falcon"])
def test_threshold_mode_is_refused_by_name(case: str, tmp_path: Path) -> None:
    source = open_source(write_tiny_gguf(tmp_path / "model.gguf", FAMILY_CASES[case]))
    with pytest.raises(ConfigError, match=rf"--mode threshold: layers of {case} .* --mode dense"):
        source.resolve_mode(FeedForwardMode.THRESHOLD)


@pytest.mark.parametrize("case", ["gemma", "falcon", "phi3"])
def test_bundles_of_all_neurons_equal_tiles_or_nearly(case: str, tmp_path: Path) -> None:
    """Neurons one by one are added in another order than in tiles; streamed, in one order."""
    model = replace(FAMILY_CASES[case], tensor_type="F16", d_ff=160)
    path = write_tiny_gguf(tmp_path / "model.gguf", model)
    convert(path, tmp_path / "model.ncf", layout=Layout.BUNDLES)
    with LocalEngine(path, num_ctx=64) as engine:
        tiles = np.stack(engine.generate(PROMPT, 1).logits)
    found = [rows(tmp_path / "model.ncf", ffn_resident=share)[0] for share in (0.0, 0.5, 1.0)]
    assert found == [found[0]] * 3
    gap = np.frombuffer(found[0], np.float32) - tiles
    assert np.abs(gap).max() < 1e-3 * np.abs(tiles).max()


def test_normed_outputs_have_no_bundles(tmp_path: Path) -> None:
    """A gemma2 with ReLU: sparse, but what its neurons give is normed before it is added."""
    model = replace(FAMILY_CASES["gemma2"], activation="relu")
    path = write_tiny_gguf(tmp_path / "model.gguf", model)
    with pytest.raises(ConfigError, match=r"--layout bundles: gemma2 norms .* use --layout tiles"):
        convert(path, tmp_path / "model.ncf", layout=Layout.BUNDLES)
    with LocalEngine(path, num_ctx=64) as engine:
        assert len(engine.generate(PROMPT[:5], 3).tokens) == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"learned_positions": 257}, "has 257 learned positions, 258 are needed"),
        ({"has_post_norms": True}, "norms what neurons give"),
        ({"residual": "both"}, "'residual'"),
        ({"window": -1}, "'window'"),
        ({"attention_cap": float("inf")}, "'attention_cap'"),
    ],
)
def test_blocks_that_cannot_be_are_refused(
    change: dict[str, object], message: str, tmp_path: Path
) -> None:
    """In a neuron-cluster file whose checksums are right."""
    path = write_tiny_gguf(tmp_path / "model.gguf", FAMILY_CASES["opt"])
    convert(path, tmp_path / "model.ncf", layout=Layout.BUNDLES)
    ncf = read_ncf(tmp_path / "model.ncf")
    block = {**ncf.manifest.spec["block"], **change}
    manifest = replace(ncf.manifest, spec={**ncf.manifest.spec, "block": block})
    with pytest.raises(FormatError, match=message):
        spec_of(replace(ncf, manifest=manifest))
