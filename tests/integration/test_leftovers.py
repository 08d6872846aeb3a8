"""Run after run leaves nothing, and between requests everything rests."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from polyneuron import Engine
from tests.support.engines import GREEDY, PROMPT, open_engine, write_model
from tests.support.leftovers import Snapshot, assert_nothing_left, snapshot, wait_until

pytestmark = pytest.mark.ray

ROOT = Path(__file__).resolve().parents[2]
NUM_RUNS = 20
NUM_PROGRAMS = 2
MAX_DISK_BYTES = 5_000_000
IDLE_S = 10.0
BUSY_PERCENT = 20.0
"""Far above what is wanted (5 %): the machine of a test may be busy with other things."""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def before() -> Iterator[Snapshot]:
    with snapshot() as taken:
        yield taken


def disk_bytes(folder: Path) -> int:
    """Bytes that the files of a folder take."""
    return sum(
        os.lstat(Path(root, name)).st_blocks * 512
        for root, _, names in os.walk(folder)
        for name in names
    )


def descriptors() -> int:
    """Open files of this process."""
    return len(os.listdir("/proc/self/fd"))


class TestLeftovers:
    def test_runs_leave_nothing(self, path: Path, before: Snapshot) -> None:
        expected, opened, most = None, [], 0
        for _ in range(NUM_RUNS):
            with open_engine(path) as engine:
                result = engine.generate(PROMPT, max_tokens=10, sampling=GREEDY)
                before.observe()
                most = max(most, disk_bytes(before.base))
            expected = expected or result.logits_sha256
            assert result.logits_sha256 == expected is not None
            assert_nothing_left(before)
            opened.append(descriptors())
        print(
            f"{NUM_RUNS} runs: at most {most} bytes on disk, open files {opened[0]}..{opened[-1]}"
        )
        assert most < MAX_DISK_BYTES
        # Ray's native library keeps up to two sockets of each connection until the process ends.
        assert opened[-1] - opened[0] <= 2 * NUM_RUNS, f"open files grow: {opened}"

    def test_programs_leave_nothing(self, path: Path, before: Snapshot) -> None:
        command = [sys.executable, "-m", "tests.integration.engine_driver", str(path), "once"]
        for _ in range(NUM_PROGRAMS):
            with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as program:
                assert program.stdout is not None
                assert program.stdout.readline().startswith("ready")
                before.observe()
                program.communicate(timeout=60)
            assert program.returncode == 0
            assert_nothing_left(before)


class TestIdle:
    def test_idle_engine_rests(self, path: Path) -> None:
        """Between requests: this process, all actors and all of Ray's."""
        with open_engine(path) as engine:
            engine.generate(PROMPT, max_tokens=10, sampling=GREEDY)
            usage = [math.inf]

            def rests() -> bool:
                usage[-1] = percent_of_core(engine)
                return usage[-1] < BUSY_PERCENT

            wait_until(rests, f"below {BUSY_PERCENT} % of a core", deadline_s=6 * IDLE_S)
        print(f"idle: {usage[-1]:.2f} % of one core over {IDLE_S} s")


def percent_of_core(engine: Engine) -> float:
    """Processor use of all processes over the next IDLE_S seconds."""
    pids = [os.getpid(), *(process.pid for process in engine.cluster.processes())]
    first, start = ticks(pids), time.monotonic()
    threading.Event().wait(IDLE_S)  # what is measured is that nothing happens
    elapsed = time.monotonic() - start
    return 100 * (ticks(pids) - first) / os.sysconf("SC_CLK_TCK") / elapsed


def ticks(pids: list[int]) -> int:
    """Clock ticks in user and system mode of processes, of ended ones none."""
    total = 0
    for pid in pids:
        try:
            text = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            continue
        total += sum(map(int, text[text.rindex(")") + 2 :].split()[11:13]))
    return total
