"""What `profile --device` shows of a machine; its figures are made up."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from polyneuron.cli.main import main
from polyneuron.cli.profile_device import profile_device
from polyneuron.measure import device_store
from polyneuron.measure.device_profile import device_key
from tests.support.made_up_device import make_device


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made = replace(make_device(), key=device_key(tmp_path))
    monkeypatch.setattr(device_store, "profile_device", lambda folder, progress: made)
    return tmp_path


def test_tables_hold_every_row(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile_device(folder, as_json=False)
    shown = capsys.readouterr()
    lines = [line.strip() for line in shown.out.splitlines()]
    assert sum(line.startswith("random") for line in lines) == 16
    assert sum(line.startswith("in order") for line in lines) == 1
    for kernel in ("memory", "tiles", "dot", "axpy", "attention"):
        assert any(line.startswith(kernel) for line in lines)
    assert any(line.startswith("neuron cache: a hit 8 ns, a miss 300 ns") for line in lines)
    assert max(map(len, shown.out.splitlines())) <= 100
    assert "polyneuron plan uses it" in shown.err


def test_command_needs_no_model(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--device"], ["--device", "-m", str(folder)]):
        with pytest.raises(SystemExit) as ended:
            main(["profile", *words])
        assert ended.value.code == 0
        assert "neuron cache: a hit" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        main(["profile"])
    assert ended.value.code == 2
    assert "or measure the machine with --device" in capsys.readouterr().err


def test_json_is_the_profile(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile_device(folder, as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert found["format_version"] == 2
    assert device_store.load_profile(folder) is not None
