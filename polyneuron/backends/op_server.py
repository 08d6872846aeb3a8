"""Serves the ops of running steps by a back end, and gives up on it for good when it fails."""

from __future__ import annotations

from typing import Any

from polyneuron.backends.backend import Backend
from polyneuron.backends.dense_ops import DenseOps, Graphs, matrices, weight_bytes
from polyneuron.backends.graphs import GraphCache
from polyneuron.backends.notice import write_notice
from polyneuron.kernels.arena import Arena

LOST = "its process was lost while it computed"


class BackendServer:
    """Answers one executor's questions about ops (`OpServer`)."""

    def __init__(self, arena: Arena, executor: int, backend: Backend, *, waits: bool) -> None:
        self._arena, self._executor = arena, executor
        self._can = backend.capabilities()
        self._graphs = GraphCache(backend, waits=waits)
        self._ops = DenseOps(arena, backend, self._graphs)
        self._resident: dict[int, int] = {}
        """Bytes of the matrices it is bound to, by their places in the arena."""
        self._resident_bytes = 0
        self._taken: Graphs | None = None
        """Of the op that it took last."""
        self.num_ops = 0
        """Ops that it has computed."""
        self.has_failed = False
        arena.set_backend(True)

    def takes(self, op: Any, num_rows: int) -> bool:
        """Whether the op's graphs are there and its weights within the device's memory."""
        if self.has_failed:
            return False
        try:
            if any(storage not in self._can.storages for storage, _ in matrices(op)):
                return False
            if not self._fits(weight_bytes(op)):
                return False
            self._taken = self._ops.graphs(op, num_rows)
            return self._taken is not None
        except Exception as error:  # noqa: BLE001  whatever a back end raises, the step goes on
            self.fail(error)
            return False

    def _fits(self, wanted: dict[int, int]) -> bool:
        """Whether the device has room for these matrices; then they count as bound."""
        if self._can.max_bytes is None:
            return True
        new = {place: count for place, count in wanted.items() if place not in self._resident}
        num_bytes = self._resident_bytes + sum(new.values())
        if num_bytes > self._can.max_bytes:
            return False
        self._resident |= new
        self._resident_bytes = num_bytes
        return True

    def run(self, op: Any, num_rows: int) -> bool:
        """Compute the op; False when the back end failed, which then is asked no more."""
        try:
            assert self._taken is not None
            self._ops.run(op, num_rows, self._taken)
        except Exception as error:  # noqa: BLE001  whatever a back end raises, the step goes on
            self.fail(error)
            return False
        self.num_ops += 1
        return True

    def fail(self, error: Exception) -> None:
        """Use the back end no more, and say why."""
        self.has_failed = True
        lines = str(error).strip().splitlines()
        give_up(self._arena, self._executor, lines[0] if lines else repr(error))

    def close(self) -> None:
        """Compile nothing more."""
        self._graphs.close()


def give_up(arena: Arena, executor: int, why: str) -> None:
    """Leave all ops to the native kernels; `why` is told once to who looks after the engine."""
    arena.set_backend(False)
    write_notice(arena, executor, why)


def was_lost_inside(arena: Arena, executor: int) -> bool:
    """Whether the executor's last process ended inside its back end; forgotten with the answer."""
    record = arena.executor(executor)
    was_inside = int(record.in_backend) != 0
    record.in_backend = 0
    return was_inside


def open_server(
    arena: Arena, executor: int, backend: Backend | None, *, waits: bool
) -> BackendServer | None:
    """Let the back end serve, but not once a process was lost inside it; None: it does not."""
    if backend is None:
        return None
    if was_lost_inside(arena, executor):
        give_up(arena, executor, LOST)
        return None
    return BackendServer(arena, executor, backend, waits=waits)
