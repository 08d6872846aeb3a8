"""The step board under threads: every unit once, whoever sleeps, leaves or comes back."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from numpy.typing import NDArray

from polyneuron.errors import ProtocolError
from polyneuron.kernels.arena import (
    HEADER_BYTES,
    PAGE_BYTES,
    Arena,
    OpKind,
    ServeStatus,
    StepFlag,
    StepStatus,
    Unit,
    board_bytes,
    monotonic_ns,
)
from polyneuron.planning.step_program import StepOp, write_program
from tests.support.leftovers import wait_until

MAX_OPS = 64
TOKENS = 24
COLS = 32
S = 10**9


class Board:
    """An arena with a program that quantises rows of ones, op after op."""

    def __init__(self, num_executors: int, units: list[Unit], spin_limit: int = 100) -> None:
        program = HEADER_BYTES + -(-board_bytes(MAX_OPS) // PAGE_BYTES) * PAGE_BYTES
        self.rows = program + MAX_OPS * 192
        self.acts = self.rows + TOKENS * COLS * 4
        num_bytes = self.acts + len(units) * TOKENS * 64
        self.arena = Arena.over(np.zeros(num_bytes + 2 * PAGE_BYTES, np.uint8))
        self.arena.format(HEADER_BYTES, MAX_OPS, num_executors)
        ops = [
            StepOp(
                kind=OpKind.QUANTIZE, unit=unit, after=index, cols=COLS,
                in_=self.rows, in_stride=COLS * 4,
                out_acts=self.acts + index * TOKENS * 64, out_acts_stride=64,
            )
            for index, unit in enumerate(units)
        ]  # fmt: skip
        write_program(self.arena, program, ops)
        step = self.arena.step
        step.program, step.program_ops, step.num_tokens = program, len(ops), TOKENS
        step.spin_limit, step.max_tokens = spin_limit, TOKENS
        step.num_parties[0] = step.num_parties[1] = num_executors
        self.num_ops = len(ops)
        self.statuses: dict[int, ServeStatus] = {}

    def step(self, timeout_ns: int = 20 * S, flags: int = 0) -> StepStatus:
        seq = self.arena.open_step()
        self.arena.step.flags = flags
        self.arena.ring(seq)
        return self.arena.wait_step(seq, timeout_ns)

    def start(self, executor: int, unit: Unit) -> threading.Thread:
        """An executor that has attached: it takes part in every step rung from now on."""
        generation = self.arena.attach(executor, unit, os.getpid())
        thread = threading.Thread(target=self._serve, args=(executor, generation))
        thread.start()
        return thread

    def _serve(self, executor: int, generation: int) -> None:
        status = ServeStatus.SLICE
        while status is ServeStatus.SLICE:
            status = self.arena.serve(executor, generation, S)
        self.statuses[executor] = status

    @contextmanager
    def serving(self, units: list[Unit]) -> Iterator[list[threading.Thread]]:
        threads = [self.start(executor, unit) for executor, unit in enumerate(units)]
        try:
            yield threads
        finally:
            self.arena.stop()
            for thread in threads:
                thread.join(10)
                assert not thread.is_alive()

    def fill(self, value: float) -> None:
        self.arena.view(self.rows, (TOKENS, COLS), np.float32)[:] = value

    def results(self) -> NDArray[np.uint8]:
        """Bytes every op has written for every token (40 of each 64)."""
        shape = (self.num_ops, TOKENS, 64)
        return self.arena.view(self.acts, shape, np.uint8)[..., :40]


CPU, NPU = Unit.CPU, Unit.NPU


class TestStepBoard:
    @pytest.mark.parametrize("spin_limit", [0, 2000])
    @pytest.mark.parametrize("num_executors", [1, 2, 5])
    def test_every_unit_is_done(self, num_executors: int, spin_limit: int) -> None:
        board = Board(num_executors, [CPU] * 20, spin_limit)
        with board.serving([CPU] * num_executors):
            for value in range(1, 200):
                board.fill(value)
                assert board.step() is StepStatus.DONE
                rows = board.results().reshape(-1, 40)
                assert (rows == rows[0]).all()
                assert rows[0].any()

    def test_units_alternate(self) -> None:
        board = Board(3, [CPU, NPU] * 10, spin_limit=0)
        with board.serving([CPU, NPU, NPU]):
            for _ in range(100):
                assert board.step() is StepStatus.DONE

    def test_step_numbers_wrap(self) -> None:
        """The progress word keeps the low 12 bits of the number: more steps than that."""
        board = Board(2, [CPU] * 2)
        with board.serving([CPU, CPU]):
            assert all(board.step() is StepStatus.DONE for _ in range(4200))

    def test_dry_step_touches_nothing(self) -> None:
        board = Board(1, [CPU] * 3)
        board.fill(1.0)
        with board.serving([CPU]):
            assert board.step(flags=int(StepFlag.DRY)) is StepStatus.DONE
        assert not board.results().any()

    def test_absent_unit_times_out(self) -> None:
        board = Board(2, [CPU, NPU, CPU])
        with board.serving([CPU]):
            before_ns = monotonic_ns()
            assert board.step(timeout_ns=S // 20) is StepStatus.TIMEOUT
            assert monotonic_ns() - before_ns >= S // 20

    def test_late_executor_finishes_step(self) -> None:
        """Attached while the step waits for it: rung again, it is computed by all."""
        board = Board(2, [CPU, NPU, CPU])
        board.fill(3.0)
        with board.serving([CPU]):
            assert board.step(timeout_ns=S // 20) is StepStatus.TIMEOUT
            late = board.start(1, NPU)
            assert board.step() is StepStatus.DONE
            board.arena.stop()
            late.join(10)
        assert board.results().any(axis=2).all()

    def test_abort_unwinds_everybody(self) -> None:
        board = Board(2, [CPU, NPU, CPU])
        with board.serving([CPU, CPU]):
            assert board.step(timeout_ns=S // 20) is StepStatus.TIMEOUT
            wait_until(lambda: board.arena.executor(0).busy_seq != 0, "one waits inside the step")
            board.arena.abort()
            places = [board.arena.executor(index) for index in (0, 1)]
            wait_until(lambda: not any(p.busy_seq for p in places), "both have left")
            assert board.step() is StepStatus.ABORTED
            board.arena.clear_abort()
            assert board.step(timeout_ns=S // 20) is StepStatus.TIMEOUT

    def test_new_process_takes_the_place(self) -> None:
        """The old holder leaves as stale and takes no unit of a later step."""
        board = Board(1, [CPU] * 4)
        with board.serving([CPU]) as threads:
            assert board.step() is StepStatus.DONE
            successor = board.start(0, CPU)
            threads[0].join(10)
            left = [board.statuses[0]]
            assert board.step() is StepStatus.DONE
            board.arena.stop()
            successor.join(10)
        left.append(board.statuses[0])
        assert left == [ServeStatus.STALE, ServeStatus.STOPPED]

    def test_stop_ends_idle_executors(self) -> None:
        board = Board(3, [CPU])
        with board.serving([CPU, CPU, NPU]):
            assert board.step() is StepStatus.DONE
        assert set(board.statuses.values()) == {ServeStatus.STOPPED}

    def test_step_after_stop_is_aborted(self) -> None:
        board = Board(1, [CPU])
        board.arena.stop()
        assert board.step() is StepStatus.ABORTED

    def test_heartbeat_counts_on_while_waiting(self) -> None:
        """A waiter inside a step is alive: its heartbeat says so."""
        board = Board(2, [NPU, CPU])
        with board.serving([CPU]):
            assert board.step(timeout_ns=S // 100) is StepStatus.TIMEOUT
            first = board.arena.executor(0).heartbeat
            wait_until(lambda: board.arena.executor(0).heartbeat > first + 2, "beats")

    def test_stalled_executor_begins_late(self) -> None:
        """A modelled stall holds one step up, and the heartbeat stands meanwhile."""
        board = Board(1, [NPU])
        board.fill(1.0)
        with board.serving([NPU]):
            place = board.arena.executor(0)
            place.stall_ns = S // 5
            before_ns, beats = monotonic_ns(), place.heartbeat
            assert board.step(timeout_ns=S // 20) is StepStatus.TIMEOUT
            assert place.heartbeat == beats
            wait_until(lambda: place.busy_seq == 0, "the stalled step ends")
            assert monotonic_ns() - before_ns >= S // 5
            assert place.stall_ns == 0
            assert board.step() is StepStatus.DONE
        assert board.results().any(axis=2).all()

    def test_abort_ends_a_stall(self) -> None:
        board = Board(1, [NPU])
        with board.serving([NPU]):
            place = board.arena.executor(0)
            place.stall_ns = 1000 * S
            assert board.step(timeout_ns=S // 20) is StepStatus.TIMEOUT
            board.arena.abort()
            wait_until(lambda: place.busy_seq == 0, "it has left")
            board.arena.clear_abort()
            assert board.step() is StepStatus.DONE

    def test_foreign_memory_is_no_arena(self) -> None:
        arena = Arena.over(np.zeros(3 * PAGE_BYTES, np.uint8))
        with pytest.raises(ProtocolError, match="holds no arena"):
            arena.check()


class TestWords:
    def test_wait_is_bounded(self) -> None:
        arena = Arena.over(np.zeros(2 * PAGE_BYTES, np.uint8))
        before_ns = monotonic_ns()
        assert arena.wait_word(64, 0, S // 50) == 0
        assert S // 50 <= monotonic_ns() - before_ns < 5 * S

    def test_changed_word_is_not_waited_for(self) -> None:
        arena = Arena.over(np.zeros(2 * PAGE_BYTES, np.uint8))
        arena.store_word(64, 7)
        assert arena.wait_word(64, 6, 3600 * S) == 7

    def test_store_wakes_a_waiter(self) -> None:
        arena = Arena.over(np.zeros(2 * PAGE_BYTES, np.uint8))
        seen: list[int] = []
        waiter = threading.Thread(target=lambda: seen.append(arena.wait_word(64, 0, 3600 * S)))
        waiter.start()
        arena.store_word(64, 5)
        waiter.join(10)
        assert seen == [5]

    @pytest.mark.parametrize(("offset", "count"), [(-1, 1), (2 * PAGE_BYTES - 3, 4), (0, 1 << 20)])
    def test_views_stay_inside(self, offset: int, count: int) -> None:
        arena = Arena.over(np.zeros(2 * PAGE_BYTES, np.uint8))
        with pytest.raises(ValueError, match="outside the arena"):
            arena.view(offset, (count,), np.uint8)
        with pytest.raises(ValueError, match="outside the arena"):
            arena.bytes_at(offset, count)
