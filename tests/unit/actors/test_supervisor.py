"""Who counts as lost: the dead, the stopped, and those whose heartbeat stands inside a step."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from polyneuron.actors import supervisor
from polyneuron.actors.supervisor import HANG_NS, Supervisor, process_exists, process_state
from polyneuron.kernels.arena import Arena
from tests.support.leftovers import wait_until

NO_PID = 2**22 + 1  # above the kernel's own limit of process numbers


class FakeArena:
    """Executor records of processes that are really there: this one, unless told otherwise."""

    def __init__(self, *pids: int) -> None:
        self.records = [SimpleNamespace(pid=pid, busy_seq=0, heartbeat=0) for pid in pids]

    def executor(self, index: int) -> Any:
        return self.records[index]


class Clock:
    """The supervisor's clock, moved by hand."""

    def __init__(self) -> None:
        self.now_ns = 10**9

    def __call__(self) -> int:
        return self.now_ns


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(supervisor, "monotonic_ns", made)
    return made


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-S", "-c", "input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        wait_until(lambda: process_state(process.pid) == "S", "the process waits for its input")
        yield process
        process.kill()


def make_supervisor(arena: FakeArena) -> Supervisor:
    return Supervisor(cast(Arena, arena), tuple(range(len(arena.records))))


class TestSupervisor:
    def test_living_are_not_lost(self, clock: Clock) -> None:
        watched = make_supervisor(FakeArena(os.getpid(), os.getpid()))
        assert watched.dead() == watched.lost() == []

    def test_missing_process_is_dead(self, clock: Clock) -> None:
        watched = make_supervisor(FakeArena(os.getpid(), NO_PID))
        assert not process_exists(NO_PID)
        assert watched.dead() == watched.lost() == [1]

    def test_stopped_process_is_lost(self, clock: Clock, sleeper: subprocess.Popen[bytes]) -> None:
        watched = make_supervisor(FakeArena(sleeper.pid))
        os.kill(sleeper.pid, signal.SIGSTOP)
        wait_until(lambda: process_state(sleeper.pid) == "T", "the process stops")
        assert watched.dead() == []
        assert watched.lost() == [0]

    def test_ended_process_is_lost_before_it_is_reaped(
        self, clock: Clock, sleeper: subprocess.Popen[bytes]
    ) -> None:
        watched = make_supervisor(FakeArena(sleeper.pid))
        sleeper.kill()
        wait_until(lambda: process_state(sleeper.pid) == "Z", "the process ends")
        assert watched.lost() == [0]

    def test_sleeper_inside_a_step_hangs(
        self, clock: Clock, sleeper: subprocess.Popen[bytes]
    ) -> None:
        arena = FakeArena(sleeper.pid)
        watched = make_supervisor(arena)
        arena.records[0].busy_seq = 3
        assert watched.lost() == []
        clock.now_ns += HANG_NS
        assert watched.lost() == []
        clock.now_ns += 1
        assert watched.lost() == [0]

    def test_those_of_its_process_are_lost_too(
        self, clock: Clock, sleeper: subprocess.Popen[bytes]
    ) -> None:
        """They are killed with it, and cannot leave the step any more."""
        arena = FakeArena(os.getpid(), sleeper.pid, sleeper.pid)
        watched = make_supervisor(arena)
        arena.records[2].busy_seq = 3
        assert watched.lost() == []
        clock.now_ns += HANG_NS + 1
        assert watched.lost() == [1, 2]

    def test_heartbeat_shows_life(self, clock: Clock, sleeper: subprocess.Popen[bytes]) -> None:
        arena = FakeArena(sleeper.pid)
        watched = make_supervisor(arena)
        arena.records[0].busy_seq = 3
        for _ in range(4):
            assert watched.lost() == []
            clock.now_ns += HANG_NS
            arena.records[0].heartbeat += 1

    def test_idle_executor_never_hangs(
        self, clock: Clock, sleeper: subprocess.Popen[bytes]
    ) -> None:
        watched = make_supervisor(FakeArena(sleeper.pid))
        assert watched.lost() == []
        clock.now_ns += 100 * HANG_NS
        assert watched.lost() == []

    def test_busy_processor_is_no_hang(self, clock: Clock) -> None:
        """One claim of a big model on a slow core outlasts the bound; this process runs."""
        arena = FakeArena(os.getpid())
        watched = make_supervisor(arena)
        arena.records[0].busy_seq = 3
        assert watched.lost() == []
        clock.now_ns += 100 * HANG_NS
        assert watched.lost() == []

    def test_time_between_steps_is_no_hang(
        self, clock: Clock, sleeper: subprocess.Popen[bytes]
    ) -> None:
        """The heartbeat is compared within one step only."""
        arena = FakeArena(sleeper.pid)
        watched = make_supervisor(arena)
        arena.records[0].busy_seq = 3
        assert watched.lost() == []
        clock.now_ns += 100 * HANG_NS
        arena.records[0].busy_seq = 4
        assert watched.lost() == []

    def test_kill_ends_lost_processes_only(self, sleeper: subprocess.Popen[bytes]) -> None:
        watched = make_supervisor(FakeArena(os.getpid(), sleeper.pid, NO_PID))
        watched.kill([1, 2])
        assert sleeper.wait(timeout=10) == -signal.SIGKILL

    def test_idle_is_asked_of_the_others(self) -> None:
        arena = FakeArena(os.getpid(), os.getpid())
        watched = make_supervisor(arena)
        arena.records[1].busy_seq = 2
        assert not watched.all_idle(but=[])
        assert watched.all_idle(but=[1])
