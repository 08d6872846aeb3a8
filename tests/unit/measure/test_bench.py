"""`bench` before its engines are opened: files and cgroups."""

from __future__ import annotations

import errno
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NoReturn

import pytest

from polyneuron.config import EngineConfig, Phase
from polyneuron.measure import bench
from polyneuron.measure.bench import BenchSettings, describe_file, make_cgroups
from polyneuron.measure.speed import SpeedTest
from tests.support.synthetic import write_synth

GIB = 1 << 30


def make_settings(folder: Path, **changes: Any) -> BenchSettings:
    write_synth(folder)
    fields = {
        "path": folder / "synth.ncf",
        "tests": [SpeedTest(Phase.DECODE, 4)],
        "repetitions": 1,
        "config": EngineConfig(memory_bytes=GIB),
        "peer_path": folder / "synth.gguf",
    }
    return BenchSettings(**(fields | changes))


class TestCgroups:
    def refuse(self, *_: object) -> NoReturn:
        raise PermissionError(errno.EACCES, "Permission denied")

    def test_refusal_is_said_in_one_line(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(bench, "memory_cgroup", self.refuse)
        said: list[str] = []
        with ExitStack() as cleanup:
            assert make_cgroups(make_settings(tmp_path), cleanup, said.append) == (None, None)
        (line,) = [line for line in said if not line.startswith("warning: both engines")]
        assert line.startswith("no memory cgroup can be made here (Permission denied): --memory")

    @pytest.mark.parametrize("changes", [{"peer_path": None}, {"config": EngineConfig()}])
    def test_none_without_peer_or_limit(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
    ) -> None:
        monkeypatch.setattr(bench, "memory_cgroup", self.refuse)
        said: list[str] = []
        with ExitStack() as cleanup:
            settings = make_settings(tmp_path, **changes)
            assert make_cgroups(settings, cleanup, said.append) == (None, None)
        assert said == []

    def test_more_than_the_machine_has_is_warned_of(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(bench, "memory_cgroup", self.refuse)
        said: list[str] = []
        settings = make_settings(tmp_path, config=EngineConfig(memory_bytes=1 << 50))
        with ExitStack() as cleanup:
            make_cgroups(settings, cleanup, said.append)
        assert said[0].startswith("warning: both engines together may take ")


def test_files_of_one_model_are_described_alike(tmp_path: Path) -> None:
    settings = make_settings(tmp_path)
    assert settings.peer_path is not None
    ours, peers = describe_file(settings.path), describe_file(settings.peer_path)
    assert (ours.name, ours.num_params) == (peers.name, peers.num_params)
    assert peers.size_bytes > 0
    assert ours.size_bytes == pytest.approx(peers.size_bytes, rel=0.05)
