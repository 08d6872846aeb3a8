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


@pytest.fixture
def relu(tmp_path: Path) -> Path:
    model = TinyModel(family="bamboo", num_layers=4, d_ff=160, tensor_type="Q4_0")
    return write_tiny_gguf(tmp_path / "relu.gguf", model)


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

    def test_kv_type_halves_what_contexts_take(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        model = TinyModel(head_dim=32, context_length=4096)
        gguf = write_tiny_gguf(tmp_path / "heads.gguf", model)
        words = ("-m", gguf, "-c", "4096")
        found = {
            kv_type: as_json(capsys, *words, "--kv-type", kv_type)
            for kv_type in ("f16", "q8", "q4")
        }
        assert {name: each["kv_type"] for name, each in found.items()} == {k: k for k in found}
        sizes = [each["kv_bytes"] for each in found.values()]
        assert [round(size / sizes[0], 2) for size in sizes] == [1.0, 0.53, 0.28]
        for name, each in found.items():
            rows = {row["what"]: row["bytes"] for row in each["rows"]}
            assert rows[f"KV cache ({name})"] == each["kv_bytes"]

    def test_kv_type_of_odd_heads_is_refused(
        self, gguf: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert plan("-m", gguf, "--kv-type", "q8") == 2
        assert "--kv-type q8: this model's heads have 16 values" in capsys.readouterr().err

    def test_neuron_cache_has_its_row_and_its_reads(
        self, relu: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        words = ("-m", relu, "--mode", "exact", "--memory", "2GiB", "--ffn-resident", 0.6)
        found = as_json(capsys, *words)
        assert found["mode"] == "exact"
        assert found["bytes_per_token"] is None  # misses are known only afterwards
        assert 0.1 < found["neuron_cache_share"] < 1 and found["warnings"] == []
        assert found["prompt_bytes_per_chunk"] > found["streamed_bytes_per_token"]
        assert sum(row["bytes"] for row in found["rows"]) == 2 << 30
        assert plan(*words) == 0
        shown = capsys.readouterr().out
        for part in ("gates of feed-forward", "neuron cache (", "the neurons it misses",
                     "each chunk of a prompt (up to 512 tokens) reads"):  # fmt: skip
            assert part in shown

    def test_mode_of_a_gguf_decides_its_layout(
        self, relu: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        modes = {mode: as_json(capsys, "-m", relu, "--mode", mode) for mode in ("auto", "exact")}
        assert modes["auto"]["mode"] == "dense"  # it fits, so it runs as it is
        assert modes["exact"]["mode"] == "exact"
        words = ("-m", relu, "--ffn-resident", 0.5)
        assert as_json(capsys, *words)["mode"] == "exact"
        assert as_json(capsys, *words, "--mode", "dense")["neuron_cache_share"] is None

    def test_small_neuron_cache_is_warned_of(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        model = TinyModel(family="bamboo", num_layers=24, d_ff=512, tensor_type="Q4_0")
        path = write_tiny_gguf(tmp_path / "deep.gguf", model)
        words = ("-m", path, "--mode", "exact", "--ffn-resident", 0.14)
        (warning,) = as_json(capsys, *words)["warnings"]
        assert "% of its layers' neurons" in warning and "--memory" in warning
        assert plan(*words) == 0
        assert f"warning: {warning}" in capsys.readouterr().out

    def test_table_names_conversion(self, gguf: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert plan("-m", gguf, "--ffn-resident", 0, "--memory", "2GiB") == 0
        shown = capsys.readouterr().out
        assert (
            "each token, and each chunk of a prompt" in shown and "converts the model once" in shown
        )

    @pytest.mark.parametrize(
        ("words", "said"),
        [
            (("--memory", "1MB"), "at least"),
            (("--memory", "lots"), "--memory 'lots'"),
            (("--ffn-resident", "2"), "--ffn-resident 2.0"),
            (("--mode", "fast"), "value for '--mode': 'fast' is not one of 'auto'"),
            (("--mode", "exact"), "--mode exact: silu activations are never exactly zero"),
            (("-m", "nowhere.gguf"), "nowhere.gguf"),
        ],
    )
    def test_bad_input_is_one_line(
        self, gguf: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str
    ) -> None:
        assert plan("-m", gguf, *words) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("polyneuron: error: ") and said in line
