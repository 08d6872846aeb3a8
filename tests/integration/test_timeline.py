"""Timelines of real actors: what happened is in them, whole, ordered and typed."""

from __future__ import annotations

import itertools
import os
import signal
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from polyneuron import Engine, EngineConfig, SamplingParams
from polyneuron.actors.journal import journal_path, replay_journal
from polyneuron.errors import ConfigError, EngineError
from polyneuron.io.ncf_format import Layout
from polyneuron.io.predictor_file import PredictorInput
from polyneuron.model.convert import convert
from polyneuron.timeline import TimelineEvent, read_timeline
from tests.support.engines import GREEDY, PROMPT, write_model
from tests.support.leftovers import wait_until
from tests.support.predictors import write_random
from tests.support.sparse_models import drelu_model
from tests.support.tiny_gguf import write_tiny_gguf

pytestmark = pytest.mark.ray

HOT = (2, 3, 5, 6)
LIMITS = (24, 18, 12, 6)
CONFIG = EngineConfig(
    num_ctx=256, num_workers=2, num_npu_threads=2, mode="predicted", ffn_resident=0.85,
    hot_clusters=HOT, keep_neurons=False, trace_detail="all",
)  # fmt: skip
DRAWN = SamplingParams(temperature=2.0, top_k=0, top_p=1.0, min_p=0.0, seed=5)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers of eleven clusters, with predictors that name a third of the neurons."""
    gguf = write_tiny_gguf(tmp_path_factory.mktemp("model") / "sparse.gguf", drelu_model(4))
    path = gguf.with_suffix(".ncf")
    convert(gguf, path, layout=Layout.BUNDLES)
    write_random(path, input=PredictorInput.FFN, rank=32, share=0.3)
    return path


@pytest.fixture(scope="module")
def trace(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The timeline of four candidates that end one after the other, then a failed request."""
    path = tmp_path_factory.mktemp("trace") / "run.jsonl"
    fields = {"prompt": PROMPT, "end_ids": [], "sampling": asdict(DRAWN)}
    with Engine(str(model), CONFIG, trace=str(path)) as engine:
        requests = engine.submit(*({**fields, "max_tokens": limit} for limit in LIMITS))
        for request in requests:
            request.wait_finished()
            request.take_outcome()
        engine.change_memory(engine.budget.limit_bytes)
    return path


@pytest.fixture(scope="module")
def events(trace: Path) -> list[TimelineEvent]:
    return list(read_timeline(trace))


def named(events: list[TimelineEvent], name: str) -> list[TimelineEvent]:
    return [event for event in events if event.event == name]


class TestWhole:
    def test_order_is_final(self, events: list[TimelineEvent]) -> None:
        assert [event.seq for event in events] == list(range(len(events)))
        assert all(a.t_ns <= b.t_ns for a, b in itertools.pairwise(events))

    def test_only_timeline_and_journal_stay(self, trace: Path) -> None:
        assert sorted(trace.parent.iterdir()) == [trace, journal_path(trace)]

    def test_run_is_first(self, events: list[TimelineEvent]) -> None:
        keys = events[0].keys
        assert (events[0].event, events[0].actor) == ("run", "driver")
        assert (keys["layers"], keys["clusters"], keys["mode"]) == (4, 11, "predicted")
        assert (keys["workers"], keys["npu_threads"], keys["policy"]) == (2, 2, "engine")
        assert keys["cold_slots"] > 0 and 0 < keys["arena_bytes"] <= keys["memory_bytes"]

    def test_nothing_was_lost(self, events: list[TimelineEvent]) -> None:
        assert not named(events, "lost") + named(events, "fault")


class TestRequests:
    def test_each_lives_its_life(self, events: list[TimelineEvent]) -> None:
        lives: dict[int, list[str]] = {}
        for event in named(events, "request"):
            lives.setdefault(event.keys["request"], []).append(event.keys["state"])
        assert list(lives.values()) == [["queued", "admitted", "decode", "finished"]] * 4

    def test_ends_name_tokens_and_reason(self, events: list[TimelineEvent]) -> None:
        ends = [e.keys for e in named(events, "request") if e.keys["state"] == "finished"]
        assert [(keys["tokens"], keys["reason"]) for keys in ends] == [
            (limit, "length") for limit in reversed(LIMITS)
        ]

    def test_tokens_are_counted_each(self, events: list[TimelineEvent]) -> None:
        indexes: dict[int, list[int]] = {}
        for event in named(events, "token"):
            indexes.setdefault(event.keys["request"], []).append(event.keys["index"])
        assert list(indexes.values()) == [list(range(limit)) for limit in LIMITS]


class TestBatches:
    def test_hot_share_follows_the_batch(self, events: list[TimelineEvent]) -> None:
        batches = [event.keys for event in named(events, "batch")]
        assert [(k["sequences"], k["hot_clusters"]) for k in batches] == [
            (4, 6), (3, 5), (2, 3), (1, 2)
        ]  # fmt: skip
        assert batches[0]["hot_share"] == pytest.approx(6 / 11)

    def test_graph_follows_the_batch(self, events: list[TimelineEvent]) -> None:
        graphs = [(e.keys["previous"], e.keys["graph"]) for e in named(events, "graph")]
        names = ["", "prefill", "decode.6", "decode.5", "decode.3", "decode.2"]
        assert graphs == list(itertools.pairwise(names))

    def test_phases_take_turns(self, events: list[TimelineEvent]) -> None:
        phases = [event.keys["phase"] for event in named(events, "phase")]
        assert phases == ["prefill", "decode", "idle"]


class TestSteps:
    def test_each_has_its_figures(self, events: list[TimelineEvent]) -> None:
        steps = [event.keys for event in named(events, "step")]
        assert [keys["step"] for keys in steps] == list(range(max(LIMITS)))
        assert [keys["sequences"] for keys in steps[1:]] == [
            sum(limit > index for limit in LIMITS) for index in range(1, max(LIMITS))
        ]
        for keys in steps[1:]:
            assert keys["executors"] == CONFIG.num_workers
            assert 0 < keys["compute_ns"] <= keys["executors"] * keys["ns"]
            assert keys["stall_ns"] >= 0 and keys["wait_ns"] >= 0
            assert keys["needed"] == keys["hits"] + keys["misses"] > 0
            assert keys["active"] > 0 and keys["predicted"] > 0
        assert steps[0]["executors"] == CONFIG.num_workers + CONFIG.num_npu_threads

    def test_residency_adds_up(self, events: list[TimelineEvent]) -> None:
        rows = [event.keys for event in named(events, "residency")]
        assert len(rows) == max(LIMITS)
        grown = [keys["admitted"] - keys["evicted"] for keys in rows[1:]]
        assert sum(grown) == rows[-1]["resident"] - rows[0]["resident"]
        assert all(0 <= keys["resident"] <= keys["slots"] for keys in rows)
        assert sum(keys["admitted"] for keys in rows) > 0

    def test_ops_cover_each_step(self, events: list[TimelineEvent]) -> None:
        steps = {event.keys["step"]: event for event in named(events, "step")}
        kinds: dict[int, Counter[str]] = {step: Counter() for step in steps}
        for event in named(events, "op"):
            step = steps[event.keys["step"]]
            assert step.t_ns <= event.t_ns - event.keys["wait_ns"]
            kinds[event.keys["step"]][event.keys["kind"]] += 1
        assert all(found["embed"] and found["attention"] for found in kinds.values())
        assert kinds[0]["rows_up"] and not kinds[0]["predict"]
        assert all(kinds[step]["predict"] and kinds[step]["clusters"] for step in steps if step)
        layers = {(e.keys["kind"], e.keys["layer"]) for e in named(events, "op")}
        assert ("embed", -1) in layers and ("attention", 3) in layers
        assert max(layer for _, layer in layers) == 3

    def test_actors_have_lanes(self, events: list[TimelineEvent]) -> None:
        assert {e.actor for e in named(events, "op")} == {
            "worker.0", "worker.1", "npu.0", "npu.1"
        }  # fmt: skip

    def test_clusters_are_computed_once(self, events: list[TimelineEvent]) -> None:
        """What is not hot is predicted once a step, and nothing is computed twice."""
        hot = {index + 1: count for index, count in enumerate(HOT)}
        sequences = {e.keys["step"]: e.keys["sequences"] for e in named(events, "step")}
        seen: dict[tuple[int, str], list[tuple[int, int]]] = {}
        for event in named(events, "cluster"):
            place = event.keys["layer"], event.keys["cluster"]
            seen.setdefault((event.keys["step"], event.keys["stage"]), []).append(place)
        for step in range(1, max(LIMITS)):
            cold = range(hot[sequences[step]], 11)
            wanted = sorted((layer, cluster) for layer in range(4) for cluster in cold)
            assert sorted(seen[step, "pred"]) == wanted
            assert len(set(seen[step, "udc"])) == len(seen[step, "udc"])

    def test_reads_are_those_counted(self, events: list[TimelineEvent]) -> None:
        reads = [event.keys for event in named(events, "read")]
        neurons = [keys for keys in reads if keys["neuron"] >= 0]
        admitted = sum(event.keys["admitted"] for event in named(events, "residency"))
        assert len(neurons) == admitted
        assert all(keys["status"] == 0 and keys["bytes"] > 0 for keys in reads)
        assert {keys["layer"] for keys in neurons} == {0, 1, 2, 3}
        runs = [keys["layer"] for keys in reads if keys["neuron"] == -1]
        assert set(runs) == {0, 1, 2, 3}
        assert len({keys["read"] for keys in reads}) == len(reads)

    def test_resize_is_told(self, events: list[TimelineEvent]) -> None:
        (event,) = named(events, "plan")
        assert (event.actor, event.keys["what"]) == ("cache", "resize")
        assert event.keys["cold_slots"] == events[0].keys["cold_slots"]
        assert event.keys["memory_bytes"] == events[0].keys["memory_bytes"]


class TestJournal:
    def test_fresh_state_answers_the_same(self, trace: Path) -> None:
        pairs = list(replay_journal(journal_path(trace)))
        kinds = Counter(entry.event for entry, _ in pairs)
        assert kinds["append"] == sum(LIMITS) and kinds["computed"] == max(LIMITS)
        assert all(entry.answer == answer for entry, answer in pairs)


@pytest.fixture(scope="class")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


class TestFaults:
    def test_killed_worker_is_told(self, dense: Path, tmp_path: Path) -> None:
        path = tmp_path / "run.jsonl"
        config = EngineConfig(num_ctx=512, num_workers=2, num_npu_threads=2)
        with Engine(str(dense), config, trace=str(path)) as engine:
            generation = engine.stream(PROMPT, max_tokens=300, sampling=GREEDY, ignore_eos=True)
            pieces: Iterator[str] = iter(generation)
            next(pieces)
            record = engine.actors.arena.executor(1)
            pid = int(record.pid)
            os.kill(pid, signal.SIGKILL)
            for _ in pieces:
                pass
            wait_until(lambda: int(record.pid) != pid, "another process has the place")
            engine.generate(PROMPT, max_tokens=1, sampling=GREEDY)  # after the restart was told
        events = list(read_timeline(path))
        (fault,), (restart,) = named(events, "fault"), named(events, "restart")
        assert fault.keys == {"kind": "worker_lost", "target": "worker.1"}
        assert restart.keys["target"] == "worker.1" and restart.keys["generation"] == 2
        assert restart.keys["ns"] > 0 and restart.t_ns <= fault.t_ns
        assert all(entry.answer == answer for entry, answer in replay_journal(journal_path(path)))
        detailed = {event.keys["step"] for event in named(events, "op")}
        assert detailed >= set(range(64)) and 65 not in detailed and 80 in detailed

    def test_failed_request_is_told(self, model: Path, tmp_path: Path) -> None:
        """The model's file is cut while it is read: the timeline ends whole all the same."""
        copy, path = tmp_path / "cut.ncf", tmp_path / "run.jsonl"
        copy.write_bytes(model.read_bytes())
        config = EngineConfig(num_ctx=256, num_workers=2, mode="exact", ffn_resident=0.5)
        with Engine(str(copy), config, trace=str(path)) as engine:
            engine.generate(PROMPT, max_tokens=2, sampling=GREEDY)
            os.truncate(copy, 1 << 12)
            with pytest.raises(EngineError, match="the file has become shorter"):
                engine.generate(PROMPT, max_tokens=20, sampling=GREEDY, ignore_eos=True)
        events = list(read_timeline(path))
        assert next(e.keys for e in named(events, "fault")) == {
            "kind": "read_error",
            "target": "io",
        }
        assert named(events, "restart")[0].keys["target"] == "io"
        ends = [e.keys for e in named(events, "request") if e.keys["state"] == "finished"]
        assert [keys["reason"] for keys in ends] == ["length", "error"]
        assert all(entry.answer == answer for entry, answer in replay_journal(journal_path(path)))

    def test_lost_coordinator_leaves_what_it_wrote(self, dense: Path, tmp_path: Path) -> None:
        path = tmp_path / "run.jsonl"
        config = EngineConfig(num_ctx=512, num_workers=2, num_npu_threads=2)
        with Engine(str(dense), config, trace=str(path)) as engine:
            engine.generate(PROMPT, max_tokens=100, sampling=GREEDY, ignore_eos=True)
            os.kill(engine.actors.pids["coordinator"], signal.SIGKILL)
            with pytest.raises(EngineError):
                engine.generate(PROMPT, max_tokens=2)
        events = list(read_timeline(path))
        assert events[0].event == "run"
        assert {event.keys["step"] for event in named(events, "step")} >= set(range(90))
        assert sorted(tmp_path.iterdir()) == [path, journal_path(path)]


class TestOff:
    def test_without_flag_there_is_none(self, dense: Path, tmp_path: Path) -> None:
        with Engine(str(dense), num_ctx=128, num_workers=1, num_npu_threads=1) as engine:
            assert engine.timeline is None
            assert engine.layout.spans["trace"].num_bytes == 0
            engine.generate(PROMPT, max_tokens=2)
        assert not list(tmp_path.iterdir())

    def test_bad_path_is_refused_first(self, dense: Path, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"--trace .*nowhere/t\.jsonl: there is no folder"):
            Engine(str(dense), trace=str(tmp_path / "nowhere" / "t.jsonl"))
