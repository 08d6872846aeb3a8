"""The folder of converted models: found again, made again when it must be."""

import os
from pathlib import Path

import pytest

from polyneuron.config import cache_folder
from polyneuron.errors import ConfigError, FormatError
from polyneuron.io.ncf_reader import read_ncf
from polyneuron.model.model_cache import cached_ncf
from tests.support.tiny_gguf import TinyModel
from tests.support.tiny_ncf import write_source


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "polyneuron"


class TestEntries:
    def test_second_call_converts_nothing(self, tmp_path: Path, folder: Path) -> None:
        source, calls = write_source(tmp_path), []
        first = cached_ncf(source, lambda done, total: calls.append(done), folder=folder)
        num_calls, changed = len(calls), first.stat().st_mtime_ns
        assert num_calls > 0
        assert cached_ncf(source, lambda d, t: calls.append(d), folder=folder) == first
        assert (len(calls), first.stat().st_mtime_ns) == (num_calls, changed)
        assert [path.name for path in folder.iterdir()] == [first.name]
        assert first.name.startswith("tiny-")

    def test_ncf_is_its_own_entry(self, tmp_path: Path, folder: Path) -> None:
        entry = cached_ncf(write_source(tmp_path), folder=folder)
        assert cached_ncf(entry, folder=tmp_path / "unused") == entry
        assert not (tmp_path / "unused").exists()

    def test_other_models_of_one_name_are_told_apart(self, tmp_path: Path, folder: Path) -> None:
        entries = set()
        for seed in range(3):  # same shapes, sizes and header: only the weights differ
            source = write_source(tmp_path, TinyModel(seed=seed))
            os.utime(source, ns=(1, 1))
            entries.add(cached_ncf(source, folder=folder))
        assert len(entries) == 3

    def test_edit_in_place_is_noticed_by_its_time(self, tmp_path: Path, folder: Path) -> None:
        source = write_source(tmp_path)
        first = cached_ncf(source, folder=folder)
        os.utime(source, ns=(1, source.stat().st_mtime_ns + 1))
        assert cached_ncf(source, folder=folder) != first

    def test_moved_file_is_found_again(self, tmp_path: Path, folder: Path) -> None:
        source = write_source(tmp_path)
        first = cached_ncf(source, folder=folder)
        (tmp_path / "elsewhere").mkdir()
        moved = source.rename(tmp_path / "elsewhere" / source.name)
        assert cached_ncf(moved, folder=folder) == first

    def test_damaged_entry_is_made_again(self, tmp_path: Path, folder: Path) -> None:
        source = write_source(tmp_path)
        entry = cached_ncf(source, folder=folder)
        whole = entry.read_bytes()
        os.truncate(entry, 5000)
        assert cached_ncf(source, folder=folder) == entry
        assert entry.read_bytes() == whole
        read_ncf(entry).check_all()


class TestFolder:
    def test_follows_xdg(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
        assert cache_folder() == tmp_path / "xdg" / "polyneuron"
        entry = cached_ncf(write_source(tmp_path))
        assert entry.parent == cache_folder()

    @pytest.mark.parametrize("value", ["", "relative/path"])
    def test_falls_back_to_home(
        self, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        monkeypatch.setenv("HOME", str(tmp_path))
        assert cache_folder() == tmp_path / ".cache" / "polyneuron"

    def test_folder_that_cannot_be_made_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("in the way")
        with pytest.raises(ConfigError, match="set XDG_CACHE_HOME"):
            cached_ncf(write_source(tmp_path), folder=tmp_path / "file" / "polyneuron")

    def test_folder_without_a_model_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(FormatError, match="a folder without a model"):
            cached_ncf(tmp_path, folder=tmp_path)
