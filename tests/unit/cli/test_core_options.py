"""Cores by mask and range, as llama.cpp's flags name them; slips end in one line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from polyneuron.cli import core_options
from polyneuron.cli.core_options import core_settings
from polyneuron.cores import Cores
from polyneuron.errors import ConfigError
from polyneuron.measure import device_store
from polyneuron.measure.device_profile import device_key
from tests.support.core_trees import alike, rk3588
from tests.support.made_up_device import make_device
from tests.support.program import run
from tests.support.tiny_gguf import write_tiny_gguf

COMMANDS = [
    ("run", "-p", "x"), ("bench",), ("plan",), ("perplexity", "-f", "/dev/null"),
]  # fmt: skip


@pytest.fixture
def machine(tmp_path: Path) -> Cores:
    return alike(tmp_path, 8)


def settings(machine: Cores, mask: str = "", text: str = "") -> dict[str, Any]:
    return core_settings("no model", 0, -1, mask, text, machine)


class TestNames:
    @pytest.mark.parametrize(
        "mask, text, cores",
        [
            ("", "", ()), ("3", "", (0, 1)), ("0xF0", "", (4, 5, 6, 7)), ("0x00a", "", (1, 3)),
            ("", "2-4", (2, 3, 4)), ("", "-1", (0, 1)), ("", "6-", (6, 7)), ("", "5", (5,)),
            ("", "-", (0, 1, 2, 3, 4, 5, 6, 7)),
            ("", "0,2,5-6", (0, 2, 5, 6)), ("1", "6-7", (0, 6, 7)), ("f", "2-3", (0, 1, 2, 3)),
        ],
    )  # fmt: skip
    def test_cores(self, machine: Cores, mask: str, text: str, cores: tuple[int, ...]) -> None:
        assert settings(machine, mask, text)["cores"] == cores

    @pytest.mark.parametrize(
        "mask, text, complaint",
        [
            ("0x100", "", "-C 0x100: core 8 does not exist or is not allowed here: allowed 0-7"),
            ("", "4-9", "-Cr 4-9: core 8 does not exist or is not allowed here: allowed 0-7"),
            ("0", "", "-C 0: names no core; give one as f0, or leave it out"),
            ("xyz", "", "-C xyz: no hexadecimal mask; give one as f0 for cores 4 to 7"),
            ("-1", "", "-C -1: no hexadecimal mask; give one as f0 for cores 4 to 7"),
            ("", "4-2", "-Cr 4-2: no range of cores; give one as 4-7"),
            ("", "all", "-Cr all: no range of cores; give one as 4-7"),
            ("", "0-99999999", "-Cr 0-99999999: no range of cores; give one as 4-7"),
        ],
    )
    def test_slips_are_named(self, machine: Cores, mask: str, text: str, complaint: str) -> None:
        with pytest.raises(ConfigError) as refused:
            settings(machine, mask, text)
        assert str(refused.value) == complaint

    def test_endless_masks_are_refused(self, machine: Cores) -> None:
        with pytest.raises(ConfigError, match="no hexadecimal mask"):
            settings(machine, "f" * 5000)

    def test_threads_go_along(self, machine: Cores) -> None:
        found = core_settings("no model", 2, 3, "", "", machine)
        assert (found["num_workers"], found["num_npu_threads"]) == (2, 3)


class TestCommands:
    @pytest.mark.parametrize("words", COMMANDS)
    def test_one_line_and_exit_code_2(
        self, words: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        model = write_tiny_gguf(tmp_path / "tiny.gguf")
        assert run(*words, "-m", model, "-C", "1" + "0" * 1000) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("polyneuron: error: -C 1000")
        assert "core 4000 does not exist or is not allowed here: allowed " in line

    @pytest.mark.parametrize("words", COMMANDS)
    def test_environment_twins(
        self,
        words: tuple[str, ...],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        model = write_tiny_gguf(tmp_path / "tiny.gguf")
        monkeypatch.setenv("POLYNEURON_CPU_RANGE", "4000-4001")
        assert run(*words, "-m", model) == 2
        assert "-Cr 4000-4001: core 4000 does not exist" in capsys.readouterr().err
        monkeypatch.setenv("POLYNEURON_CPU_RANGE", "")
        monkeypatch.setenv("POLYNEURON_CPU_MASK", "g")
        assert run(*words, "-m", model) == 2
        assert "-C g: no hexadecimal mask" in capsys.readouterr().err
        monkeypatch.setenv("POLYNEURON_CPU_MASK", "")
        monkeypatch.setenv("POLYNEURON_THREADS_BATCH", "-2")
        assert run(*words, "-m", model) == 2
        assert "POLYNEURON_THREADS_BATCH" in capsys.readouterr().err


class TestReadingOrder:
    """What was measured is known to a run where cores differ, and asked for nowhere else."""

    def test_profile_tells_it(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        model = write_tiny_gguf(tmp_path / "tiny.gguf")
        board = rk3588(tmp_path / "board")
        assert core_settings(str(model), 0, -1, "", "", board)["io_cores"] == ()
        made = make_device()
        reads = [replace(row, core=4, reads_per_s=2 * row.reads_per_s) for row in made.reads]
        profile = replace(
            made, key=device_key(model), core_kinds=board.kinds, reads=(*made.reads, *reads)
        )
        device_store.store_profile(profile)
        found = core_settings(str(model), 0, -1, "", "", board)
        assert found["io_cores"] == (4, 5, 6, 7, 0, 1, 2, 3)

    def test_cores_that_are_alike_need_none(self, machine: Cores) -> None:
        assert core_options.core_settings("no model", 0, -1, "", "", machine)["io_cores"] == ()
