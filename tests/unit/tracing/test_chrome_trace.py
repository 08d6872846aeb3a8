"""The Chrome trace keeps to the rules of its format, whatever the timeline holds."""

import io
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from polyneuron.tracing.chrome_trace import write_chrome_trace
from polyneuron.tracing.collector import read_recording
from tests.support.made_up_timeline import MadeUp

RUNS = {
    "empty": MadeUp(tokens=0),
    "three_tokens": MadeUp(tokens=3, npus=1),
    "faults": MadeUp(tokens=24, faults=True, sequences=2),
    "no_detail": MadeUp(tokens=4, detail="steps"),
}


def trace_of(path: Path) -> dict[str, Any]:
    target = io.StringIO()
    write_chrome_trace(read_recording(path), target)
    trace: dict[str, Any] = json.loads(target.getvalue())
    return trace


@pytest.fixture(params=RUNS)
def trace(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    return trace_of(RUNS[request.param].write(tmp_path / "run.jsonl"))


def by_track(events: list[dict[str, Any]]) -> dict[tuple[Any, ...], list[dict[str, Any]]]:
    tracks = defaultdict(list)
    for event in events:
        name = event["name"] if event["ph"] == "C" else event["tid"]
        if event["ph"] != "M":
            tracks[event["pid"], name].append(event)
    return tracks


def of_phase(trace: dict[str, Any], *phases: str) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] in phases]


class TestFormat:
    def test_every_event_has_its_keys(self, trace: dict[str, Any]) -> None:
        needed = {"X": {"dur", "cat", "args"}, "C": {"args"}, "M": {"args"}, "i": {"s"},
                  "b": {"id", "cat"}, "e": {"id", "cat"}, "s": {"id", "cat"},
                  "f": {"id", "cat", "bp"}}  # fmt: skip
        for event in trace["traceEvents"]:
            assert needed[event["ph"]] | {"name", "pid", "tid", "ts"} <= event.keys()
            assert event["ts"] >= 0
            assert event.get("dur", 0) >= 0

    def test_time_never_goes_back_on_a_track(self, trace: dict[str, Any]) -> None:
        for events in by_track(trace["traceEvents"]).values():
            times = [event["ts"] for event in events]
            assert times == sorted(times)

    def test_slices_of_a_track_nest(self, trace: dict[str, Any]) -> None:
        """Perfetto drops a slice that begins in another and ends outside of it."""
        for events in by_track(of_phase(trace, "X")).values():
            open_until: list[float] = []
            for event in events:
                end = event["ts"] + event["dur"]
                while open_until and open_until[-1] <= event["ts"] + 1e-6:
                    open_until.pop()
                assert not open_until or end <= open_until[-1] + 1e-6
                open_until.append(end)

    def test_every_track_has_a_name_and_a_place(self, trace: dict[str, Any]) -> None:
        named = defaultdict(set)
        for event in of_phase(trace, "M"):
            named[event["name"]].add((event["pid"], event["tid"]))
        used = {(event["pid"], event["tid"]) for event in trace["traceEvents"]}
        threads = {track for track in used if track[1] != 0}
        assert threads == named["thread_name"] == named["thread_sort_index"]
        processes = {(pid, 0) for pid, _ in used}
        assert processes == named["process_name"] == named["process_sort_index"]

    def test_flows_are_balanced_and_bound(self, trace: dict[str, Any]) -> None:
        starts = {event["id"]: event for event in of_phase(trace, "s")}
        ends = {event["id"]: event for event in of_phase(trace, "f")}
        assert starts.keys() == ends.keys()
        assert len(of_phase(trace, "s", "f")) == 2 * len(starts)
        slices = by_track(of_phase(trace, "X"))
        for id_, start in starts.items():
            end = ends[id_]
            assert (start["cat"], start["name"]) == (end["cat"], end["name"])
            assert start["ts"] < end["ts"]
            for event in (start, end):
                assert any(
                    of["ts"] <= event["ts"] <= of["ts"] + of["dur"]
                    for of in slices[event["pid"], event["tid"]]
                )


class TestContent:
    def test_times_are_microseconds_of_the_file(self, tmp_path: Path) -> None:
        made = MadeUp(tokens=3)
        trace = trace_of(made.write(tmp_path / "run.jsonl"))
        first = made.lines[0]["t_ns"]
        told = [line for line in made.lines if line["event"] == "step"]
        drawn = [event for event in of_phase(trace, "X") if event["cat"] == "step"]
        assert [(round(e["ts"] * 1000), round(e["dur"] * 1000)) for e in drawn] == [
            (line["t_ns"] - first, line["ns"]) for line in told
        ]

    def test_every_record_is_drawn(self, tmp_path: Path) -> None:
        made = MadeUp(tokens=5, npus=1)
        trace = trace_of(made.write(tmp_path / "run.jsonl"))
        for kind in ("step", "op", "cluster", "read"):
            told = sum(line["event"] == kind for line in made.lines)
            drawn = [e for e in of_phase(trace, "X") if e["cat"] == kind]
            assert len(drawn) == told > 0

    def test_counters_are_all_there(self, tmp_path: Path) -> None:
        trace = trace_of(MadeUp(tokens=5).write(tmp_path / "run.jsonl"))
        names = {event["name"] for event in of_phase(trace, "C")}
        assert names == {"hit rate", "bytes a token", "reads in flight", "resident slots"}
        depth = [e["args"]["value"] for e in of_phase(trace, "C") if e["name"] == "reads in flight"]
        assert max(depth) > 1
        assert depth[-1] == min(depth) == 0

    def test_unmeasured_has_no_counter(self, tmp_path: Path) -> None:
        lines = MadeUp(tokens=3, detail="steps").events()
        for line in lines:
            if line["event"] == "step":
                line.update(hits=None, misses=None, bytes=None)
        path = tmp_path / "run.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        names = {event["name"] for event in of_phase(trace_of(path), "C")}
        assert names == {"resident slots"}

    def test_reads_lead_to_their_layer(self, tmp_path: Path) -> None:
        trace = trace_of(MadeUp(tokens=4).write(tmp_path / "run.jsonl"))
        reads = of_phase(trace, "X")
        flows = of_phase(trace, "s")
        assert len(flows) == sum(event["cat"] == "read" for event in reads)
        assert {event["name"] for event in flows} == {"waited for", "in time"}
