"""`synth`: what it says, and what it refuses."""

from pathlib import Path

import pytest

from polyneuron.io.ncf_reader import read_ncf
from polyneuron.synth.shapes import SHAPES
from tests.support.program import run

SMALL = (
    "--layers", "1", "--d-model", "64", "--d-ff", "96", "--heads", "2", "--kv-heads", "1",
    "--vocab", "288",
)  # fmt: skip

Captured = pytest.CaptureFixture[str]


def refusal(capsys: Captured, *words: object) -> str:
    """The one line on stderr that these words end with."""
    assert run("synth", *words) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    return err.removeprefix("polyneuron: error: ").strip()


def test_says_what_was_written(tmp_path: Path, capsys: Captured) -> None:
    ncf, gguf = tmp_path / "a.ncf", tmp_path / "a.gguf"
    assert run("synth", "bamboo-7b", *SMALL, "-o", ncf, "--gguf", gguf) == 0
    said = capsys.readouterr()
    assert said.out == ""
    first, second = said.err.splitlines()
    assert first.startswith(f"{ncf}: ") and " MiB in bundles, " in first
    assert second.startswith(f"{gguf}: ") and " MiB in GGUF, " in second
    assert first.endswith("MB/s") and second.endswith("MB/s")
    assert run("verify", ncf) == 0
    assert run("inspect", gguf) == 0


def test_second_run_has_nothing_to_do(tmp_path: Path, capsys: Captured) -> None:
    words = ("synth", "bamboo-7b", *SMALL, "-o", tmp_path / "a.ncf")
    assert run(*words) == 0
    capsys.readouterr()
    assert run(*words) == 0
    assert "nothing to do" in capsys.readouterr().err


def test_flags_reach_the_file(tmp_path: Path, capsys: Captured) -> None:
    path = tmp_path / "a.ncf"
    words = ("synth", "bamboo-7b", *SMALL, "-o", path)
    assert run(*words, "--quant", "q8", "--hot-first", "--sparsity", "0.8", "--seed", "7") == 0
    ncf = read_ncf(path)
    assert ncf.manifest.source.format == "synth"
    assert ncf.tensor("blk.0.ffn_up.weight").storage is not None
    assert ncf.layer_section(0).neuron_ids is not None
    before = ncf.manifest.source.key
    assert run(*words, "--layout", "tiles", "--force") == 0
    ncf = read_ncf(path)
    assert ncf.manifest.layout == "tiles" and ncf.manifest.source.key != before
    assert (ncf.manifest.spec["d_ff"], ncf.manifest.spec["vocab_size"]) == (96, 288)


def test_unknown_shape_lists_the_shapes(tmp_path: Path, capsys: Captured) -> None:
    line = refusal(capsys, "bamboo-8b", "-o", tmp_path / "a.ncf")
    assert line.startswith("shape 'bamboo-8b' is not known; known: ")
    assert all(name in line for name in SHAPES)


@pytest.mark.parametrize(
    ("words", "start"),
    [
        (("--d-model", "100", "--heads", "2"), "--d-model 100: give a multiple of 32"),
        (("--sparsity", "1"), "--sparsity 1.0: give"),
        (("--layout", "tiles", "--hot-first"), "--hot-first: only bundles"),
    ],
)
def test_bad_value_is_named(
    words: tuple[str, ...], start: str, tmp_path: Path, capsys: Captured
) -> None:
    assert refusal(capsys, "bamboo-7b", *words, "-o", tmp_path / "a.ncf").startswith(start)


def test_other_output_is_kept(tmp_path: Path, capsys: Captured) -> None:
    path = tmp_path / "a.ncf"
    path.write_bytes(b"mine")
    assert "--force" in refusal(capsys, "bamboo-7b", *SMALL, "-o", path)
    assert path.read_bytes() == b"mine"


def test_help_lists_every_shape(capsys: Captured) -> None:
    assert run("synth", "--help") == 0
    out = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert all(name in out for name in SHAPES)
