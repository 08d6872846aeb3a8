"""`profile`: what it prints, and what it refuses."""

import json
from pathlib import Path

import numpy as np
import pytest

from polyneuron.io.ncf_format import Layout
from polyneuron.io.ncf_reader import read_ncf
from polyneuron.model.convert import convert
from tests.support.predictor_sources import pairs, write_pwri
from tests.support.program import run
from tests.support.tiny_gguf import TinyModel, write_tiny_gguf
from tests.support.tiny_ncf import SPARSE, write_source

Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in bundles and in tiles, and a text."""
    folder = tmp_path_factory.mktemp("profile")
    source = write_source(folder, SPARSE)
    for layout in Layout:
        convert(source, folder / f"{layout}.ncf", layout=layout)
    (folder / "text").write_text("".join(chr(97 + i % 26) for i in range(400)))
    return folder


def refusal(capsys: Captured, *words: object) -> str:
    """The one line on stderr that these words end with."""
    assert run("profile", *words) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    return err.removeprefix("polyneuron: error: ").strip()


def test_table_has_a_row_for_each_layer(folder: Path, capsys: Captured) -> None:
    words = ("-m", folder / "bundles.ncf", "--text", folder / "text", "--tokens", "128")
    assert run("profile", *words) == 0
    out = capsys.readouterr().out
    lines = [line.split()[:1] for line in out.splitlines()]
    assert ["0"] in lines and ["1"] in lines and ["mean"] in lines
    assert "over 128 tokens" in out and "bundles.predictors" in out
    assert "kept" in out and (folder / "bundles.profile").exists()


def test_json_holds_the_same(folder: Path, capsys: Captured) -> None:
    words = ("-m", folder / "bundles.ncf", "--random-tokens", "96", "--predictor", "sign", "--json")
    assert run("profile", *words, "--input", "ffn", "--recall", "0.9") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["tokens"] == 96
    assert len(found["layers"]) == SPARSE.num_layers
    layer = found["layers"][1]
    assert 0 < layer["active_share"] < layer["gated_share"] < 1
    assert layer["predictor"]["rank"] == 0
    assert np.isclose(
        found["predictor"]["kept"], np.mean([x["predictor"]["kept"] for x in found["layers"]])
    )


def test_tiles_are_counted_without_predictors(folder: Path, capsys: Captured) -> None:
    assert run("profile", "-m", folder / "tiles.ncf", "--random-tokens", "64", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["predictors"] is None and found["layers"][0]["predictor"] is None


def test_reorder_writes_a_model(folder: Path, tmp_path: Path, capsys: Captured) -> None:
    hot = tmp_path / "hot.ncf"
    words = ("profile", "-m", folder / "bundles.ncf", "--random-tokens", "64", "--reorder", hot)
    assert run(*words) == 0
    assert read_ncf(hot).layer_section(0).neuron_ids is not None
    assert {path.suffix for path in tmp_path.iterdir()} == {".ncf", ".profile", ".predictors"}
    capsys.readouterr()
    assert "exists" in refusal(capsys, *words[1:])
    assert run(*words, "--force") == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "give either --text FILE or --random-tokens N"),
        (("--random-tokens", "8"), "the text has 8 tokens, a profile needs at least 32"),
        (("--random-tokens", "0"), "--random-tokens 0: give 1 or more"),
        (("--text", "a", "--tokens", "0"), "--tokens 0: give 1 or more"),
        (("--text", "missing"), "--text missing: No such file or directory"),
        (("--random-tokens", "64", "--recall", "1"), "--recall 1.0: give more than 0"),
        (("--random-tokens", "64", "--rank", "33"), "--rank 33: give a multiple of 32"),
        (
            ("--random-tokens", "64", "--rank", "32", "--predictor", "sign"),
            "--rank 32: only low-rank and mlp predictors have one",
        ),
        (("--random-tokens", "64", "--alpha", "1.1"), "--alpha 1.1: only sign predictors have one"),
        (
            ("--random-tokens", "64", "--alpha", "99", "--predictor", "sign"),
            "--alpha 99.0: give 0.1 to 10.0",
        ),
        (
            ("--random-tokens", "64", "--predictor", "imported"),
            "--predictor imported: name the file or folder with --import",
        ),
        (("--random-tokens", "64", "--import", "no-such"), "no-such: No such file or directory"),
        (
            ("--random-tokens", "64", "--input", "attention", "--predictor", "oracle"),
            "--input attention: oracle predictors read feed forward's",
        ),
    ],
    ids=str,
)
def test_bad_words_are_one_line(
    folder: Path, capsys: Captured, words: tuple[str, ...], said: str
) -> None:
    assert said in refusal(capsys, "-m", folder / "bundles.ncf", *words)


def test_a_powerinfer_file_is_imported(folder: Path, tmp_path: Path, capsys: Captured) -> None:
    path = tmp_path / "model.ncf"
    path.symlink_to(folder / "bundles.ncf")
    shape = (SPARSE.d_ff, SPARSE.d_model)
    source = write_pwri(tmp_path / "a.gguf", pairs(SPARSE.num_layers, shape))
    words = ("-m", path, "--random-tokens", "64", "--predictor", "imported", "--import", source)
    assert run("profile", *words, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert 0.2 < found["predictor"]["predicted"] < 0.8  # random matrices name about half
    assert found["predictor"]["rank"] == 32
    more = write_pwri(tmp_path / "b.gguf", pairs(SPARSE.num_layers + 1, shape))
    assert "has predictors for 3 layers, the model has 2" in refusal(capsys, *words[:-1], more)


def test_training_needs_its_extra(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    words = ("-m", folder / "bundles.ncf", "--random-tokens", "64", "--predictor", "mlp")
    said = "--predictor mlp needs the extra train: pip install 'polyneuron[train]'"
    assert refusal(capsys, *words) == said


def test_no_model_is_refused(capsys: Captured) -> None:
    assert "-m: name a model file" in refusal(capsys, "--random-tokens", "64")


def test_predictors_of_tiles_are_refused(folder: Path, capsys: Captured) -> None:
    words = ("-m", folder / "tiles.ncf", "--random-tokens", "64", "--predictor", "low-rank")
    assert "convert its source with --layout bundles" in refusal(capsys, *words)


def test_silu_is_refused(tmp_path: Path, capsys: Captured) -> None:
    source = write_tiny_gguf(tmp_path / "silu.gguf", TinyModel())
    assert "silu activations are never exactly zero" in refusal(
        capsys, "-m", source, "--random-tokens", "64"
    )
    assert {path.name for path in tmp_path.iterdir()} == {"silu.gguf"}


def test_plan_finds_what_lies_beside_a_converted_gguf(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = write_source(tmp_path, SPARSE)
    words = ("plan", "-m", source, "--mode", "predicted", "--memory", "2GiB", "-c", "64", "--json")
    assert run(*words) == 2
    assert "make them with polyneuron profile" in capsys.readouterr().err
    assert run("profile", "-m", source, "--random-tokens", "64") == 0
    capsys.readouterr()
    assert run(*words) == 0
    assert json.loads(capsys.readouterr().out)["mode"] == "predicted"


class TestThreshold:
    def test_bounds_are_shown_and_used(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
    ) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        source = write_tiny_gguf(tmp_path / "silu.gguf", TinyModel())
        words = ("profile", "-m", source, "--random-tokens", "128", "--threshold", "--json")
        assert run(*words, "--max-cost", "1") == 0
        found = json.loads(capsys.readouterr().out)
        assert found["predictors"] is None
        assert found["threshold"]["cost"] <= 1
        assert len(found["threshold"]["bounds"]) == len(found["layers"])
        assert run("plan", "-m", source, "--mode", "threshold", "--memory", "2GiB", "--json") == 0
        assert json.loads(capsys.readouterr().out)["mode"] == "threshold"

    @pytest.mark.parametrize(
        ("words", "said"),
        [
            (("--max-cost", "0.01"), "--max-cost: what bounds may cost; give --threshold too"),
            (("--threshold", "--max-cost", "0"), "--max-cost 0: give a share above 0"),
            (("--threshold", "--max-cost", "nan"), "--max-cost nan: give a share above 0"),
            (("--threshold", "--predictor", "sign"), "--predictor sign: threshold mode looks at"),
            (("--threshold",), "drelu activations are often exactly zero; use --mode exact"),
        ],
    )
    def test_refusals(
        self, folder: Path, capsys: Captured, words: tuple[str, ...], said: str
    ) -> None:
        given = ("-m", folder / "bundles.ncf", "--random-tokens", "128", *words)
        assert said in refusal(capsys, *given)
