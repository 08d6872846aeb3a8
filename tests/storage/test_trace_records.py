"""Trace records of whole steps: every unit, stage and read is in them once, with its times."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from polyneuron.actors.trace_records import (
    RecordSpool,
    convert_records,
    finish_timeline,
    spool_path,
)
from polyneuron.config import EngineConfig
from polyneuron.errors import ConfigError, DeviceError, FormatError
from polyneuron.io.block_device import BlockDevice
from polyneuron.io.ncf_format import Layout
from polyneuron.kernels.trace import TRACE_RECORD, TraceStage, TraceWhat
from polyneuron.model.convert import convert
from polyneuron.recording import recorded
from polyneuron.timeline import (
    Event,
    Timeline,
    TimelineEvent,
    TimelinePart,
    is_broken_off,
    merge_parts,
    part_path,
    read_timeline,
)
from tests.support.local_engine import LocalEngine
from tests.support.sparse_models import drelu_model, late_reads
from tests.support.tiny_gguf import write_tiny_gguf

NUM_LAYERS, NUM_CLUSTERS, NUM_TOKENS = 3, 11, 6
PROMPT = [3 + i * 7 % 285 for i in range(20)]
Wrap = Callable[[BlockDevice], BlockDevice]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    gguf = write_tiny_gguf(tmp_path_factory.mktemp("model") / "m.gguf", drelu_model(NUM_LAYERS))
    convert(gguf, gguf.with_suffix(".ncf"), layout=Layout.BUNDLES)
    return gguf.with_suffix(".ncf")


def record(model: Path, path: Path, wrap: Wrap | None = None, **settings: object) -> None:
    """Run a request with a timeline."""
    wraps = {"wrap": wrap} if wrap else {}
    with LocalEngine(model, trace=str(path), mode="exact", **wraps, **settings) as engine:
        engine.generate(PROMPT, NUM_TOKENS)
    convert_records(path)
    merge_parts(path)


@pytest.fixture(scope="module", params=["in C", "in Python, late"])
def events(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[TimelineEvent]:
    """Of exact mode with half of the neurons read as they are needed, by either reader."""
    path = tmp_path_factory.mktemp("trace") / "run.jsonl"
    wrap = late_reads() if "late" in request.param else None
    record(model, path, wrap, ffn_resident=0.5, trace_detail="all")
    return list(read_timeline(path))


def named(events: list[TimelineEvent], name: str) -> list[TimelineEvent]:
    return [event for event in events if event.event == name]


class TestSteps:
    def test_each_unit_is_done_once(self, events: list[TimelineEvent]) -> None:
        units: Counter[tuple[int, str, int]] = Counter()
        for event in named(events, "op"):
            keys = event.keys
            units[keys["step"], keys["kind"], keys["layer"]] += keys["units"]
        for step in range(1, NUM_TOKENS):
            for layer in range(NUM_LAYERS):
                assert units[step, "clusters", layer] == NUM_CLUSTERS
        assert not [step for step, kind, _ in units if kind == "clusters" and step == 0]

    def test_each_cluster_has_its_stages(self, events: list[TimelineEvent]) -> None:
        stages: dict[str, Counter[tuple[int, int, int]]] = defaultdict(Counter)
        missed = set()
        for event in named(events, "cluster"):
            keys = event.keys
            place = keys["step"], keys["layer"], keys["cluster"]
            stages[keys["stage"]][place] += 1
            if keys["stage"] == "gc" and keys["misses"]:
                missed.add(place)
        places = {
            (step, layer, cluster)
            for step in range(1, NUM_TOKENS)
            for layer in range(NUM_LAYERS)
            for cluster in range(NUM_CLUSTERS)
        }
        assert stages["gc"] == Counter(places)
        assert set(stages["udc"]) <= places and max(stages["udc"].values()) == 1
        assert missed and set(stages["wait"]) <= missed <= set(stages["udc"])

    def test_waits_for_rows_are_the_ops_stalls(self, events: list[TimelineEvent]) -> None:
        waits: Counter[tuple[str, int, int]] = Counter()
        stalls: Counter[tuple[str, int, int]] = Counter()
        for event in named(events, "cluster"):
            if event.keys["stage"] == "wait":
                waits[event.actor, event.keys["step"], event.keys["layer"]] += event.keys["ns"]
        for event in named(events, "op"):
            keys = event.keys
            assert 0 <= keys["stall_ns"] <= keys["ns"] + keys["wait_ns"]
            if keys["kind"] == "late_clusters":
                stalls[event.actor, keys["step"], keys["layer"]] += keys["stall_ns"]
        assert +waits == +stalls

    def test_waits_fill_what_is_between_ops(self, events: list[TimelineEvent]) -> None:
        last: dict[tuple[str, int], int] = {}
        for event in sorted(named(events, "op"), key=lambda e: (e.actor, e.t_ns)):
            lane, begin_ns = (event.actor, event.keys["step"]), event.t_ns - event.keys["wait_ns"]
            assert begin_ns == last.get(lane, begin_ns)
            last[lane] = event.t_ns + event.keys["ns"]

    def test_times_lie_inside_their_step(self, events: list[TimelineEvent]) -> None:
        steps = {event.keys["step"]: event for event in named(events, "step")}
        for event in named(events, "op") + named(events, "cluster"):
            step = steps[event.keys["step"]]
            assert step.t_ns <= event.t_ns <= step.t_ns + step.keys["ns"]

    def test_reads_name_what_they_bring(self, events: list[TimelineEvent]) -> None:
        reads = [event.keys for event in named(events, "read")]
        neurons = Counter((k["step"], k["layer"], k["neuron"]) for k in reads if k["neuron"] >= 0)
        assert neurons and max(neurons.values()) == 1
        assert {layer for _, layer, _ in neurons} == set(range(NUM_LAYERS))
        assert {k["layer"] for k in reads if k["neuron"] == -1} == set(range(NUM_LAYERS))


class TestDetail:
    def test_steps_alone_have_figures(self, model: Path, tmp_path: Path) -> None:
        path = tmp_path / "run.jsonl"
        record(model, path, ffn_resident=0.5, trace_detail="steps")
        events = list(read_timeline(path))
        assert not {"op", "cluster", "read", "lost"} & {event.event for event in events}
        steps = named(events, "step")
        assert len(steps) == NUM_TOKENS
        assert all(e.keys["compute_ns"] > 0 and e.keys["detail"] is False for e in steps)

    def test_tokens_are_the_same_as_without(self, model: Path, tmp_path: Path) -> None:
        settings = {"mode": "exact", "ffn_resident": 0.5}
        with LocalEngine(model, **settings) as engine:
            plain = engine.generate(PROMPT, NUM_TOKENS)
        trace = str(tmp_path / "t.jsonl")
        with LocalEngine(model, trace=trace, trace_detail="all", **settings) as engine:
            traced = engine.generate(PROMPT, NUM_TOKENS)
        assert traced.tokens == plain.tokens
        assert [row.tobytes() for row in traced.logits] == [row.tobytes() for row in plain.logits]


class TestOverflow:
    def test_what_was_overwritten_is_told(
        self, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """With rings far too small the records that are left are whole, and the others counted."""
        full, small = tmp_path / "full.jsonl", tmp_path / "small.jsonl"
        settings = {"ffn_resident": 1.0, "num_workers": 1, "trace_detail": "all"}
        record(model, full, **settings)
        for module in ("polyneuron.planning.layout", "polyneuron.actors.arena"):
            monkeypatch.setattr(f"{module}.TRACE_RECORDS", 16)
        record(model, small, **settings)
        counts = []
        for path in (full, small):
            events = [e for e in read_timeline(path) if e.actor == "worker.0"]
            kept = sum(event.event in {"op", "cluster"} for event in events)
            lost = sum(event.keys["records"] for event in named(events, "lost"))
            counts.append((kept, lost))
        (all_kept, none_lost), (kept, lost) = counts
        assert none_lost == 0 < lost
        assert kept <= 15 * NUM_TOKENS  # of sixteen places one may be being written to
        assert kept + lost == all_kept


def make_records(**fields: list[int]) -> np.ndarray:
    records = np.zeros(len(next(iter(fields.values()))), TRACE_RECORD)
    for name, values in fields.items():
        records[name] = values
    return records


class TestSpool:
    def test_records_become_lines(self, tmp_path: Path) -> None:
        path = tmp_path / "run.jsonl"
        spool = RecordSpool(path, ["worker.0", "npu.0"], num_layers=2)
        records = make_records(
            start_ns=[5, 6, 7], end_ns=[9, 9, 9], step_seq=[3, 4, 77], executor=[1, 0, 0],
            what=[TraceWhat.CLUSTER] * 3, kind=[TraceStage.UDC, TraceStage.GC, TraceStage.WAIT],
        )  # fmt: skip
        spool.write(records, {4: 3, 3: 3})  # one step, computed twice
        spool.close()
        convert_records(path)
        assert not spool_path(path).exists()
        events = list(read_timeline(part_path(path, "records")))
        assert [(e.t_ns, e.actor, e.keys["stage"], e.keys["step"]) for e in events] == [
            (5, "npu.0", "udc", 3), (6, "worker.0", "gc", 3), (7, "worker.0", "wait", -1)
        ]  # fmt: skip

    def test_cut_record_is_left_out(self, tmp_path: Path) -> None:
        path = tmp_path / "run.jsonl"
        spool = RecordSpool(path, ["worker.0"], num_layers=1)
        spool.write(make_records(start_ns=[1, 2], end_ns=[3, 3]), {})
        spool.close()
        file = spool_path(path)
        file.write_bytes(file.read_bytes()[:-10])
        convert_records(path)
        assert [e.t_ns for e in read_timeline(part_path(path, "records"))] == [1]

    def test_other_file_is_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "run.jsonl"
        spool_path(path).write_bytes(b"\x01\x00\x00\x00\xc1")
        with pytest.raises(FormatError, match="is no file of trace records"):
            convert_records(path)

    def test_nothing_recorded_is_no_error(self, tmp_path: Path) -> None:
        convert_records(tmp_path / "run.jsonl")
        assert not list(tmp_path.iterdir())

    def test_cut_head_is_no_error(self, tmp_path: Path) -> None:
        path = tmp_path / "run.jsonl"
        RecordSpool(path, ["worker.0"], num_layers=1).close()
        whole = spool_path(path).read_bytes()
        for length in range(len(whole) + 1):
            spool_path(path).write_bytes(whole[:length])
            convert_records(path)
            assert part_path(path, "records").read_bytes() == b""


def told(path: Path) -> None:
    """What a run leaves that was broken off: two parts and records."""
    timeline = Timeline(path)
    timeline.logger("driver").emit(Event.LOST, t_ns=1, records=1)
    part = TimelinePart(part_path(path, "coordinator"))
    part.logger("io").emit(Event.LOST, t_ns=9, records=2)
    part.close()
    spool = RecordSpool(path, ["worker.0"], num_layers=1)
    spool.write(make_records(start_ns=[5], end_ns=[6]), {})
    spool.close()
    timeline.leave_parts()


class TestBrokenOff:
    def test_parts_and_records_become_one(self, tmp_path: Path) -> None:
        path = tmp_path / "run.jsonl"
        told(path)
        assert is_broken_off(path)
        assert finish_timeline(path) == 3
        assert [(e.t_ns, e.seq) for e in read_timeline(path)] == [(1, 0), (5, 1), (9, 2)]
        assert list(tmp_path.iterdir()) == [path]
        assert not is_broken_off(path)

    def test_running_one_is_left_alone(self, tmp_path: Path) -> None:
        path = tmp_path / "run.jsonl"
        with Timeline(path) as timeline:
            timeline.logger("driver").emit(Event.LOST, records=1)
            with pytest.raises(ConfigError, match="another run is writing"):
                finish_timeline(path)
        assert len(list(read_timeline(path))) == 1

    def test_no_room_for_records_keeps_all(self, tmp_path: Path) -> None:
        """Neither is the timeline made without them nor are they taken for the whole later."""
        path = tmp_path / "run.jsonl"
        config = EngineConfig(trace=str(path))
        said = "No space left on device; its parts stay"
        with pytest.raises(DeviceError, match=said), recorded(config) as timeline:
            assert timeline is not None
            timeline.logger("driver").emit(Event.LOST, t_ns=1, records=1)
            spool = RecordSpool(path, ["worker.0"], num_layers=1)
            spool.write(make_records(start_ns=[5], end_ns=[6]), {})
            spool.close()
            part_path(path, "records").symlink_to("/dev/full")
        assert not path.exists()
        assert finish_timeline(path) == 2
