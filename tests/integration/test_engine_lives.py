"""Engines opened, closed and opened again: executors, equal bits, nothing held afterwards."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from polyneuron import Completion, Engine
from polyneuron.cores import this_machine
from polyneuron.errors import EngineError
from tests.support.engines import GREEDY, LONG_PROMPT, PROMPT, open_engine, write_model
from tests.support.leftovers import assert_nothing_left, snapshot, wait_until

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def engine(path: Path) -> Iterator[Engine]:
    with open_engine(path) as opened:
        yield opened


def greedy(engine: Engine, prompt: list[int] = PROMPT, max_tokens: int = 40) -> Completion:
    return engine.generate(prompt, max_tokens=max_tokens, sampling=GREEDY, ignore_eos=True)


class TestExecutors:
    def test_each_worker_keeps_to_its_core(self, engine: Engine) -> None:
        cores = this_machine().order
        for status in engine.executors():
            place = status.executor % 2
            expected = [cores[place]] if place < len(cores) else sorted(cores)
            assert status.cores == expected
            record = engine.actors.arena.executor(status.executor)
            assert record.pid == status.pid
        workers = engine.executors()[:2]
        assert len({status.pid for status in workers}) == 2

    def test_threads_are_where_they_say(self, engine: Engine) -> None:
        """Asked of the kernel: some thread of the worker may run on its core and no other."""
        for status in engine.executors()[:2]:
            tasks = Path(f"/proc/{status.pid}/task")
            found = [sorted(os.sched_getaffinity(int(task.name))) for task in tasks.iterdir()]
            assert status.cores in found


class TestSameBits:
    """Must hold: workers, and workers restarted, change no token and no bit of a logit."""

    def test_restarted_workers_change_nothing(self, engine: Engine) -> None:
        before = greedy(engine, LONG_PROMPT)
        for executor in (0, 1, 2):
            pid = engine.executors()[executor].pid
            os.kill(pid, signal.SIGKILL)
            after = greedy(engine, LONG_PROMPT)
            assert after.tokens == before.tokens
            assert after.logits_sha256 == before.logits_sha256
            assert engine.executors()[executor].pid != pid


class TestLives:
    """Engines of their own: these tests come last, the module's engine is closed before them."""

    def test_number_of_workers_changes_nothing(self, engine: Engine, path: Path) -> None:
        two = greedy(engine, LONG_PROMPT)
        engine.close()
        for workers, npu in ((1, 0), (2, 0), (1, 1)):
            with open_engine(path, num_workers=workers, num_npu_threads=npu) as other:
                one = greedy(other, LONG_PROMPT)
            assert one.tokens == two.tokens
            assert one.logits_sha256 == two.logits_sha256 is not None

    def test_closed_engine_says_so(self, path: Path) -> None:
        opened = open_engine(path)
        stream = iter(opened.stream(PROMPT, ignore_eos=True))
        next(stream)
        opened.close()
        opened.close()
        uses = (
            lambda: opened.generate(PROMPT),
            lambda: opened.score(PROMPT, 0),
            lambda: opened.executors(),
            lambda: opened.memory(),
            lambda: list(stream),
        )
        for use in uses:
            with pytest.raises(EngineError, match="this engine is closed: open another"):
                use()

    def test_closed_engine_gives_its_memory_back(self, path: Path) -> None:
        opened = open_engine(path)
        greedy(opened)
        address = opened.actors.arena.address
        assert any(mapped_at(address))
        opened.close()
        wait_until(lambda: not any(mapped_at(address)), "the arena is unmapped")

    def test_error_inside_with_leaves_nothing(self, path: Path) -> None:
        with snapshot() as before:
            with (
                pytest.raises(ZeroDivisionError),
                open_engine(path) as opened,
            ):
                next(iter(opened.stream(PROMPT, ignore_eos=True)))
                before.observe()
                raise ZeroDivisionError
            assert_nothing_left(before)

    def test_engine_may_be_opened_in_a_thread(self, path: Path) -> None:
        found: list[list[int]] = []

        def use() -> None:
            with open_engine(path) as opened:
                found.append(greedy(opened).tokens)

        thread = threading.Thread(target=use)
        thread.start()
        thread.join(60)
        assert len(found) == 1


def mapped_at(address: int) -> Iterator[str]:
    """Lines of this process's memory map that hold the address and belong to shared memory."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(end, 16) for end in line.split()[0].split("-"))
        if first <= address < last and "/dev/shm" in line:
            yield line
