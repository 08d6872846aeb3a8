"""Where executors' time went, and what reads were for, counted by hand."""

import json
from pathlib import Path
from typing import Any

from polyneuron.tracing.collector import read_recording
from polyneuron.tracing.occupancy import Occupancy, occupancies
from polyneuron.tracing.op_waits import flash_waits_ns
from polyneuron.tracing.read_lanes import read_lanes, reads_in_flight
from polyneuron.tracing.read_uses import ReadUses, read_uses
from polyneuron.tracing.recording import Recording
from tests.unit.tracing.test_summary import step

Line = dict[str, Any]


def op(t_ns: int, ns: int, kind: str = "matmul", actor: str = "worker.0", **keys: Any) -> Line:
    facts = {"wait_ns": 0, "step": 0, "op": 0, "layer": 0, "units": 1, **keys}
    return {"t_ns": t_ns, "seq": 0, "actor": actor, "event": "op", "ns": ns, "kind": kind, **facts}


def cluster(t_ns: int, ns: int, stage: str, actor: str = "worker.0", **keys: Any) -> Line:
    facts = {"step": 0, "layer": 0, "cluster": 0, "neurons": 8, "misses": 0, **keys}
    return {"t_ns": t_ns, "seq": 0, "actor": actor, "event": "cluster", "ns": ns, "stage": stage,
            **facts}  # fmt: skip


def read(t_ns: int, ns: int, **keys: Any) -> Line:
    facts = {"read": t_ns, "layer": 0, "neuron": 3, "bytes": 512, "status": 0, "step": 0, **keys}
    return {"t_ns": t_ns, "seq": 0, "actor": "io", "event": "read", "ns": ns, **facts}


def recorded(tmp_path: Path, *lines: Line) -> Recording:
    path = tmp_path / "run.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return read_recording(path)


class TestOccupancy:
    def test_wait_inside_is_not_busy(self, tmp_path: Path) -> None:
        (found,) = occupancies(recorded(
            tmp_path, step(0, 1e-3, 0, detail=True), op(0, 100, wait_ns=0),
            op(150, 300, "clusters", wait_ns=50), cluster(150, 100, "gc"),
            cluster(250, 120, "wait"), cluster(370, 80, "udc"),
        ))  # fmt: skip
        assert found == Occupancy("worker.0", 1000, busy_ns=280, stall_ns=120, wait_ns=50)

    def test_wait_for_a_layer_is_not_for_others(self, tmp_path: Path) -> None:
        recording = recorded(
            tmp_path, step(0, 1e-3, 0, detail=True),
            op(400, 100, "feed_forward", wait_ns=300, stall_ns=250), op(600, 50, wait_ns=40),
        )  # fmt: skip
        assert flash_waits_ns(recording.detail, "worker.0").tolist() == [250, 0]
        (found,) = occupancies(recording)
        assert (found.busy_ns, found.stall_ns, found.wait_ns) == (150, 250, 90)

    def test_rows_awaited_count_once(self, tmp_path: Path) -> None:
        (found,) = occupancies(recorded(
            tmp_path, step(0, 1e-3, 0, detail=True),
            op(100, 200, "await_rows", stall_ns=190, wait_ns=20), cluster(110, 190, "wait"),
        ))  # fmt: skip
        assert (found.busy_ns, found.stall_ns, found.wait_ns) == (0, 200, 20)

    def test_steps_without_detail_do_not_count(self, tmp_path: Path) -> None:
        (found,) = occupancies(recorded(
            tmp_path, step(0, 1e-3, 0, detail=True), step(1e-3, 1e-3, 1), op(0, 400),
            op(1000, 900, step=1),
        ))  # fmt: skip
        assert (found.steps_ns, found.busy_ns) == (1000, 400)

    def test_clusters_alone_are_work(self, tmp_path: Path) -> None:
        (found,) = occupancies(recorded(
            tmp_path, step(0, 1e-3, 0, detail=True), cluster(0, 300, "gc", "npu.0"),
            cluster(300, 100, "wait", "npu.0"),
        ))  # fmt: skip
        assert (found.executor, found.busy_ns, found.stall_ns) == ("npu.0", 300, 100)


class TestReadUses:
    def uses(self, tmp_path: Path, *lines: Line) -> ReadUses:
        return read_uses(recorded(tmp_path, *lines).detail)

    def test_wait_that_it_ended(self, tmp_path: Path) -> None:
        found = self.uses(
            tmp_path, read(0, 130), cluster(100, 40, "wait"), cluster(120, 90, "wait", "worker.1"),
            cluster(140, 20, "udc"),
        )  # fmt: skip
        assert found.executors == ["worker.0", "worker.1"]
        assert (found.executor.tolist(), found.t_ns.tolist()) == ([0], [130])
        assert found.ended_wait.tolist() == [True]

    def test_next_stage_where_nobody_waited(self, tmp_path: Path) -> None:
        found = self.uses(
            tmp_path, read(0, 50), cluster(40, 30, "gc"), cluster(70, 10, "pred"),
            cluster(90, 20, "udc", "worker.1"), cluster(95, 20, "udc"),
        )  # fmt: skip
        assert (found.executor.tolist(), found.t_ns.tolist()) == ([1], [90])
        assert found.ended_wait.tolist() == [False]

    def test_op_where_there_are_no_clusters(self, tmp_path: Path) -> None:
        found = self.uses(
            tmp_path, read(0, 50, neuron=-1, layer=2), op(60, 5, "norm", layer=2),
            op(70, 100, "feed_forward", layer=2), op(55, 5, layer=1),
        )  # fmt: skip
        assert (found.executor.tolist(), found.t_ns.tolist()) == ([0], [70])

    def test_other_layers_and_steps_do_not_use_it(self, tmp_path: Path) -> None:
        found = self.uses(
            tmp_path, read(0, 50), read(1, 50, step=-1), cluster(90, 20, "udc", layer=1),
            cluster(90, 20, "udc", step=1), cluster(10, 20, "udc"),
        )  # fmt: skip
        assert found.executor.tolist() == [-1, -1]


class TestLanes:
    def test_reads_in_flight_together_lie_apart(self, tmp_path: Path) -> None:
        reads = recorded(
            tmp_path, read(0, 100), read(10, 20), read(20, 5), read(30, 10), read(100, 1)
        ).detail.reads
        assert read_lanes(reads).tolist() == [0, 1, 2, 1, 0]
        assert reads_in_flight(reads) == [
            (0, 1), (10, 2), (20, 3), (25, 2), (30, 2), (40, 1), (100, 1), (101, 0)
        ]  # fmt: skip
