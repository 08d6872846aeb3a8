"""Notices executors that died or hang, from what they write into the arena and from /proc."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from polyneuron.kernels.arena import Arena, monotonic_ns

HANG_NS = 1_500_000_000
"""An executor in a step whose heartbeat stands this long, and that does not compute, hangs."""


LOST_STATES = frozenset("XZTt")
"""Gone, ended, stopped by a signal, stopped by a tracer."""


def process_state(pid: int) -> str:
    """The state letter of /proc/PID/stat, or X when there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "X"
    return text[text.rindex(")") + 2]


def process_computes(pid: int) -> bool:
    """Whether a thread of it runs, or would if a core were free."""
    try:
        tasks = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return False
    return any(process_state(int(task)) == "R" for task in tasks)


def process_exists(pid: int) -> bool:
    """Whether there is such a process (a dead one that nobody has waited for counts)."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@dataclass(slots=True)
class Supervisor:
    """Watches the executors of one arena."""

    arena: Arena
    executors: tuple[int, ...]
    _beats: dict[int, tuple[tuple[int, int], int]] = field(default_factory=dict)
    """executor -> (step and heartbeat last seen, since when in ns)"""

    def dead(self) -> list[int]:
        """Executors whose process is gone: cheap enough to ask before every step."""
        return [i for i in self.executors if not process_exists(self.arena.executor(i).pid)]

    def lost(self) -> list[int]:
        """Executors that are gone, stopped, or hang inside the running step.

        Who shares a process with one of them is lost with it.
        """
        now_ns, pids = monotonic_ns(), set()
        for index in self.executors:
            pid = int(self.arena.executor(index).pid)
            if process_state(pid) in LOST_STATES or self._hangs(index, now_ns):
                pids.add(pid)
        return [index for index in self.executors if int(self.arena.executor(index).pid) in pids]

    def _hangs(self, index: int, now_ns: int) -> bool:
        record = self.arena.executor(index)
        seen, since_ns = self._beats.get(index, ((0, 0), now_ns))
        now = (int(record.busy_seq), int(record.heartbeat))
        # A claim of a big model on a slow core takes seconds without a beat.
        if record.busy_seq == 0 or now != seen or process_computes(record.pid):
            self._beats[index] = (now, now_ns)
            return False
        return now_ns - since_ns > HANG_NS

    def kill(self, executors: Iterable[int]) -> None:
        """End the processes of lost executors, so that none can write into a later step."""
        for pid in {int(self.arena.executor(index).pid) for index in executors}:
            if process_state(pid) not in "XZ":
                os.kill(pid, signal.SIGKILL)

    def all_idle(self, but: Iterable[int]) -> bool:
        """Whether every executor except `but` has left the step."""
        others = set(self.executors) - set(but)
        return all(self.arena.executor(index).busy_seq == 0 for index in others)
