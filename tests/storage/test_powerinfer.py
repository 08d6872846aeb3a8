"""PowerInfer's GGUF is the model it was made of: turned back, its neurons kept bit for bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from polyneuron.config import FeedForwardMode
from polyneuron.errors import ConfigError, UnsupportedError
from polyneuron.io import neuron_rows
from polyneuron.io.ncf_format import Layout
from polyneuron.io.ncf_reader import read_ncf
from polyneuron.io.predictor_import import open_import
from polyneuron.kernels.gemv import FeedForwardKind
from polyneuron.kernels.quant import StorageType
from polyneuron.model.architecture import describe
from polyneuron.model.convert import convert
from polyneuron.model.model_header import read_model_header
from polyneuron.planning.source import open_source
from tests.support.local_engine import LocalEngine
from tests.support.powerinfer_files import write_pwri_model
from tests.support.predictor_sources import pairs
from tests.support.program import run
from tests.support.reference_model import ReferenceModel
from tests.support.tiny_gguf import TinyModel, random_weights, write_tiny_gguf
from tests.support.tiny_ncf import stored

MODEL = TinyModel(family="bamboo", d_ff=160, tied_head=False, seed=3)
PROMPT = [5, 6, 7, 8, 9]


def converted(source: Path, output: Path) -> Path:
    convert(source, output, layout=Layout.BUNDLES)
    return output


class TestReading:
    def test_model_is_described_without_predictors(self, tmp_path: Path) -> None:
        header = read_model_header(write_pwri_model(tmp_path / "m.powerinfer.gguf", MODEL))
        assert describe(header) == MODEL.spec()
        assert set(header.by_name) == set(random_weights(MODEL))

    @pytest.mark.parametrize("threshold", [None, 0.0, 0.5])
    def test_llama_of_powerinfer_rectifies(self, tmp_path: Path, threshold: float | None) -> None:
        model = TinyModel()
        path = write_pwri_model(tmp_path / "m.gguf", model, threshold=threshold)
        assert describe(read_model_header(path)).feed_forward is FeedForwardKind.REGLU

    def test_predictors_stay_where_they_are(self, tmp_path: Path) -> None:
        found = open_import(write_pwri_model(tmp_path / "m.gguf", MODEL, threshold=0.25))
        found.check(MODEL.num_layers)
        assert found.threshold == 0.25
        shape = (MODEL.d_ff, MODEL.d_model)
        assert (found.pair(1, shape)[0] == pairs(2, shape)[1][0]).all()


class TestConversion:
    @pytest.mark.parametrize("kind", ["F32", "F16"])
    def test_sections_are_those_of_the_plain_file(self, tmp_path: Path, kind: str) -> None:
        model, files = replace(MODEL, tensor_type=kind), []
        for source in (
            write_tiny_gguf(tmp_path / "plain.gguf", model),
            write_pwri_model(tmp_path / "turned.gguf", model),
        ):
            ncf = read_ncf(converted(source, source.with_suffix(".ncf")))
            files.append(ncf.path.read_bytes()[ncf.data_offset :])
        assert files[0] == files[1]
        assert ncf.manifest.source.format == "powerinfer"

    @pytest.mark.parametrize("family", ["opt", "falcon"])
    def test_other_families_are_those_of_the_plain_file(self, tmp_path: Path, family: str) -> None:
        model = TinyModel(
            family=family, d_ff=160, num_kv_heads=4 if family == "opt" else 1,
            output_bias=family == "opt", activation="relu", has_gate=False,
        )  # fmt: skip
        files = []
        for source in (
            write_tiny_gguf(tmp_path / "plain.gguf", model),
            write_pwri_model(tmp_path / "turned.gguf", model),
        ):
            ncf = read_ncf(converted(source, source.with_suffix(".ncf")))
            files.append(ncf.path.read_bytes()[ncf.data_offset :])
        assert files[0] == files[1]

    @pytest.mark.parametrize(
        ("kind", "storage"),
        [("Q4_0", StorageType.Q4), ("Q8_0", StorageType.Q8), ("Q4_1", StorageType.Q8)],
    )
    @pytest.mark.parametrize("slab", [64 << 20, 1])
    def test_no_block_of_down_is_cut(
        self,
        tmp_path: Path,
        kind: str,
        storage: StorageType,
        slab: int,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(neuron_rows, "SLAB_BYTES", slab)
        source = write_pwri_model(tmp_path / "m.gguf", replace(MODEL, tensor_type=kind))
        expected = ReferenceModel(source, np.float32).weights
        ncf = read_ncf(converted(source, tmp_path / "m.ncf"))
        for layer in range(2):
            name = f"blk.{layer}.ffn_down.weight"
            down = ncf.tensor(name)
            assert down.storage is storage
            assert down.is_lossless == (kind != "Q4_1")
            rows = np.ascontiguousarray(stored(ncf, name))
            values = neuron_rows.decode_neuron_rows(storage, rows, MODEL.d_model)
            bound = 0.0 if down.is_lossless else 0.02 * np.abs(values).max()
            assert np.abs(values - expected[name].T).max() <= bound

    def test_type_of_down_can_be_chosen(self, tmp_path: Path) -> None:
        source = write_pwri_model(tmp_path / "m.gguf", replace(MODEL, tensor_type="Q8_0"))
        convert(source, tmp_path / "m.ncf", layout=Layout.BUNDLES, down=StorageType.Q4)
        assert (
            read_ncf(tmp_path / "m.ncf").tensor("blk.0.ffn_down.weight").storage is StorageType.Q4
        )

    def test_tiles_are_refused(self, tmp_path: Path) -> None:
        source = write_pwri_model(tmp_path / "m.gguf", MODEL)
        with pytest.raises(ConfigError, match=r"--layout tiles: .* use --layout bundles"):
            convert(source, tmp_path / "m.ncf", layout=Layout.TILES)

    def test_program_tells_of_the_predictors(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        source, output = write_pwri_model(tmp_path / "m.gguf", MODEL), tmp_path / "m.ncf"
        assert run("convert", source, "--layout", "bundles", "-o", output) == 0
        last = capsys.readouterr().err.splitlines()[-1]
        assert last.endswith(f"polyneuron profile -m {output} --import {source}")
        assert run("inspect", source) == 0
        assert "PowerInfer GGUF version 3" in capsys.readouterr().out


class TestRunning:
    def test_logits_are_those_of_the_plain_file(self, tmp_path: Path) -> None:
        plain = converted(write_tiny_gguf(tmp_path / "p.gguf", MODEL), tmp_path / "p.ncf")
        found = []
        for path in (plain, write_pwri_model(tmp_path / "t.gguf", MODEL)):
            with LocalEngine(path) as engine:
                found.append(engine.generate(PROMPT, 5))
        assert found[0].tokens == found[1].tokens
        assert all((a == b).all() for a, b in zip(found[0].logits, found[1].logits, strict=True))

    @pytest.mark.parametrize("mode", [FeedForwardMode.AUTO, FeedForwardMode.DENSE])
    def test_run_converts_to_bundles(self, tmp_path: Path, mode: FeedForwardMode) -> None:
        source = open_source(write_pwri_model(tmp_path / "t.gguf", MODEL))
        assert source.layout_to_run(mode, streams=False) is Layout.BUNDLES


class TestRefusals:
    def test_gpu_index_is_no_model(self, tmp_path: Path) -> None:
        path = write_pwri_model(tmp_path / "m.gpuidx", MODEL, architecture="generic.gpu_index")
        with pytest.raises(UnsupportedError, match="split between GPU and CPU, not a model; give"):
            open_source(path)

    def test_family_that_is_not_run_is_named(self, tmp_path: Path) -> None:
        path = write_pwri_model(tmp_path / "m.gguf", MODEL, architecture="falcon-relu")
        with pytest.raises(UnsupportedError, match="architecture 'falcon-relu' is not supported"):
            open_source(path)
