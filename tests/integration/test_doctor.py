"""The doctor on this very machine."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.leftovers import assert_nothing_left, snapshot

pytestmark = pytest.mark.ray
TIMEOUT_S = 120


def start(folder: Path) -> subprocess.Popen[str]:
    words = [sys.executable, "-m", "polyneuron", "doctor", "--json", "--path", str(folder)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(program: subprocess.Popen[str], said: str) -> None:
    """Read what the program tells until it says this."""
    assert program.stderr is not None
    assert any(line.startswith(said) for line in program.stderr), f"ended before {said!r}"


def test_this_machine_runs_models(tmp_path: Path) -> None:
    """What the tests around this one need is there, and nothing is left of the look at it."""
    with snapshot() as seen:
        with start(tmp_path) as program:
            wait_for(program, "doctor: starting Ray")
            seen.observe()
            output, errors = program.communicate(timeout=TIMEOUT_S)
        assert_nothing_left(seen)
    assert program.returncode == 0, output + errors
    found = json.loads(output)
    status = {check["name"]: check["status"] for check in found["checks"]}
    assert found["ok"] and "problem" not in status.values()
    assert len(found["disk"]["rows"]) == 12
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_no_ending_leaves_the_scratch_file(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    with start(tmp_path) as program:
        wait_for(program, "doctor: reading")
        program.send_signal(number)
        program.communicate(timeout=TIMEOUT_S)
    assert program.returncode == code
    assert list(tmp_path.iterdir()) == []
