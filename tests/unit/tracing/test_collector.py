"""What a timeline's file may be, and what it is refused for."""

import json
from pathlib import Path
from typing import Any

import pytest

from polyneuron.errors import ConfigError, FormatError
from polyneuron.tracing.collector import read_recording
from tests.support.made_up_timeline import MadeUp


def changed(tmp_path: Path, index: int, **keys: Any) -> Path:
    """A timeline whose step (by index) has other keys."""
    lines = MadeUp(tokens=3).events()
    steps = [line for line in lines if line["event"] == "step"]
    steps[index].update(keys)
    return written(tmp_path, lines)


def written(tmp_path: Path, lines: list[dict[str, Any]]) -> Path:
    path = tmp_path / "run.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


class TestReading:
    def test_everything_told_is_there(self, tmp_path: Path) -> None:
        made = MadeUp(tokens=5, npus=1, faults=True)
        recording = read_recording(made.write(tmp_path / "run.jsonl"))
        told = [line["event"] for line in made.lines]
        detail = recording.detail
        assert recording.num_events == len(told)
        assert len(recording.steps) == told.count("step") == 5
        assert sum(map(len, detail.ops.values())) == told.count("op")
        assert sum(map(len, detail.clusters.values())) == told.count("cluster")
        assert len(detail.reads) == told.count("read")
        assert len(recording.tokens) == told.count("token")
        assert len(recording.residency) == told.count("residency")
        marks = ("phase", "batch", "graph", "plan", "fault", "restart")
        assert len(recording.marks) == sum(map(told.count, marks))
        assert detail.executors() == ["npu.0", "worker.0", "worker.1"]
        assert not recording.is_cut

    def test_time_begins_after_the_run_event(self, tmp_path: Path) -> None:
        """Reading a model may take minutes; nothing of it is drawn."""
        lines = MadeUp(tokens=3).events()
        lines[0]["t_ns"] -= 4_000_000_000
        recording = read_recording(written(tmp_path, lines))
        assert recording.first_ns == lines[1]["t_ns"]

    def test_order_of_lines_does_not_matter(self, tmp_path: Path) -> None:
        lines = MadeUp(tokens=4).events()
        first = read_recording(written(tmp_path, lines))
        second = read_recording(written(tmp_path, [lines[0], *reversed(lines[1:])]))
        assert first.steps == second.steps
        times = second.detail.ops["worker.0"].column("t_ns").tolist()
        assert times == first.detail.ops["worker.0"].column("t_ns").tolist() == sorted(times)

    def test_unknown_events_and_keys_are_passed_over(self, tmp_path: Path) -> None:
        lines = MadeUp(tokens=3).events()
        plain = read_recording(written(tmp_path, lines))
        lines[2]["colour"] = "red"
        lines.insert(3, {"t_ns": lines[2]["t_ns"], "seq": 0, "actor": "io", "event": "new"})
        more = read_recording(written(tmp_path, lines))
        assert more.num_events == plain.num_events + 1
        assert more.steps == plain.steps

    def test_lost_records_are_counted(self, tmp_path: Path) -> None:
        lines = MadeUp(tokens=3).events()
        lost = {"seq": 0, "actor": "worker.0", "event": "lost", "records": 7}
        lines += [{"t_ns": lines[-1]["t_ns"], **lost}] * 2
        assert read_recording(written(tmp_path, lines)).num_lost == 14

    def test_progress_ends_within_the_file(self, tmp_path: Path) -> None:
        path = MadeUp(tokens=60, layers=8).write(tmp_path / "run.jsonl")
        heard: list[tuple[int, int]] = []
        read_recording(path, lambda done, total: heard.append((done, total)))
        assert heard
        assert all(0 < done <= total == path.stat().st_size for done, total in heard)


class TestCut:
    @pytest.mark.parametrize("cut", [1, 20, 60])
    def test_last_line_may_be_cut(self, cut: int, tmp_path: Path) -> None:
        path = MadeUp(tokens=3).write(tmp_path / "run.jsonl")
        lines = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(b"".join(lines[:-1]) + lines[-1][:cut])
        recording = read_recording(path)
        assert recording.is_cut
        assert recording.num_events == len(lines) - 1

    def test_missing_newline_alone_is_no_cut(self, tmp_path: Path) -> None:
        path = MadeUp(tokens=3).write(tmp_path / "run.jsonl")
        path.write_bytes(path.read_bytes()[:-1])
        assert not read_recording(path).is_cut

    def test_cut_in_the_middle_is_refused(self, tmp_path: Path) -> None:
        path = MadeUp(tokens=3).write(tmp_path / "run.jsonl")
        lines = path.read_bytes().splitlines(keepends=True)
        lines[4] = lines[4][:30] + b"\n"
        path.write_bytes(b"".join(lines))
        with pytest.raises(FormatError, match=r"run\.jsonl:5: "):
            read_recording(path)


class TestRefusals:
    @pytest.mark.parametrize(
        ("content", "said"),
        [
            (b"", "is empty"),
            (b"GGUF\x03\x00\x00\x00", ":1: is no JSON object"),
            (b"\xff\xfe\x00\n", ":1: is no JSON object"),
            (b"[1, 2]\n", ":1: is no JSON object"),
            (b"{}\n", ":1: "),
            (b"[" * 200_000 + b"\n", ":1: is no JSON object"),
            (b'{"t_ns": "soon", "seq": 0, "actor": "a", "event": "b"}\n', ":1: t_ns is 'soon'"),
            (b'{"t_ns": -4, "seq": 0, "actor": "a", "event": "b"}\n', ":1: t_ns is -4"),
            (b" " * (1 << 20), ":1: "),
        ],
        ids=range(9),
    )
    def test_garbage_names_its_line(self, content: bytes, said: str, tmp_path: Path) -> None:
        path = tmp_path / "garbage"
        path.write_bytes(content)
        with pytest.raises(FormatError) as error:
            read_recording(path)
        assert str(error.value).startswith(str(path))
        assert said in str(error.value)

    @pytest.mark.parametrize(
        ("key", "value"), [("ns", -1), ("bytes", 1 << 60), ("stall_ns", -5), ("tokens", -1)]
    )
    def test_impossible_number_is_named(self, key: str, value: int, tmp_path: Path) -> None:
        with pytest.raises(FormatError, match=rf":\d+: {key} is {value}: must be"):
            read_recording(changed(tmp_path, 1, **{key: value}))

    def test_share_must_be_a_number(self, tmp_path: Path) -> None:
        lines = MadeUp(tokens=3).events()
        next(line for line in lines if line["event"] == "batch")["hot_share"] = float("nan")
        with pytest.raises(FormatError, match="hot_share is nan"):
            read_recording(written(tmp_path, lines))

    def test_other_runs_times_are_refused(self, tmp_path: Path) -> None:
        lines = MadeUp(tokens=3).events()
        lines[-1]["t_ns"] += 1 << 53
        with pytest.raises(FormatError, match="52 days apart"):
            read_recording(written(tmp_path, lines))

    def test_missing_file_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"none\.jsonl: cannot be read: No such file"):
            read_recording(tmp_path / "none.jsonl")
