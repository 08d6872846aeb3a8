"""The timeline's writer, its structlog chain, and its reader's one-line errors."""

import json
import os
from pathlib import Path

import pytest

from polyneuron.clock import VirtualClock
from polyneuron.config import EngineConfig
from polyneuron.errors import ConfigError, FormatError
from polyneuron.recording import with_trace_path
from polyneuron.timeline import (
    Event,
    Timeline,
    TimelinePart,
    find_parts,
    is_broken_off,
    merge_parts,
    part_path,
    read_timeline,
)
from polyneuron.timeline_events import KEYS, OPTIONAL_KEYS, TraceDetail, parse_event


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.jsonl"


class TestChain:
    def test_event_is_one_typed_line(self, path: Path) -> None:
        clock = VirtualClock(41)
        with Timeline(path, clock) as timeline:
            log = timeline.logger("coordinator")
            clock.wait_ns(1)
            log.emit(Event.TOKEN, request=7, index=0)
        assert path.read_text() == (
            '{"t_ns":42,"seq":0,"actor":"coordinator","event":"token","request":7,"index":0}\n'
        )

    def test_own_time_wins(self, path: Path) -> None:
        with Timeline(path, VirtualClock(5)) as timeline:
            timeline.logger("io").emit(Event.LOST, t_ns=3, records=1)
        (event,) = read_timeline(path)
        assert (event.t_ns, event.actor, event.event) == (3, "io", "lost")

    def test_text_beyond_ascii_survives(self, path: Path) -> None:
        with Timeline(path, VirtualClock()) as timeline:
            timeline.logger("driver").emit(Event.FAULT, kind="é\n", target="x")
        (event,) = read_timeline(path)
        assert event.keys["kind"] == "é\n"
        assert "é".encode() in path.read_bytes()


class TestMerging:
    def test_parts_are_merged_by_time(self, path: Path) -> None:
        clock = VirtualClock()
        with Timeline(path, clock) as timeline:
            part = TimelinePart(part_path(path, "coordinator"), clock)
            own, other = timeline.logger("driver"), part.logger("worker.0")
            for t_ns in (10, 30, 30):
                own.emit(Event.LOST, t_ns=t_ns, records=t_ns)
            for t_ns in (40, 20, 10):
                other.emit(Event.LOST, t_ns=t_ns, records=-t_ns)
            part.close()
        events = list(read_timeline(path))
        assert [e.t_ns for e in events] == [10, 10, 20, 30, 30, 40]
        assert [e.seq for e in events] == list(range(6))
        assert [e.keys["records"] for e in events] == [-10, 10, -20, 30, 30, -40]
        assert list(path.parent.iterdir()) == [path]

    def test_many_lines_pass_the_bounded_buffer(self, path: Path) -> None:
        with Timeline(path, VirtualClock()) as timeline:
            log = timeline.logger("driver")
            for index in range(2000):
                log.emit(Event.TOKEN, t_ns=2000 - index, request=0, index=index)
            (part,) = find_parts(path)
            assert part.read_bytes().count(b"\n") > 1000  # drained before the end
        assert [e.keys["index"] for e in read_timeline(path)] == list(reversed(range(2000)))

    def test_crash_leaves_readable_part(self, path: Path) -> None:
        timeline = Timeline(path, VirtualClock())  # never closed
        part = TimelinePart(part_path(path, "coordinator"), VirtualClock())
        part.logger("io").emit(Event.LOST, records=9)
        part.flush()
        assert not path.exists()
        assert [e.keys["records"] for e in read_timeline(part_path(path, "coordinator"))] == [9]
        with pytest.raises(ConfigError, match=r"broken off: polyneuron trace puts together"):
            list(read_timeline(path))
        part.close()
        timeline.close()

    def test_line_cut_by_crash_is_left_out(self, path: Path) -> None:
        whole = '{"t_ns":1,"seq":0,"actor":"io","event":"lost","records":1}\n'
        part_path(path, "driver").write_text(whole + whole[:20])
        assert merge_parts(path) == 1
        assert path.read_text() == whole

    def test_older_parts_are_forgotten(self, path: Path) -> None:
        part_path(path, "coordinator").write_text("leftover")
        Timeline(path, VirtualClock()).close()
        assert not list(path.parent.iterdir())  # and without events there is no timeline

    def test_second_close_changes_nothing(self, path: Path) -> None:
        timeline = Timeline(path, VirtualClock())
        timeline.logger("driver").emit(Event.LOST, records=1)
        timeline.close()
        path.write_text("kept")
        timeline.close()
        assert path.read_text() == "kept"

    def test_ctrl_c_leaves_no_half_file(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        timeline = Timeline(path, VirtualClock())
        timeline.logger("driver").emit(Event.LOST, records=1)

        def interrupted(_: int) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr("os.fsync", interrupted)
        with pytest.raises(KeyboardInterrupt):
            timeline.close()
        assert list(path.parent.iterdir()) == [part_path(path, "driver")]
        assert is_broken_off(path)

    def test_end_while_parts_go_breaks_nothing_off(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Some parts gone, some not: what is left must not take the place of the whole."""
        timeline = Timeline(path, VirtualClock())
        timeline.logger("driver").emit(Event.LOST, records=1)
        monkeypatch.setattr("polyneuron.timeline._remove", lambda parts: None)
        timeline.close()
        assert find_parts(path) and not is_broken_off(path)


class TestTwoWriters:
    def test_second_is_refused(self, path: Path) -> None:
        first = Timeline(path, VirtualClock())
        first.logger("driver").emit(Event.LOST, records=1)
        for _ in range(2):
            with pytest.raises(ConfigError, match=r"run\.jsonl: another run is writing"):
                Timeline(path, VirtualClock())
        first.close()
        assert [e.keys["records"] for e in read_timeline(path)] == [1]
        Timeline(path, VirtualClock()).close()  # free again, and without events kept as it is
        assert len(list(read_timeline(path))) == 1

    def test_parts_that_stay_are_free(self, path: Path) -> None:
        first = Timeline(path, VirtualClock())
        first.logger("driver").emit(Event.LOST, records=1)
        first.leave_parts()
        assert is_broken_off(path)
        with Timeline(path, VirtualClock()) as second:
            second.logger("driver").emit(Event.LOST, records=2)
        assert [e.keys["records"] for e in read_timeline(path)] == [2]


class TestFullDisk:
    def test_recording_ends_and_nothing_else(self) -> None:
        part = TimelinePart(Path("/dev/full"), VirtualClock())
        log = part.logger("driver")
        for _ in range(200):
            log.emit(Event.LOST, records=1)
        part.close()


class TestPaths:
    def test_missing_folder_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"there is no folder .*nowhere; make it first"):
            Timeline(tmp_path / "nowhere" / "t.jsonl")

    def test_folder_is_no_file(self, tmp_path: Path) -> None:
        for path in (tmp_path, Path(), Path("/")):
            with pytest.raises(ConfigError, match="is a folder"):
                Timeline(path)

    def test_device_is_no_file(self, path: Path) -> None:
        os.mkfifo(path)
        with pytest.raises(ConfigError, match="is no plain file"):
            Timeline(path)
        assert path.is_fifo()

    def test_long_name_is_refused_first(self, tmp_path: Path) -> None:
        for length, said in ((240, "too long by 2 bytes"), (300, "too long by 62 bytes")):
            with pytest.raises(ConfigError, match=said):
                Timeline(tmp_path / ("a" * length))
        Timeline(tmp_path / ("a" * 238)).close()

    def test_link_is_followed(self, path: Path) -> None:
        link = path.with_name("link")
        link.symlink_to(path)
        assert with_trace_path(EngineConfig(trace=str(link))).trace == str(path)

    def test_missing_timeline_is_named(self, path: Path) -> None:
        with pytest.raises(ConfigError, match=r"run\.jsonl: cannot be read: No such file"):
            list(read_timeline(path))


VALUES: dict[type, object] = {int: 3, float: 0.5, str: "x", bool: True}


def example(event: Event) -> dict[str, object]:
    """An event with every key it may have."""
    types = {**KEYS[event], **OPTIONAL_KEYS.get(event, {})}
    values = {name: VALUES[allowed[0]] for name, allowed in types.items()}
    values |= {"format": 1} if event is Event.RUN else {}
    return {"t_ns": 1, "seq": 0, "actor": "io", "event": str(event), **values}


class TestKeys:
    @pytest.mark.parametrize("event", Event)
    def test_each_event_has_its_keys(self, event: Event) -> None:
        parsed = parse_event(json.dumps(example(event)), "t:1")
        assert parsed.keys.keys() >= KEYS[event].keys()

    @pytest.mark.parametrize("event", Event)
    def test_each_lacking_key_is_named(self, event: Event) -> None:
        for name in KEYS[event]:
            keys = example(event)
            del keys[name]
            with pytest.raises(FormatError, match=f"^t:1: {event} lacks '{name}'$"):
                parse_event(json.dumps(keys), "t:1")

    @pytest.mark.parametrize("event", Event)
    def test_each_wrong_type_is_named(self, event: Event) -> None:
        for name in [*KEYS[event], *OPTIONAL_KEYS.get(event, {})]:
            keys = {**example(event), name: []}
            with pytest.raises(FormatError, match=rf"^t:1: {name} is \[\]: must be "):
                parse_event(json.dumps(keys), "t:1")

    def test_truth_is_no_number(self) -> None:
        keys = {**example(Event.TOKEN), "index": True}
        with pytest.raises(FormatError, match="index is True: must be int"):
            parse_event(json.dumps(keys), "t:1")

    def test_unmeasured_is_null(self) -> None:
        keys = {**example(Event.STEP), "stall_ns": None}
        assert parse_event(json.dumps(keys), "t:1").keys["stall_ns"] is None

    @pytest.mark.parametrize("line", ["", "[1]", '{"t_ns":1', "no"])
    def test_other_lines_are_refused(self, line: str) -> None:
        with pytest.raises(FormatError, match=r"^t:1: is no JSON object"):
            parse_event(line, "t:1")

    def test_unknown_event_and_key_are_kept(self) -> None:
        keys = {**example(Event.TOKEN), "later": [1]}
        assert parse_event(json.dumps(keys), "t:1").keys["later"] == [1]
        keys = {"t_ns": 1, "seq": 0, "actor": "io", "event": "later"}
        assert parse_event(json.dumps(keys), "t:1").event == "later"

    def test_newer_format_is_refused(self) -> None:
        with pytest.raises(FormatError, match="format is 2, this polyneuron reads 1"):
            parse_event(json.dumps({**example(Event.RUN), "format": 2}), "t:1")


class TestDetail:
    def test_auto_begins_whole_then_samples(self) -> None:
        covered = [step for step in range(112) if TraceDetail.AUTO.covers(step)]
        assert covered == [*range(64), 64, 80, 96]

    def test_others_cover_all_or_none(self) -> None:
        assert all(TraceDetail.ALL.covers(step) for step in range(200))
        assert not any(TraceDetail.STEPS.covers(step) for step in range(200))
