"""The NPU executor's back end on real actors: what fails, hangs or is killed costs no token."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from polyneuron import Completion, Engine
from polyneuron.errors import ConfigError
from tests.support.engines import GREEDY, LONG_PROMPT, NPU_EXECUTOR, open_engine, write_model
from tests.support.leftovers import wait_until

pytestmark = pytest.mark.ray

NUM_TOKENS = 20


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def native(path: Path) -> Completion:
    with open_engine(path) as engine:
        return generate(engine)


def generate(engine: Engine) -> Completion:
    return engine.generate(LONG_PROMPT, max_tokens=NUM_TOKENS, sampling=GREEDY, ignore_eos=True)


def outputs(completion: Completion) -> tuple[Any, ...]:
    assert completion.logits_sha256 is not None
    return completion.tokens, completion.logits_sha256


def in_backend(engine: Engine) -> int:
    """1 + the op that the back end computes, 0: none."""
    return int(engine.actors.arena.executor(NPU_EXECUTOR).in_backend)


def test_modelled_device(path: Path, native: Completion) -> None:
    with open_engine(path, npu="native:gops=1000,graphs=8") as engine:
        assert "npu=native:gops=1000,graphs=8(2t, modelled, prefill)" in engine.mode().line()
        assert outputs(generate(engine)) == outputs(native)
        assert engine.actors.npu_notice == ""


def test_failure_is_told_once(
    path: Path, native: Completion, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "timeline.jsonl"
    with open_engine(path, npu="native:fail=run@30", trace=str(trace)) as engine:
        for _ in range(2):
            assert outputs(generate(engine)) == outputs(native)
    said = [line for line in capfd.readouterr().err.splitlines() if "NPU" in line]
    what = "native:fail=run@30 failed (modelled: the run failed)"
    assert said == [f"polyneuron: NPU: {what}: native kernels go on"]
    events = [json.loads(line) for line in trace.read_text().splitlines()]
    faults = [event for event in events if event["event"] == "fault"]
    assert [(fault["kind"], fault["target"]) for fault in faults] == [("npu_failed", "npu.0")]


def test_hanging_device(path: Path, native: Completion) -> None:
    """It is noticed as an executor that hangs; its successor keeps off the back end."""
    with open_engine(path, npu="native:fail=hang@30") as engine:
        pid = int(engine.actors.arena.executor(NPU_EXECUTOR).pid)
        assert outputs(generate(engine)) == outputs(native)
        assert engine.actors.arena.executor(NPU_EXECUTOR).pid != pid
        assert engine.actors.npu_notice == "its process was lost while it computed"


def test_killed_inside_an_op(path: Path, native: Completion) -> None:
    with open_engine(path, npu="native:gops=0.5") as engine:
        request = engine.stream(
            LONG_PROMPT, max_tokens=NUM_TOKENS, sampling=GREEDY, ignore_eos=True
        )
        wait_until(lambda: in_backend(engine) > 0, "the back end computes")
        os.kill(int(engine.actors.arena.executor(NPU_EXECUTOR).pid), signal.SIGKILL)
        assert outputs(request.wait()) == outputs(native)
        assert engine.actors.npu_notice == "its process was lost while it computed"


def test_openvino(path: Path, native: Completion) -> None:
    pytest.importorskip("openvino", reason="the extra `openvino` is not installed")
    with open_engine(path, npu="openvino") as engine:
        assert "npu=openvino:CPU(2t, f32, prefill)" in engine.mode().line()
        done = generate(engine)
        assert len(done.tokens) == NUM_TOKENS
        assert engine.actors.npu_notice == ""
        assert outputs(done)[1] != outputs(native)[1], "the native kernels computed it"


def test_device_that_is_not_here(path: Path) -> None:
    pytest.importorskip("openvino", reason="the extra `openvino` is not installed")
    with (
        pytest.raises(ConfigError, match=r"^--npu openvino:TPU: no such device here, found: CPU"),
        open_engine(path, npu="openvino:TPU"),
    ):
        pass
