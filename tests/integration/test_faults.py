"""Fault, then what must hold: actors lost at the worst moment, files that go, drivers that end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from polyneuron import Completion, Engine, Generation
from polyneuron.actors.supervisor import process_state
from polyneuron.engine import LoadProgress
from polyneuron.errors import DeviceError, EngineError, PolyneuronError
from polyneuron.io.weight_reader import ReadReport
from tests.support.engines import (
    GREEDY,
    LONG_PROMPT,
    NPU_EXECUTOR,
    PROMPT,
    open_engine,
    write_model,
)
from tests.support.leftovers import Snapshot, assert_nothing_left, leftovers, snapshot, wait_until

if TYPE_CHECKING:  # at run time Ray would be imported before an engine has set it up
    from polyneuron.actors.launch import Actors

pytestmark = pytest.mark.ray

ROOT = Path(__file__).resolve().parents[2]
RECOVERY_BOUND_S = 20.0
NUM_TOKENS = 1200


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def engine(path: Path) -> Iterator[Engine]:
    with open_engine(path) as opened:
        yield opened


@pytest.fixture(scope="module")
def undisturbed(engine: Engine) -> dict[str, Completion]:
    return {
        "decode": start(engine, PROMPT).wait(),
        "prefill": start(engine, LONG_PROMPT, 30).wait(),
    }


@pytest.fixture
def before() -> Iterator[Snapshot]:
    with snapshot() as taken:
        yield taken


def start(engine: Engine, prompt: list[int], max_tokens: int = NUM_TOKENS) -> Generation:
    return engine.stream(prompt, max_tokens=max_tokens, sampling=GREEDY, ignore_eos=True)


def seen_mid_decode(stream: Iterator[str]) -> None:
    """Return when some text has come; the rest is under way."""
    assert next(stream)


def wait_for_step(engine: Engine, executor: int) -> int:
    """Wait until an executor is inside a step; returns its process."""
    record = engine.actors.arena.executor(executor)
    pid = int(record.pid)
    while record.busy_seq == 0:  # steps are short: any pause would miss them
        assert process_state(pid) not in "XZ"
    return pid


class TestExecutors:
    @pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
    @pytest.mark.parametrize("executor", [0, 1])
    def test_worker_lost_mid_decode(
        self,
        engine: Engine,
        undisturbed: dict[str, Completion],
        fault: signal.Signals,
        executor: int,
    ) -> None:
        begun = time.monotonic()
        request = start(engine, PROMPT)
        pieces = iter(request)
        seen_mid_decode(pieces)
        pid = wait_for_step(engine, executor)
        os.kill(pid, fault)
        assert not request.is_finished, "the fault came too late to prove anything"
        for _ in pieces:
            pass
        assert same(request.completion, undisturbed["decode"])
        assert time.monotonic() - begun < RECOVERY_BOUND_S
        wait_until(lambda: replaced(engine, executor, pid), "another process has the place")
        assert process_state(pid) in "XZ"

    @pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
    @pytest.mark.parametrize("executor", [0, NPU_EXECUTOR])
    def test_executor_lost_mid_prefill(
        self,
        engine: Engine,
        undisturbed: dict[str, Completion],
        fault: signal.Signals,
        executor: int,
    ) -> None:
        begun = time.monotonic()
        request = start(engine, LONG_PROMPT, 30)
        pid = wait_for_step(engine, executor)
        os.kill(pid, fault)
        assert not request.is_finished, "the fault came too late to prove anything"
        assert same(request.wait(), undisturbed["prefill"])
        assert time.monotonic() - begun < RECOVERY_BOUND_S
        if fault is signal.SIGKILL or executor == NPU_EXECUTOR:
            assert replaced(engine, executor, pid)

    def test_all_executors_lost_at_once(
        self, engine: Engine, undisturbed: dict[str, Completion]
    ) -> None:
        request = start(engine, PROMPT)
        pieces = iter(request)
        seen_mid_decode(pieces)
        for pid in {status.pid for status in engine.executors()}:
            os.kill(pid, signal.SIGKILL)
        for _ in pieces:
            pass
        assert same(request.completion, undisturbed["decode"])

    def test_worker_lost_again_and_again(
        self, engine: Engine, undisturbed: dict[str, Completion]
    ) -> None:
        for _ in range(3):
            pid = engine.executors()[0].pid
            os.kill(pid, signal.SIGKILL)
            assert same(start(engine, PROMPT).wait(), undisturbed["decode"])

    def test_idle_worker_stopped(self, engine: Engine, undisturbed: dict[str, Completion]) -> None:
        """It holds no unit, so steps go on without it; it is replaced all the same."""
        pid = engine.executors()[1].pid
        os.kill(pid, signal.SIGSTOP)

        def replaced_meanwhile() -> bool:
            assert same(start(engine, PROMPT).wait(), undisturbed["decode"])
            return bool(engine.actors.arena.executor(1).pid != pid)

        wait_until(replaced_meanwhile, "a stopped worker is replaced", RECOVERY_BOUND_S)

    def test_streams_survive_together(
        self, engine: Engine, undisturbed: dict[str, Completion]
    ) -> None:
        requests = [start(engine, PROMPT) for _ in range(4)]
        os.kill(wait_for_step(engine, 0), signal.SIGKILL)
        assert all(same(request.wait(), undisturbed["decode"]) for request in requests)


def same(a: Completion, b: Completion) -> bool:
    return (a.tokens, a.text, a.logits_sha256) == (b.tokens, b.text, b.logits_sha256)


def replaced(engine: Engine, executor: int, pid: int) -> bool:
    """Whether another process has taken the place; asks the arena, since a stopped one is mute."""
    return bool(engine.actors.arena.executor(executor).pid not in (0, pid))


class TestIdle:
    @pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
    def test_worker_lost_between_requests_is_replaced_without_one(
        self, engine: Engine, undisturbed: dict[str, Completion], fault: signal.Signals
    ) -> None:
        pid = int(engine.actors.arena.executor(0).pid)
        os.kill(pid, fault)
        wait_until(lambda: replaced(engine, 0, pid), "another process has the place")
        assert same(start(engine, PROMPT).wait(), undisturbed["decode"])


class TestCoordinator:
    @pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
    def test_coordinator_lost_mid_stream(
        self, engine: Engine, path: Path, before: Snapshot, fault: signal.Signals
    ) -> None:
        engine.close()  # one engine at a time; this class comes after those who share it
        with open_engine(path) as opened:
            before.observe()
            stream = iter(start(opened, PROMPT, 2000))
            seen_mid_decode(stream)
            begun = time.monotonic()
            os.kill(opened.actors.pids["coordinator"], fault)
            with pytest.raises(EngineError, match="coordinator was lost"):
                list(stream)
            with pytest.raises(EngineError, match="coordinator was lost"):
                opened.generate(PROMPT)
            with pytest.raises(EngineError, match="coordinator was lost"):
                opened.score(PROMPT, 0)
            assert time.monotonic() - begun < 5.0
        assert_nothing_left(before)
        assert time.monotonic() - begun < RECOVERY_BOUND_S


class TestLoading:
    """The fault happens after the header has been read and before the weights are."""

    @pytest.fixture
    def fault_before_load(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> Callable[[Callable[[Actors], None]], None]:
        def install(fault: Callable[[Actors], None]) -> None:
            load = Engine._load

            def load_after_fault(self: Engine, on_load: LoadProgress | None) -> ReadReport:
                fault(self.actors)
                return load(self, on_load)

            monkeypatch.setattr(Engine, "_load", load_after_fault)

        return install

    def check_refusal(
        self, path: Path, before: Snapshot, error: type[PolyneuronError], message: str
    ) -> None:
        begun = time.monotonic()
        with pytest.raises(error, match=message) as caught:
            open_engine(path, on_load=lambda *_: before.observe())
        assert "\n" not in str(caught.value)
        assert time.monotonic() - begun < RECOVERY_BOUND_S
        before.processes.add(os.getpid())
        assert_nothing_left(before)

    @pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
    def test_io_actor_lost(
        self,
        path: Path,
        before: Snapshot,
        fault: signal.Signals,
        fault_before_load: Callable[[Callable[[Actors], None]], None],
    ) -> None:
        fault_before_load(lambda actors: os.kill(actors.pids["I/O actor"], fault))
        self.check_refusal(path, before, EngineError, "I/O actor was lost")

    def test_file_cut_off(
        self,
        tmp_path: Path,
        before: Snapshot,
        fault_before_load: Callable[[Callable[[Actors], None]], None],
    ) -> None:
        model = write_model(tmp_path)
        cut = model.stat().st_size * 6 // 10
        fault_before_load(lambda _: os.truncate(model, cut))
        message = rf"tiny\.gguf: ends at byte {cut}, \d+ bytes are missing; copy it again"
        self.check_refusal(model, before, DeviceError, message)

    def test_file_deleted(
        self,
        tmp_path: Path,
        before: Snapshot,
        fault_before_load: Callable[[Callable[[Actors], None]], None],
    ) -> None:
        model = write_model(tmp_path)
        fault_before_load(lambda _: model.unlink())
        self.check_refusal(model, before, DeviceError, r"tiny\.gguf: .*No such file")

    def test_file_replaced_by_a_folder(
        self,
        tmp_path: Path,
        before: Snapshot,
        fault_before_load: Callable[[Callable[[Actors], None]], None],
    ) -> None:
        model = write_model(tmp_path)

        def replace(_: Actors) -> None:
            model.unlink()
            model.mkdir()

        fault_before_load(replace)
        self.check_refusal(model, before, DeviceError, r"tiny\.gguf: .*[Ii]s a directory")


class TestDriver:
    @pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
    def test_driver_ended_mid_stream(
        self, path: Path, before: Snapshot, fault: signal.Signals
    ) -> None:
        with start_driver(path, "generate") as driver:
            self.wait_ready(driver)
            before.observe()
            os.killpg(driver.pid, fault) if fault is signal.SIGINT else driver.send_signal(fault)
            output, errors = driver.communicate(timeout=30)
        assert (
            driver.returncode
            == {
                signal.SIGKILL: -signal.SIGKILL,
                signal.SIGTERM: 128 + signal.SIGTERM,
                signal.SIGINT: -signal.SIGINT,
            }[fault]
        ), errors
        assert output == ""
        if fault is signal.SIGKILL:
            wait_until(lambda: not processes_left(before), "no process or shared memory", 10)
        else:
            assert_nothing_left(before)

    def test_driver_raises_mid_stream(self, path: Path, before: Snapshot) -> None:
        with start_driver(path, "raise") as driver:
            self.wait_ready(driver)
            before.observe()
            _, errors = driver.communicate(timeout=30)
        assert driver.returncode == 1
        assert errors.splitlines()[-1] == "RuntimeError: on purpose"
        assert_nothing_left(before)

    @staticmethod
    def wait_ready(driver: subprocess.Popen[str]) -> None:
        assert driver.stdout is not None
        assert driver.stdout.readline().startswith("ready")


def start_driver(path: Path, mode: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.integration.engine_driver", str(path), mode]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def processes_left(before: Snapshot) -> list[str]:
    """What a killed driver may not leave: all but the folder that the next start sweeps."""
    return [line for line in leftovers(before) if not line.startswith("directory")]
