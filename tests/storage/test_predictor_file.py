"""Predictors are read as they were written, and refused with another model or when damaged."""

from dataclasses import replace
from pathlib import Path

import msgpack
import numpy as np
import pytest

from polyneuron.errors import ChecksumError, ConfigError, FormatError
from polyneuron.io import predictor_file
from polyneuron.io.ncf_format import NcfManifest
from polyneuron.io.ncf_reader import read_ncf
from polyneuron.io.ncf_writer import NcfPlan
from polyneuron.io.predictor_file import (
    LayerPredictor,
    PredictorInfo,
    PredictorInput,
    predictor_path,
    read_predictors,
    write_predictors,
)
from polyneuron.kernels.quant import StorageType, pack_tiles_from_f32, pack_tiles_q1
from polyneuron.profiling.reorder import stored_layers
from tests.support.program import run
from tests.support.tiny_ncf import stored

SHAPE = (96, 64)  # d_ff, d_model
RANKS = (32, 0)
INFO = PredictorInfo(
    "low-rank", PredictorInput.ATTENTION, False, StorageType.Q8, StorageType.Q4, {"recall": 0.97}
)


def _layers() -> list[LayerPredictor]:
    rng = np.random.default_rng(1)
    layers = []
    for rank in RANKS:
        fc1 = rng.standard_normal((rank, SHAPE[1]), np.float32) if rank else None
        fc2 = rng.standard_normal((SHAPE[0], rank or SHAPE[1]), np.float32)
        layers.append(LayerPredictor(fc1, fc2, rng.standard_normal(SHAPE[0], np.float32)))
    return layers


def _write(folder: Path, key: str = "a" * 64) -> Path:
    path = predictor_path(folder / "tiny.ncf")
    write_predictors(path, key, INFO, RANKS, _layers(), SHAPE)
    return path


def test_round_trip(tmp_path: Path) -> None:
    path = _write(tmp_path)
    found = read_predictors(path, "a" * 64, len(RANKS), SHAPE)
    assert path.name == "tiny.predictors"
    assert found.info == INFO
    assert found.ranks == RANKS
    read_ncf(path).check_all()
    for index, layer in enumerate(_layers()):
        fc2 = stored(read_ncf(path), f"blk.{index}.predictor.fc2")
        assert np.array_equal(fc2, pack_tiles_from_f32(StorageType.Q4, layer.fc2))
        threshold = stored(read_ncf(path), f"blk.{index}.predictor.threshold").view(np.float32)
        assert np.array_equal(threshold[: SHAPE[0]], layer.threshold)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [path.name]


def test_signs_come_back(tmp_path: Path) -> None:
    path = predictor_path(tmp_path / "tiny.ncf")
    info = replace(INFO, kind="sign", fc2_type=StorageType.Q1)
    layer = _layers()[1]
    write_predictors(path, "a" * 64, info, (0,), [layer], SHAPE)
    assert read_predictors(path, "a" * 64, 1, SHAPE).info == info
    fc2 = stored(read_ncf(path), "blk.0.predictor.fc2")
    assert np.array_equal(fc2, pack_tiles_q1(layer.fc2))


def test_shares_of_tokens_come_back(tmp_path: Path) -> None:
    path = predictor_path(tmp_path / "tiny.ncf")
    named = np.linspace(0, 1, 2 * SHAPE[0], dtype=np.float32).reshape(2, -1)
    write_predictors(path, "a" * 64, INFO, RANKS, _layers(), SHAPE, named=named)
    found = read_predictors(path, "a" * 64, 2, SHAPE).named
    assert found is not None and found.dtype == np.float32
    assert np.abs(found - named).max() <= 0.5 / 65535 + 1e-7
    assert found[0, 0] == 0.0 and found[1, -1] == 1.0


def test_older_files_tell_no_shares_and_have_no_second_matrix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As they were written before either was known: the keys are not there at all."""
    lay_out = predictor_file.laid_out

    def without(manifest: NcfManifest) -> NcfPlan:
        head = msgpack.unpackb(manifest.metadata["predictors"])
        del head["has_up"]
        return lay_out(replace(manifest, metadata={"predictors": msgpack.packb(head)}))

    monkeypatch.setattr(predictor_file, "laid_out", without)
    path = _write(tmp_path)
    monkeypatch.undo()
    found = read_predictors(path, "a" * 64, len(RANKS), SHAPE)
    assert found.named is None and found.info == INFO and not found.info.has_up


def test_too_few_shares_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lay_out = predictor_file.laid_out

    def cut(manifest: NcfManifest) -> NcfPlan:
        short = {name: value[:-2] for name, value in manifest.metadata.items() if "." in name}
        return lay_out(replace(manifest, metadata=manifest.metadata | short))

    monkeypatch.setattr(predictor_file, "laid_out", cut)
    path = predictor_path(tmp_path / "tiny.ncf")
    named = np.zeros((2, SHAPE[0]), np.float32)
    write_predictors(path, "a" * 64, INFO, RANKS, _layers(), SHAPE, named=named)
    with pytest.raises(FormatError, match=r"tiny\.predictors: .*has no 2 x 96 words"):
        read_predictors(path, "a" * 64, 2, SHAPE)


def test_second_matrices_come_back(tmp_path: Path) -> None:
    path = predictor_path(tmp_path / "tiny.ncf")
    info = replace(INFO, kind="sign", fc2_type=StorageType.Q1, has_up=True)
    layer = replace(_layers()[1], up=_layers()[1].fc2[::-1])
    write_predictors(path, "a" * 64, info, (0,), [layer], SHAPE)
    found = read_predictors(path, "a" * 64, 1, SHAPE)
    assert found.info == info
    (back,) = stored_layers(found)
    assert back.up is not None and (back.up == back.fc2[::-1]).all()


@pytest.mark.parametrize("role", ["fc1", "fc2", "threshold"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_values_that_are_no_numbers_are_refused(tmp_path: Path, role: str, bad: float) -> None:
    path, layers = predictor_path(tmp_path / "tiny.ncf"), _layers()
    getattr(layers[0], role).reshape(-1)[5] = bad
    with pytest.raises(FormatError, match=rf"blk\.0\.predictor\.{role} would hold values that are"):
        write_predictors(path, "a" * 64, INFO, RANKS, layers, SHAPE)
    assert not path.exists()


def test_values_beyond_their_storage_are_refused(tmp_path: Path) -> None:
    path, layers = predictor_path(tmp_path / "tiny.ncf"), _layers()
    layers[1].threshold[3] = 3e38  # never named: thresholds are plain floats
    write_predictors(path, "a" * 64, INFO, RANKS, layers, SHAPE)
    layers[1].fc2[3, 4] = 1e9
    with pytest.raises(FormatError, match=r"blk\.1\.predictor\.fc2 would hold"):
        write_predictors(path, "a" * 64, INFO, RANKS, layers, SHAPE, force=True)


def test_another_models_are_refused(tmp_path: Path) -> None:
    path = _write(tmp_path)
    with pytest.raises(ConfigError, match=r"tiny\.predictors: .*another model.*profile"):
        read_predictors(path, "b" * 64, len(RANKS), SHAPE)


@pytest.mark.parametrize(("layers", "shape"), [(3, SHAPE), (2, (128, 64)), (2, (96, 32))])
def test_another_shape_is_refused(tmp_path: Path, layers: int, shape: tuple[int, int]) -> None:
    path = _write(tmp_path)
    with pytest.raises(FormatError, match=r"tiny\.predictors"):
        read_predictors(path, "a" * 64, layers, shape)


def test_ranks_that_kernels_cannot_take_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(predictor_file, "BLOCK_COLS", 1)
    path = predictor_path(tmp_path / "tiny.ncf")
    fc1, fc2 = np.ones((33, SHAPE[1]), np.float32), np.ones((SHAPE[0], 33), np.float32)
    info = replace(INFO, fc2_type=StorageType.F32)
    layer = LayerPredictor(fc1, fc2, np.zeros(SHAPE[0], np.float32))
    write_predictors(path, "a" * 64, info, (33,), [layer], SHAPE)
    monkeypatch.undo()
    with pytest.raises(FormatError, match=r"tiny\.predictors: .*no multiples of 32"):
        read_predictors(path, "a" * 64, 1, SHAPE)


def test_damage_is_noticed(tmp_path: Path) -> None:
    path = _write(tmp_path)
    raw = bytearray(path.read_bytes())
    raw[-5000] ^= 1
    path.write_bytes(raw)
    with pytest.raises(ChecksumError, match=r"section predictors"):
        read_ncf(path).check_all()


def test_a_model_file_is_no_predictor_file(tmp_path: Path) -> None:
    path = tmp_path / "other.predictors"
    path.write_bytes(b"NCF?" * 100)
    with pytest.raises(FormatError, match=r"other\.predictors: .*anew by polyneuron profile"):
        read_predictors(path, "a" * 64, len(RANKS), SHAPE)


def test_it_is_verified_and_is_no_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = _write(tmp_path)
    assert run("verify", str(path)) == 0
    assert "ok: header, manifest" in capsys.readouterr().out
    assert run("plan", "-m", str(path)) == 2
    assert "a model's predictors, not a model; give the .ncf file" in capsys.readouterr().err
