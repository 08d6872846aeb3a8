"""`convert`, `verify` and `inspect` on neuron-cluster files."""

import json
from pathlib import Path

import pytest

from polyneuron.cli.progress import progress_line
from polyneuron.io.ncf_reader import read_ncf
from polyneuron.kernels.quant import StorageType
from tests.support.hf_folders import write_hf_folder
from tests.support.program import run
from tests.support.tiny_gguf import TinyModel, random_weights
from tests.support.tiny_ncf import write_source


@pytest.fixture
def output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """A converted file, with bundles."""
    path = tmp_path / "out.ncf"
    assert run("convert", write_source(tmp_path), "--layout", "bundles", "-o", path) == 0
    return path


class TestConvert:
    def test_says_what_was_written(self, output: Path, capsys: pytest.CaptureFixture[str]) -> None:
        said = capsys.readouterr()
        assert said.out == ""
        first, second = said.err.splitlines()
        assert first.startswith(f"{output}: ") and " MiB in bundles, " in first
        assert first.endswith("MB/s")
        assert "relative rms error: blk." in second and "ffn_down.weight 0." in second

    def test_lossless_is_said(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        source = write_source(tmp_path, TinyModel(tensor_type="Q8_0"))
        assert run("convert", source, "-o", tmp_path / "t.ncf") == 0
        assert "every weight is the source's" in capsys.readouterr().err

    def test_second_run_has_nothing_to_do(
        self, output: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        capsys.readouterr()
        assert run("convert", output.parent / "tiny.gguf", "--layout", "bundles", "-o", output) == 0
        assert "nothing to do" in capsys.readouterr().err

    def test_layout_can_be_chosen(self, output: Path) -> None:
        words = ("convert", output.parent / "tiny.gguf", "--layout", "tiles", "-o", output)
        assert run(*words) == 2
        assert run(*words, "--force") == 0
        assert read_ncf(output).manifest.layout == "tiles"

    def test_type_of_down_can_be_chosen(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        output = tmp_path / "out.ncf"
        words = ("convert", write_source(tmp_path), "-o", output, "--down", "q4", "--layout")
        assert run(*words, "tiles") == 2
        assert "--down q4" in capsys.readouterr().err
        assert not output.exists()
        assert run(*words, "bundles") == 0
        assert "relative rms error: blk.0.ffn_down.weight 7" in capsys.readouterr().err
        down = read_ncf(output).tensor("blk.0.ffn_down.weight")
        assert (down.storage, down.source_type) == (StorageType.Q4, "Q4_0")
        assert down.rms_error > 0.05
        assert run("verify", output) == 0
        assert run(*words, "bundles", "--down", "q3") == 2

    def test_folder_that_is_missing_is_named(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert run("convert", write_source(tmp_path), "-o", tmp_path / "no" / "o.ncf") == 2
        assert "no such folder" in capsys.readouterr().err


class TestVerify:
    def test_sound_files_are_ok(self, output: Path, capsys: pytest.CaptureFixture[str]) -> None:
        capsys.readouterr()
        assert run("verify", output) == 0
        assert "ok: header, manifest, 3 extents of 3 sections" in capsys.readouterr().out
        assert run("verify", output.parent / "tiny.gguf") == 0
        assert "a GGUF carries no checksums" in capsys.readouterr().out
        assert run("verify", output, "--json") == 0
        assert json.loads(capsys.readouterr().out)["bytes"] == output.stat().st_size

    def test_damage_is_placed(self, output: Path, capsys: pytest.CaptureFixture[str]) -> None:
        section = read_ncf(output).layer_section(1)
        data = bytearray(output.read_bytes())
        data[section.offset + 7] ^= 1
        output.write_bytes(data)
        capsys.readouterr()
        assert run("verify", output) == 2
        said = capsys.readouterr()
        assert said.out == ""
        (line,) = said.err.splitlines()
        assert f"section layer.1, bytes {section.offset} to" in line


class TestInspect:
    def test_json_describes_the_file(
        self, output: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        capsys.readouterr()
        assert run("inspect", output, "--json") == 0
        found = json.loads(capsys.readouterr().out)
        assert (found["architecture"], found["layout"]) == ("bamboo", "bundles")
        assert found["problem"] is None
        assert found["hyper_parameters"]["feed_forward"] == "drelu"
        assert [row["name"] for row in found["sections"]] == ["fixed", "layer.0", "layer.1"]
        assert found["sections"][1]["bundle"]["num_neurons"] == 160
        rows = {row["name"]: row for row in found["tensors"]}
        assert rows["blk.0.ffn_down.weight"]["shape"] == [160, 64]
        assert rows["blk.0.ffn_down.weight"]["rms_error"] > 0
        assert rows["blk.0.ffn_up.weight"]["is_lossless"]
        assert found["tokenizer"]["num_tokens"] == 299

    def test_tables_show_sections_and_tensors(
        self, output: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        capsys.readouterr()
        assert run("inspect", output) == 0
        out = capsys.readouterr().out
        for word in ("neuron-cluster file version 1", "layer.1", "blk.1.ffn_down.weight", "160"):
            assert word in out
        assert "cannot be run" not in out


@pytest.mark.parametrize(
    ("rate", "end"), [(0.0, ", 0 MB/s"), (50e6, ", 50 MB/s, 1:26 left"), (1e12, ", 0:00 left")]
)
def test_progress_line_says_speed_and_time(rate: float, end: str) -> None:
    line = progress_line("converting", 100 << 20, 4196 << 20, rate)
    assert line.startswith("converting: 100 of 4196 MiB, ")
    assert line.endswith(end)


class TestFolder:
    def test_folder_is_inspected_verified_and_converted(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        model = TinyModel(family="bamboo", d_ff=96)
        folder = write_hf_folder(tmp_path / "hf", model.spec(), random_weights(model))
        assert run("inspect", folder, "--json") == 0
        found = json.loads(capsys.readouterr().out)
        assert (found["format"], found["gguf_version"], found["num_files"]) == (
            "safetensors", None, 3,
        )  # fmt: skip
        assert found["problem"] is None
        assert found["tokenizer"]["num_tokens"] == 299
        assert run("inspect", folder) == 0
        assert "Hugging Face folder in 3 files" in capsys.readouterr().out
        assert run("verify", folder) == 0
        assert "safetensors carry no checksums" in capsys.readouterr().out
        assert run("convert", folder, "--layout", "bundles", "-o", tmp_path / "o.ncf") == 0
        assert "every weight is the source's" in capsys.readouterr().err
        assert run("inspect", tmp_path / "o.ncf", "--json") == 0
        assert json.loads(capsys.readouterr().out)["tokenizer"]["num_tokens"] == 299

    def test_type_of_weights_can_be_chosen(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        model = TinyModel()
        folder = write_hf_folder(tmp_path / "hf", model.spec(), random_weights(model))
        assert run("convert", folder, "-o", tmp_path / "o.ncf", "--weights", "q8") == 0
        assert "relative rms error" in capsys.readouterr().err
        up = read_ncf(tmp_path / "o.ncf").tensor("blk.0.ffn_up.weight")
        assert (up.storage, up.source_type) == (StorageType.Q8, "F32")
        assert run("convert", folder, "-o", tmp_path / "p.ncf", "--weights", "q3") == 2
        quantised = write_source(tmp_path)
        assert run("convert", quantised, "-o", tmp_path / "q.ncf", "--weights", "q8") == 2
        assert "is quantised already" in capsys.readouterr().err

    def test_folder_that_lacks_a_shard_is_refused(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        model = TinyModel()
        folder = write_hf_folder(tmp_path / "hf", model.spec(), random_weights(model))
        (folder / "model-00003-of-00003.safetensors").unlink()
        assert run("convert", folder, "-o", tmp_path / "o.ncf") == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"polyneuron: error: {folder}: of 3 shards 1 missing: model-00003")
