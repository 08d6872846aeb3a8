"""What `plan` says beforehand, with nothing allocated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from polyneuron.cli.main import main
from polyneuron.io.ncf_format import Layout
from polyneuron.model.convert import convert
from tests.support.tiny_gguf import TinyModel, write_tiny_gguf

MODEL = TinyModel(num_layers=4)


def plan(*words: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["plan", "-c", "64", *map(str, words)])
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    return write_tiny_gguf(tmp_path / "tiny.gguf", MODEL)


def as_json(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, Any]:
    assert plan(*words, "--json") == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


class TestPlan:
    def test_all_in_memory(self, gguf: Path, capsys: pytest.CaptureFixture[str]) -> None:
        found = as_json(capsys, "-m", gguf)
        assert (found["num_resident_layers"], found["bytes_per_token"]) == (4, 0)
        assert found["tokens_per_second_at_most"] is None

    def test_half_streamed(self, gguf: Path, capsys: pytest.CaptureFixture[str]) -> None:
        path = gguf.with_suffix(".ncf")
        convert(gguf, path, layout=Layout.TILES)
        found = as_json(capsys, "-m", path, "--ffn-resident", 0.5, "--memory", "2GiB")
        assert found["num_resident_layers"] == 2
        assert found["resident_ffn_fraction"] == 0.5
        assert found["bytes_per_token"] > 0
        assert sum(row["bytes"] for row in found["rows"]) == found["budget_bytes"] == 2 << 30

    def test_table_names_conversion(self, gguf: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert plan("-m", gguf, "--ffn-resident", 0, "--memory", "2GiB") == 0
        shown = capsys.readouterr().out
        assert "each token reads" in shown and "converts the model once" in shown

    @pytest.mark.parametrize(
        ("words", "said"),
        [
            (("--memory", "1MB"), "at least"),
            (("--memory", "lots"), "--memory 'lots'"),
            (("--ffn-resident", "2"), "--ffn-resident 2.0"),
            (("-m", "nowhere.gguf"), "nowhere.gguf"),
        ],
    )
    def test_bad_input_is_one_line(
        self, gguf: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str
    ) -> None:
        assert plan("-m", gguf, *words) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("polyneuron: error: ") and said in line
