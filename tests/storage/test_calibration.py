"""Layer by layer is what the engine computes: its logits, bit for bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from polyneuron.errors import ChecksumError, ConfigError
from polyneuron.io.ncf_format import Layout
from polyneuron.io.ncf_reader import read_ncf
from polyneuron.kernels.gemv import rmsnorm
from polyneuron.model.convert import convert
from polyneuron.model.ncf_spec import spec_of
from polyneuron.profiling.calibration import (
    Calibration,
    check_sparse,
    cut_sequences,
)
from polyneuron.profiling.layer_weights import TiledMatrix
from polyneuron.profiling.sample import LayerSample
from tests.support.local_engine import LocalEngine
from tests.support.reference_model import ReferenceModel
from tests.support.sparse_models import sparse_models
from tests.support.tiny_gguf import TinyModel, write_tiny_gguf
from tests.support.tiny_ncf import stored

SEQUENCES = [[3, 14, 15, 92, 65, 35, 89, 79, 32], [38, 46, 26, 43]]
MODELS = sparse_models(3)
DRELU = MODELS["drelu"]


def written(folder: Path, model: TinyModel, layout: Layout) -> Path:
    source = write_tiny_gguf(folder / "tiny.gguf", model)
    convert(source, folder / "tiny.ncf", layout=layout)
    return folder / "tiny.ncf"


def calibrated(path: Path) -> tuple[Calibration, list[LayerSample]]:
    """A calibration at its end; samples without their weights' memory."""
    ncf = read_ncf(path)
    calibration = Calibration.begin(ncf, spec_of(ncf), [list(s) for s in SEQUENCES])
    return calibration, list(calibration.layers())


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("name", MODELS)
def test_stream_is_the_engines(tmp_path: Path, name: str, layout: Layout) -> None:
    path = written(tmp_path, MODELS[name], layout)
    calibration, _ = calibrated(path)
    ncf, spec = calibration.ncf, calibration.spec
    norm = stored(ncf, "output_norm.weight").view(np.float32)[: spec.d_model]
    head = ncf.tensor("output.weight")
    assert head.storage is not None
    matrix = TiledMatrix(head.storage, stored(ncf, head.name), head.rows, head.cols)
    with LocalEngine(path) as engine:
        for rows, tokens in zip(calibration.rows(), SEQUENCES, strict=True):
            expected = engine.generate(tokens, 1).logits[0]
            last = rmsnorm(calibration.stream[rows][-1].copy(), norm.copy(), spec.norm_eps)
            got = matrix.product(last[None])[0]
            assert got.tobytes() == expected.tobytes()


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("name", MODELS)
def test_samples_are_what_the_layer_sees(tmp_path: Path, name: str, layout: Layout) -> None:
    path = written(tmp_path, MODELS[name], layout)
    reference = ReferenceModel(tmp_path / "tiny.gguf")
    _, samples = calibrated(path)
    for sample in samples:
        gate, up = reference.gate_and_up(sample.layer_id, sample.ffn_input.astype(np.float64))
        deciding = up if gate is None else gate
        assert np.abs(sample.gate - deciding).max() < 0.05 * np.abs(deciding).max()
        assert ((sample.hidden != 0) <= (sample.gate > 0)).all()
        assert sample.starts == (0, len(SEQUENCES[0]))
        down = reference.weights[reference.names.layers[sample.layer_id].ffn_down]
        norms = np.linalg.norm(down, axis=0)
        assert np.allclose(sample.weights.down_norm, norms, rtol=0.02)
    assert not np.array_equal(samples[0].attention_input, samples[0].ffn_input)


def test_bundles_and_tiles_activate_alike(tmp_path: Path) -> None:
    first = {}
    for layout in Layout:
        (tmp_path / layout).mkdir()
        first[layout] = calibrated(written(tmp_path / layout, DRELU, layout))[1][0]
    tiles, bundles = first.values()
    assert (tiles.gate == bundles.gate).all()
    assert (tiles.hidden == bundles.hidden).all()


def test_damage_is_named(tmp_path: Path) -> None:
    path = written(tmp_path, DRELU, Layout.BUNDLES)
    ncf = read_ncf(path)
    tensor = ncf.tensor("blk.1.attn_q.weight")
    data = bytearray(path.read_bytes())
    data[ncf.file_offset(tensor)] ^= 1
    path.write_bytes(data)
    with pytest.raises(ChecksumError, match="section fixed"):
        calibrated(path)


def test_text_is_cut_in_sequences() -> None:
    parts = cut_sequences(list(range(1100)), 512)
    assert [len(part) for part in parts] == [512, 512, 76]
    assert [len(part) for part in cut_sequences(list(range(1040)), 512)] == [512, 512]
    with pytest.raises(ConfigError, match="has 31 tokens, a profile needs at least 32"):
        cut_sequences(list(range(31)))


def test_models_without_zeros_are_refused() -> None:
    with pytest.raises(ConfigError, match="silu activations are never exactly zero"):
        check_sparse("a.ncf", TinyModel().spec())


def test_other_layers_than_llamas_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"layers of opt are made otherwise .* --mode exact"):
        check_sparse("a.ncf", TinyModel(family="opt").spec())
    check_sparse("a.ncf", TinyModel(family="mistral", activation="relu").spec())
