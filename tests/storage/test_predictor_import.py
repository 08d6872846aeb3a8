"""Predictors that come with a model: where they are found, what they become, what is refused."""

from __future__ import annotations

import json
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polyneuron.errors import ConfigError, FormatError, UnsupportedError
from polyneuron.io.predictor_file import PredictorInput
from polyneuron.io.predictor_import import open_import
from polyneuron.kernels.gemv import FeedForwardKind
from polyneuron.kernels.quant import StorageType
from polyneuron.profiling.imported_fit import behind_norm, check_threshold, fit_imported, padded
from polyneuron.profiling.kinds import settings_of
from polyneuron.profiling.predictors import names
from tests.support.planted_layer import D_FF, D_MODEL, planted
from tests.support.predictor_sources import checkpoint, pairs, write_pwri, write_safetensors

SHAPE = (96, 64)  # d_ff, d_model
LAYERS = pairs(2, SHAPE)


def write_kind(folder: Path, kind: str) -> Path:
    """LAYERS as a PWRI GGUF, a folder of npz or safetensors, or a checkpoint."""
    if kind == "pwri":
        return write_pwri(folder / "model.powerinfer.gguf", LAYERS)
    if kind == "checkpoint":
        return write_safetensors(folder / "model.safetensors", checkpoint(LAYERS))
    for index, (fc1, fc2) in enumerate(LAYERS):
        arrays = {"fc1.weight": fc1, "fc2.weight": fc2}
        if kind == "npz":
            np.savez(folder / f"model_{index}.npz", **arrays)
        elif kind == "safetensors":
            write_safetensors(folder / f"model_{index}.safetensors", arrays)
        else:  # a checkpoint's shards
            shard = {n: a for n, a in checkpoint(LAYERS).items() if f".{index}." in n}
            write_safetensors(folder / f"model-{index}-of-2.safetensors", shard)
    return folder


def entries(**arrays: tuple[list[int], int]) -> bytes:
    """A safetensors header: of each matrix of layer 0 its shape and bytes."""
    return json.dumps(
        {
            f"model.layers.0.predictor.{role}.weight": {
                "dtype": "F32", "shape": shape, "data_offsets": [0, num_bytes],
            }
            for role, (shape, num_bytes) in arrays.items()
        }
    ).encode()  # fmt: skip


class TestFound:
    @pytest.mark.parametrize("kind", ["pwri", "npz", "safetensors", "checkpoint", "shards"])
    def test_every_layer_is_there(self, tmp_path: Path, kind: str) -> None:
        found = open_import(write_kind(tmp_path, kind))
        found.check(2)
        for layer, (fc1, fc2) in enumerate(LAYERS):
            got = found.pair(layer, SHAPE)
            assert (got[0] == fc1).all() and (got[1] == fc2).all()
        assert found.is_before_norm == (kind in ("pwri", "npz", "safetensors"))
        assert found.threshold == 0.0

    def test_half_floats(self, tmp_path: Path) -> None:
        found = open_import(write_pwri(tmp_path / "a.gguf", LAYERS, kind="F16"))
        assert (found.pair(1, SHAPE)[0] == LAYERS[1][0].astype(np.float16)).all()

    @pytest.mark.parametrize(("dtype", "bits"), [("BF16", 2**-7), ("F16", 2**-10)])
    def test_checkpoint_types(self, tmp_path: Path, dtype: str, bits: float) -> None:
        path = write_safetensors(tmp_path / "a.safetensors", checkpoint(LAYERS), dtype)
        got = open_import(path).pair(0, SHAPE)[0]
        assert np.allclose(got, LAYERS[0][0], rtol=bits, atol=1e-6)

    def test_thresholds(self, tmp_path: Path) -> None:
        assert open_import(write_pwri(tmp_path / "a.gguf", LAYERS, 0.5)).threshold == 0.5
        assert open_import(write_pwri(tmp_path / "b.gguf", LAYERS, None)).threshold == 0.0
        folder = tmp_path / "folder"
        folder.mkdir()
        write_kind(folder, "npz")
        (folder / "config.json").write_text(json.dumps({"sparse_threshold": 0.25}))
        assert open_import(folder).threshold == 0.25

    def test_a_changed_file_has_another_key(self, tmp_path: Path) -> None:
        before = open_import(write_kind(tmp_path, "npz")).key
        np.savez(tmp_path / "model_0.npz", **{"fc1.weight": np.ones(3), "fc2.weight": np.ones(9)})
        assert open_import(tmp_path).key != before


class TestRefused:
    @pytest.mark.parametrize(
        ("layers", "said"),
        [
            (pairs(1, SHAPE), "has no fc1 for layer 1"),
            (pairs(3, SHAPE), "has predictors for 3 layers, the model has 2"),
        ],
        ids=["fewer", "more"],
    )
    def test_other_layers(self, tmp_path: Path, layers: Any, said: str) -> None:
        found = open_import(write_pwri(tmp_path / "a.gguf", layers))
        with pytest.raises(FormatError, match=rf"--import .*a\.gguf: {said}; give the predictors"):
            found.check(2)

    @pytest.mark.parametrize("shape", [(96, 32), (64, 64)])
    def test_other_shapes(self, tmp_path: Path, shape: tuple[int, int]) -> None:
        found = open_import(write_pwri(tmp_path / "a.gguf", LAYERS))
        with pytest.raises(FormatError, match=r"fc1 \(32, 64\) and fc2 \(96, 32\) in layer 0; the"):
            found.pair(0, shape)

    @pytest.mark.parametrize("bad", [np.nan, np.inf])
    def test_values_that_are_no_numbers(self, tmp_path: Path, bad: float) -> None:
        layers = pairs(2, SHAPE)
        layers[1][1][3, 4] = bad
        found = open_import(write_pwri(tmp_path / "a.gguf", layers))
        with pytest.raises(FormatError, match="not finite numbers in fc2 of layer 1"):
            found.pair(1, SHAPE)

    @pytest.mark.parametrize("place", ["file", "folder"])
    def test_pickles(self, tmp_path: Path, place: str) -> None:
        (tmp_path / "model_0.pt").write_bytes(b"PK\x03\x04")
        path = tmp_path if place == "folder" else tmp_path / "model_0.pt"
        with pytest.raises(UnsupportedError, match=r"model_0\.pt is a PyTorch pickle.*numpy.savez"):
            open_import(path)

    def test_nothing_in_it(self, tmp_path: Path) -> None:
        with pytest.raises(FormatError, match=r"no predictors in it; they are blk\.N\.fc1\.weight"):
            open_import(tmp_path)
        path = write_safetensors(tmp_path / "a.safetensors", {"other": LAYERS[0][0]})
        with pytest.raises(FormatError, match="no predictors in it"):
            open_import(path)

    def test_experts(self, tmp_path: Path) -> None:
        arrays = checkpoint(LAYERS, "block_sparse_moe.experts.3.")
        path = write_safetensors(tmp_path / "a.safetensors", arrays)
        with pytest.raises(UnsupportedError, match="one of an expert with an fc1 of its own"):
            open_import(path)

    @pytest.mark.parametrize(
        ("raw", "said"),
        [
            (b"", "not a safetensors file"),
            (b"\xff" * 64, "not a safetensors file"),
            ((9).to_bytes(8, "little") + b'{"a": 1}x', "no JSON object"),
            ((8).to_bytes(8, "little") + b'{"a": 1}', "entry of 'a' is not as it must be"),
        ],
    )
    def test_damaged_safetensors(self, tmp_path: Path, raw: bytes, said: str) -> None:
        path = tmp_path / "a.safetensors"
        path.write_bytes(raw)
        with pytest.raises(FormatError, match=f"a.safetensors: .*{said}"):
            open_import(path)

    @pytest.mark.parametrize(
        "header",
        [
            b"[" * 100_000,
            entries(fc1=([1] * 100, 4)),
            entries(fc1=([1] * 8, 4)),
            entries(fc1=([0, 1 << 70], 0), fc2=([96, 0], 0)),
            entries(fc1=([0, 64], 0), fc2=([96, 0], 0)),
            entries(fc1=([2] * 100_000, 4)),
            entries(fc1=([1, 1], 4)).replace(b"layers.0", b"layers." + b"1" * 5000),
        ],
        ids=["nested", "hundred", "eight", "vast", "rankless", "endless", "layer"],
    )
    def test_hostile_safetensors(self, tmp_path: Path, header: bytes) -> None:
        path = tmp_path / "a.safetensors"
        path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
        with pytest.raises(FormatError, match=r"a\.safetensors"):
            found = open_import(path)
            found.check(1)
            found.pair(0, SHAPE)

    def test_safetensors_cut_off_or_of_another_type(self, tmp_path: Path) -> None:
        path = write_safetensors(tmp_path / "a.safetensors", checkpoint(LAYERS), "I32")
        with pytest.raises(FormatError, match="has type 'I32'; supported: F32 F16 BF16"):
            open_import(path).pair(0, SHAPE)
        whole = write_safetensors(path, checkpoint(LAYERS)).read_bytes()
        path.write_bytes(whole[:-4])
        with pytest.raises(FormatError, match="lies beyond the file"):
            open_import(path)

    def test_npz(self, tmp_path: Path) -> None:
        (tmp_path / "model_0.npz").write_bytes(b"no archive")
        with pytest.raises(FormatError, match=r"model_0\.npz: is no npz"):
            open_import(tmp_path).pair(0, SHAPE)
        np.savez(tmp_path / "model_0.npz", other=np.ones(3))
        with pytest.raises(FormatError, match=r"has neither fc1\.weight nor fc1"):
            open_import(tmp_path).pair(0, SHAPE)

    @pytest.mark.parametrize("kind", ["words", "dates", "fields", "complex", "objects", "vast"])
    def test_npz_without_numbers(self, tmp_path: Path, kind: str) -> None:
        write_kind(tmp_path, "npz")
        made = {
            "words": np.full(SHAPE, "1"), "dates": np.zeros(SHAPE, "M8[s]"),
            "fields": np.zeros(SHAPE, [("a", "f4")]), "complex": np.zeros(SHAPE, complex),
            "objects": np.full(SHAPE, None, object), "vast": np.full(SHAPE, 1e300),
        }  # fmt: skip
        np.savez(tmp_path / "model_0.npz", **{"fc1.weight": made[kind], "fc2.weight": LAYERS[0][1]})
        with pytest.raises(FormatError, match=r"fc1|Object arrays"):
            open_import(tmp_path).pair(0, SHAPE)

    @pytest.mark.parametrize(
        "head",
        [
            b"{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000, 1000000), }",
            b"{'descr': '<f4', 'fortran_order': False, 'shape': (1%s, ), }" % (b"0" * 30),
            b"{'descr': ('<f4'",
            b"(" * 5000,
        ],
        ids=["bytes", "number", "cut", "nested"],
    )
    def test_hostile_npz(self, tmp_path: Path, head: bytes) -> None:
        with zipfile.ZipFile(tmp_path / "model_0.npz", "w") as file:
            file.writestr("fc1.npy", b"\x93NUMPY\1\0" + len(head).to_bytes(2, "little") + head)
        with pytest.raises(FormatError, match=r"model_0\.npz: cannot be read as npz"):
            open_import(tmp_path).pair(0, SHAPE)

    def test_npz_whose_bytes_changed(self, tmp_path: Path) -> None:
        path, (fc1, fc2) = tmp_path / "model_0.npz", LAYERS[0]
        np.savez_compressed(path, fc1=fc1, fc2=fc2)
        data = bytearray(path.read_bytes())
        for at in range(60, 400, 10):
            data[at] ^= 0xFF
        path.write_bytes(data)
        with pytest.raises(FormatError, match=r"model_0\.npz: cannot be read as npz"):
            open_import(tmp_path).pair(0, SHAPE)

    def test_config(self, tmp_path: Path) -> None:
        write_kind(tmp_path, "npz")
        number = '{"sparse_threshold": 1%s}' % ("0" * 400)
        for text in ("{", '{"sparse_threshold": "x"}', "[]", "[" * 100_000, number):
            (tmp_path / "config.json").write_text(text)
            with pytest.raises(FormatError, match=r"config\.json"):
                open_import(tmp_path)

    def test_a_threshold_that_means_nothing_behind_the_norm(self, tmp_path: Path) -> None:
        found = open_import(write_pwri(tmp_path / "a.gguf", LAYERS, 0.5))
        with pytest.raises(UnsupportedError, match=r"threshold is 0\.5, and only 0.*give --recall"):
            check_threshold(found)
        check_threshold(replace(found, is_before_norm=False))


class TestMade:
    def test_names_the_same_neurons_behind_the_norm(self, tmp_path: Path) -> None:
        rng = np.random.default_rng(3)
        found = open_import(write_pwri(tmp_path / "a.gguf", LAYERS))
        fc1, fc2 = LAYERS[0]
        norm = rng.uniform(0.5, 2.0, SHAPE[1]).astype(np.float32)
        stream = 7.0 * rng.standard_normal((50, SHAPE[1]))
        normed = stream / np.sqrt(np.mean(np.square(stream), axis=1, keepdims=True)) * norm
        original = np.maximum(stream @ fc1.T, 0) @ fc2.T > 0
        moved = behind_norm(found, 0, fc1, norm)
        ours = np.maximum(normed @ moved.T, 0) @ fc2.T > 0
        assert (original == ours).mean() > 0.9995
        norm[3] = 0.0
        with pytest.raises(FormatError, match="in layer 0 ffn_norm has weights of zero"):
            behind_norm(found, 0, fc1, norm)

    def test_odd_ranks_are_filled_with_zeros(self) -> None:
        fc1, fc2 = pairs(1, SHAPE, rank=40)[0]
        wide1, wide2 = padded(fc1, fc2)
        assert wide1.shape == (64, 64) and wide2.shape == (96, 64)
        x = np.ones((1, 64), np.float32)
        narrow = np.maximum(x @ fc1.T, 0) @ fc2.T
        assert np.allclose(np.maximum(x @ wide1.T, 0) @ wide2.T, narrow, atol=1e-3)

    def test_rows_follow_the_order_of_the_file(self, tmp_path: Path) -> None:
        shape = (D_FF, D_MODEL)
        found = open_import(write_pwri(tmp_path / "a.gguf", pairs(1, shape)))
        settings = settings_of("imported", FeedForwardKind.DRELU, StorageType.Q4, found=found)
        assert settings.keeps_threshold and settings.input is PredictorInput.FFN
        sample, order = planted(), np.random.default_rng(0).permutation(D_FF).astype(np.uint32)
        weights: Any = sample.weights
        plain = fit_imported(sample, settings, found).predictor
        weights.neuron_ids = order
        moved = fit_imported(sample, settings, found).predictor
        assert (moved.fc2 == plain.fc2[order]).all()
        x = sample.ffn_input
        assert (names(moved, x, settings) == names(plain, x, settings)[:, order]).all()

    def test_recall_sets_thresholds_anew(self, tmp_path: Path) -> None:
        found = open_import(write_pwri(tmp_path / "a.gguf", pairs(1, (D_FF, D_MODEL)), 0.5))
        kind, stored = FeedForwardKind.DRELU, StorageType.Q4
        settings = settings_of("imported", kind, stored, found=found, kept=0.9)
        fitted = fit_imported(planted(), settings, found)
        assert len(set(fitted.predictor.threshold)) > 1
        assert fitted.report.kept > 0.8  # random matrices: named are the hottest
        with pytest.raises(UnsupportedError, match="give --recall"):
            settings_of("imported", kind, stored, found=found)

    def test_flags_that_do_not_go_together(self, tmp_path: Path) -> None:
        found = open_import(write_pwri(tmp_path / "a.gguf", LAYERS))
        kind, stored = FeedForwardKind.DRELU, StorageType.Q4
        for name, flags, said in (
            ("imported", {}, "name the file or folder with --import"),
            ("low-rank", {"found": found}, "only with --predictor imported"),
            ("imported", {"found": found, "input": PredictorInput.ATTENTION}, "--input ffn"),
            ("imported", {"found": found, "rank": 32}, "only low-rank and mlp"),
            ("low-rank", {"alpha": 1.1}, "--predictor sign"),
        ):
            given: dict[str, Any] = dict(flags)
            with pytest.raises(ConfigError, match=said):
                settings_of(name, kind, stored, **given)
