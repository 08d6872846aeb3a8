"""`inspect --activations`: what it refuses before anything is started, and what it shows."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from polyneuron.cli.inspect import inspect
from polyneuron.cli.inspect_activations import activation_table, as_object, legend, text_tokens
from polyneuron.errors import ConfigError
from polyneuron.io.ncf_format import Layout
from polyneuron.io_report import LayerActivity
from polyneuron.measure.activations import DEFAULT_NUM_TOKENS, SAMPLE_TEXT, Activations
from polyneuron.model.convert import convert
from polyneuron.planning.source import open_source
from tests.support.tiny_gguf import TinyModel, write_tiny_gguf
from tests.support.tiny_ncf import SPARSE, write_source

FOUND = Activations(7, (LayerActivity(7, 0.5, 0.0, 0.25), LayerActivity(7, 0.25, 0.0, 0.125)))


class TestRefusals:
    def test_smooth_activations_are_never_zero(self, tmp_path: Path) -> None:
        source = write_source(tmp_path, TinyModel())
        with pytest.raises(ConfigError, match=r"tiny\.gguf: silu activations are never exactly"):
            inspect(str(source), activations=True)

    def test_tiles_are_computed_whole(self, tmp_path: Path) -> None:
        tiles = tmp_path / "tiles.ncf"
        convert(write_source(tmp_path), tiles, layout=Layout.TILES)
        with pytest.raises(ConfigError, match=r"tiles\.ncf keeps .*--layout bundles"):
            inspect(str(tiles), activations=True)

    @pytest.mark.parametrize(("count", "said"), [(0, "give 1 or more"), (257, "256 positions")])
    def test_number_of_tokens_is_checked(self, count: int, said: str, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=rf"-n {count}: .*{said}"):
            inspect(str(write_source(tmp_path)), activations=True, num_tokens=count)

    def test_text_must_be_there(self, tmp_path: Path) -> None:
        source, text = write_source(tmp_path), tmp_path / "text.txt"
        with pytest.raises(ConfigError, match=r"--text .*text\.txt: No such file"):
            inspect(str(source), activations=True, text=str(text))
        text.write_text(" \n")
        with pytest.raises(ConfigError, match=r"--text .*text\.txt: the text is empty"):
            inspect(str(source), activations=True, text=str(text))

    def test_flags_of_counting_need_counting(self, tmp_path: Path) -> None:
        source = str(write_source(tmp_path))
        with pytest.raises(ConfigError, match="--text belongs to --activations"):
            inspect(source, text="text.txt")
        with pytest.raises(ConfigError, match="-n belongs to --activations"):
            inspect(source, num_tokens=3)


class TestTokens:
    def test_first_ones_of_the_text(self, tmp_path: Path) -> None:
        source, text = open_source(write_source(tmp_path)), tmp_path / "text.txt"
        text.write_text("some words and more")
        whole = text_tokens(source, str(text), None)
        assert 3 < len(whole) < DEFAULT_NUM_TOKENS
        assert text_tokens(source, str(text), 3) == whole[:3]

    def test_built_in_text_is_long_enough(self, tmp_path: Path) -> None:
        """Tiny vocabularies have more tokens for it than real ones, so words are counted."""
        assert len(SAMPLE_TEXT.split()) > 0.9 * DEFAULT_NUM_TOKENS
        source = open_source(write_source(tmp_path))
        assert len(text_tokens(source, None, None)) == DEFAULT_NUM_TOKENS

    def test_short_context_takes_less(self, tmp_path: Path) -> None:
        source = open_source(
            write_tiny_gguf(tmp_path / "m.gguf", replace(SPARSE, context_length=64))
        )
        assert len(text_tokens(source, None, None)) == 64


class TestShown:
    def test_json_has_shares(self) -> None:
        assert json.loads(json.dumps(as_object(Path("m.ncf"), FOUND))) == {
            "file": "m.ncf", "tokens": 7, "gated_share": 0.375, "active_share": 0.1875,
            "layers": [
                {"layer": 0, "gated_share": 0.5, "active_share": 0.25},
                {"layer": 1, "gated_share": 0.25, "active_share": 0.125},
            ],
        }  # fmt: skip

    def test_table_has_percent_and_means(self) -> None:
        columns = activation_table(FOUND).columns
        assert [list(column.cells) for column in columns] == [
            ["0", "1"],
            ["50.0 %", "25.0 %"],
            ["25.0 %", "12.5 %"],
        ]
        assert [column.footer for column in columns] == ["mean", "37.5 %", "18.8 %"]
        assert "mean over 7 tokens" in legend(FOUND)[0]
