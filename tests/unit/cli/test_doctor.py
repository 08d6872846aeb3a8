"""What `doctor` prints and how it ends; what it finds is made up."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from polyneuron.cli.main import main
from polyneuron.measure import doctor as examination
from polyneuron.measure.check import Check, ok, problem, warning
from polyneuron.measure.disk_probe import DiskProbe
from polyneuron.measure.doctor import HOST_CHECKS, examine
from polyneuron.measure.host import Host
from tests.support.fake_host import FakeHost
from tests.unit.measure.test_disk_checks import make_disk

GOOD = [ok("CPU", "Fast 9000"), warning("swap", "in use", "give --memory")]
BAD = [*GOOD, problem("Ray", "is not installed", "pip install ray")]

Pretend = Callable[[list[Check], DiskProbe], list[Path]]


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Pretend:
    """Let the examination find this; returns the places it was asked to probe."""

    def put(checks: list[Check], disk: DiskProbe) -> list[Path]:
        places: list[Path] = []

        def found(host: Host, path: Path, *rest: object) -> tuple[list[Check], DiskProbe]:
            places.append(path)
            return checks, disk

        monkeypatch.setattr(examination, "examine", found)
        return places

    return put


def doctor(*words: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["doctor", *map(str, words)])
    assert isinstance(ended.value.code, int)
    return ended.value.code


class TestDoctor:
    def test_lines_and_cures(self, pretend: Pretend, capsys: pytest.CaptureFixture[str]) -> None:
        pretend(GOOD, make_disk())
        assert doctor() == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[:3] == [
            "ok       CPU   Fast 9000",
            "warning  swap  in use",
            "               -> give --memory",
        ]
        assert lines[-1] == "no problems, 1 warning"
        assert any(line.split()[:3] == ["random", "8", "32"] for line in lines)

    def test_problem_ends_with_1(
        self, pretend: Pretend, capsys: pytest.CaptureFixture[str]
    ) -> None:
        pretend(BAD, make_disk(failure="it is full"))
        assert doctor() == 1
        assert capsys.readouterr().out.splitlines()[-1] == "1 problem, 1 warning"

    def test_json(self, pretend: Pretend, capsys: pytest.CaptureFixture[str]) -> None:
        pretend(BAD, make_disk())
        assert doctor("--json") == 1
        found = json.loads(capsys.readouterr().out)
        assert found["ok"] is False
        assert found["checks"][0] == {
            "name": "CPU", "status": "ok", "found": "Fast 9000", "cure": None,
        }  # fmt: skip
        assert found["disk"]["device"]["backend"] == "uring"
        row = found["disk"]["rows"][0]
        assert (row["pattern"], row["read_bytes"], row["depth"]) == ("sequential", 1 << 20, 1)
        assert row["bytes_per_second"] == pytest.approx(1.5e9)

    def test_unmeasured_is_null(self, pretend: Pretend, capsys: pytest.CaptureFixture[str]) -> None:
        disk = make_disk(failure="it is full", cure="free some", probed_bytes=0)
        object.__setattr__(disk, "probe", None)
        pretend(GOOD, disk)
        assert doctor("--json") == 0
        found = json.loads(capsys.readouterr().out)["disk"]
        assert found["device"] is found["rows"] is found["probed_bytes"] is None

    def test_default_place_is_the_model_cache(
        self, pretend: Pretend, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        places = pretend(GOOD, make_disk())
        assert doctor() == 0
        (tmp_path / "polyneuron").mkdir()
        assert doctor() == 0
        assert doctor("--path", tmp_path) == 0
        assert places == [tmp_path, tmp_path / "polyneuron", tmp_path]

    def test_missing_path_is_bad_input(
        self, pretend: Pretend, capsys: pytest.CaptureFixture[str]
    ) -> None:
        pretend(GOOD, make_disk())
        assert doctor("--path", "nowhere") == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line == "polyneuron: error: --path nowhere: no such file or folder"


def test_examination_looks_at_everything(tmp_path: Path) -> None:
    said: list[str] = []
    disk = make_disk()
    checks, found = examine(
        FakeHost(tmp_path).make(), tmp_path, said.append, lambda *_: disk, lambda: ok("Ray", "up")
    )
    names = [check.name for check in checks]
    assert len(names) == len(set(names)) == len(HOST_CHECKS) + 5
    assert names[-5:] == ["io_uring", "O_DIRECT", "disk", "disk speed", "Ray"]
    assert (found, said) == (disk, ["starting Ray"])
