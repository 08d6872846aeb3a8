"""Processes are where `-t`, `-tb` and `-C` ask: asked of the kernel, thread by thread."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from polyneuron import Engine
from polyneuron.cli.core_options import core_settings
from polyneuron.config import usable_cores
from polyneuron.cores import this_machine
from polyneuron.io.ncf_format import Layout
from polyneuron.model.convert import convert
from tests.support.engines import GREEDY, MODEL, PROMPT, open_engine
from tests.support.tiny_gguf import write_tiny_gguf

CORES = usable_cores()
pytestmark = [
    pytest.mark.ray,
    pytest.mark.skipif(len(CORES) < 2, reason="needs two cores to tell them apart"),
]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in bundles: streamed, both of the I/O actor's loops read."""
    model = replace(MODEL, family="bamboo", d_ff=608, tensor_type="Q4_0", tied_head=False)
    folder = tmp_path_factory.mktemp("bundles")
    gguf = write_tiny_gguf(folder / "sparse.gguf", model)
    convert(gguf, folder / "sparse.ncf", layout=Layout.BUNDLES)
    return folder / "sparse.ncf"


def opened(path: Path, *, threads: int, batch: int = 1, mask: str = "") -> Engine:
    """As `run` opens it with these flags, with a part of the feed forward on disk."""
    settings = core_settings(str(path), threads, batch, mask, "")
    return open_engine(path, ffn_resident=0.4, **settings)


def affinities(pid: int) -> list[list[int]]:
    """Of each thread of a process."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [sorted(os.sched_getaffinity(int(task.name))) for task in tasks]


def pinned(pid: int) -> set[int]:
    """Cores that threads of a process are alone bound to."""
    return {found[0] for found in affinities(pid) if len(found) == 1}


def test_mask_binds_executors_and_reader(path: Path) -> None:
    core = CORES[1]
    with opened(path, threads=0, mask=f"{1 << core:x}") as engine:
        engine.generate(PROMPT, max_tokens=4, sampling=GREEDY, ignore_eos=True)
        worker, npu = engine.executors()
        assert (worker.cores, npu.cores) == ([core], [core])
        reader = engine.actors.pids["I/O actor"]
        for pid in (worker.pid, npu.pid, reader):
            assert pinned(pid) == {core}
        assert affinities(reader).count([core]) >= 2  # of layers, of neurons
        assert f"(on core {core}, reader on core {core})" in engine.mode().line()


def test_more_workers_than_named_cores_share_them(path: Path) -> None:
    first, second = CORES[:2]
    with opened(path, threads=3, batch=0, mask=f"{1 << first | 1 << second:x}") as engine:
        statuses = engine.executors()
        assert [status.cores for status in statuses] == [[first], [second], [first, second]]
        for status in statuses:
            assert status.cores in affinities(status.pid)


def test_threads_leave_a_core_to_the_reader(path: Path) -> None:
    order = this_machine().usual
    if len(order) < 2:
        pytest.skip("needs two fast physical cores")
    with opened(path, threads=1, batch=2) as engine:
        engine.generate(PROMPT, max_tokens=4, sampling=GREEDY, ignore_eos=True)
        worker, *npu = engine.executors()
        assert [worker.cores, *(thread.cores for thread in npu)] == [
            [order[0]], [order[0]], [order[1]],
        ]  # fmt: skip
        assert pinned(worker.pid) == {order[0]}
        assert pinned(npu[0].pid) == set(order[:2])
        assert pinned(engine.actors.pids["I/O actor"]) == {order[1]}


def test_all_cores_at_work_leave_the_reader_free(path: Path) -> None:
    machine = this_machine()
    with opened(path, threads=len(machine.usual)) as engine:
        engine.generate(PROMPT, max_tokens=4, sampling=GREEDY, ignore_eos=True)
        assert pinned(engine.actors.pids["I/O actor"]) == set()
