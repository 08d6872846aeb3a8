"""`polyneuron trace`: what it prints and writes, and what it refuses."""

import json
import os
from pathlib import Path

import pytest

from polyneuron.cli.main import main
from polyneuron.timeline import Timeline, event_line, part_path
from polyneuron.timeline_events import Event
from tests.support.made_up_timeline import MadeUp
from tests.unit.cli.test_main import refusal

Captured = pytest.CaptureFixture[str]


def ran(*words: str) -> int:
    with pytest.raises(SystemExit) as exit_info:
        main(["trace", *words])
    return int(exit_info.value.code or 0)


@pytest.fixture
def timeline(tmp_path: Path) -> Path:
    return MadeUp(tokens=24, npus=1, faults=True, sequences=2).write(tmp_path / "run.jsonl")


class TestSummary:
    def test_tables_tell_it(self, timeline: Path, capsys: Captured) -> None:
        assert ran(str(timeline)) == 0
        out, err = capsys.readouterr()
        for word in ("made-up-7b", "first token", "P99", "waits for flash", "worker.1", "npu.0",
                     "worker_lost", "restart", "bytes read", "miss rate"):  # fmt: skip
            assert word in out
        assert err == ""
        assert max(map(len, out.splitlines())) <= 100

    def test_json_is_one_object(self, timeline: Path, capsys: Captured) -> None:
        assert ran(str(timeline), "--json") == 0
        out = capsys.readouterr().out
        found = json.loads(out)
        assert out.count("\n") == 1
        assert len(found["steps"]) == 24
        assert found["requests"][0]["tokens"] == 24
        assert found["requests"][0]["ttft_ms"] > 0

    def test_unmeasured_is_a_dash(self, tmp_path: Path, capsys: Captured) -> None:
        lines = MadeUp(tokens=3, detail="steps").events()
        for line in lines:
            if line["event"] == "step":
                line.update(bytes=None, reads=None, stall_ns=None)
        path = tmp_path / "run.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        ran(str(path))
        rows = {
            line.split("  ")[1].strip() or line: line.split()[-4:]
            for line in capsys.readouterr().out.splitlines()
            if line.startswith("   ")
        }
        assert rows["bytes read"] == rows["reads"] == ["-"] * 4

    def test_names_do_not_steer_the_terminal(self, tmp_path: Path, capsys: Captured) -> None:
        ran(str(MadeUp(model="\x1b[2J[bold]x").write(tmp_path / "run.jsonl")))
        out = capsys.readouterr().out
        assert "\x1b" not in out
        assert r"\x1b[2J[bold]x" in out

    def test_cut_is_warned_of(self, timeline: Path, capsys: Captured) -> None:
        timeline.write_bytes(timeline.read_bytes()[:-25])
        assert ran(str(timeline), "--json") == 0
        out, err = capsys.readouterr()
        assert json.loads(out)["cut"] is True
        assert err == (
            f"polyneuron: warning: {timeline}: its last line is cut short: this is what comes "
            f"before\n"
        )


class TestOutputs:
    def test_both_are_written(self, timeline: Path, capsys: Captured) -> None:
        chrome, page = timeline.with_name("chrome.json"), timeline.with_name("page.html")
        assert ran(str(timeline), "--chrome", str(chrome), "--html", str(page)) == 0
        assert json.loads(chrome.read_text())["traceEvents"]
        assert page.read_text().startswith("<!DOCTYPE html>")
        wrote = f"polyneuron: wrote {chrome}\npolyneuron: wrote {page}\n"
        assert capsys.readouterr().err == wrote
        assert set(timeline.parent.iterdir()) == {timeline, chrome, page}


class TestBrokenOff:
    def test_parts_are_put_together(self, tmp_path: Path, capsys: Captured) -> None:
        path = tmp_path / "run.jsonl"
        lines = map(event_line, MadeUp(tokens=4).events())
        part_path(path, "driver").write_text("".join(lines))
        assert ran(str(path), "--json") == 0
        out, err = capsys.readouterr()
        assert len(json.loads(out)["steps"]) == 4
        assert "its run was broken off: put " in err and f"events together in {path}" in err
        assert list(tmp_path.iterdir()) == [path]

    @pytest.mark.parametrize("name", ["driver.part", "records"])
    def test_part_tells_of_the_whole(self, name: str, tmp_path: Path, capsys: Captured) -> None:
        path = tmp_path / "run.jsonl"
        MadeUp(tokens=4).write(part_path(path, "driver"))
        line = refusal(("trace", f"{path}.{name}"), capsys)
        assert line.endswith(f"is a part of a timeline; polyneuron trace {path} reads the whole")

    def test_older_one_is_read_while_a_run_goes_on(self, timeline: Path, capsys: Captured) -> None:
        with Timeline(timeline) as running:
            running.logger("driver").emit(Event.LOST, records=1)
            running.flush()
            assert ran(str(timeline), "--json") == 0
            out, err = capsys.readouterr()
        assert len(json.loads(out)["steps"]) == 24
        assert "another run is writing" in err and "this is the one before" in err


class TestRefusals:
    def test_garbage_names_its_line(self, timeline: Path, capsys: Captured) -> None:
        lines = timeline.read_text().splitlines(keepends=True)
        timeline.write_text("".join(lines[:3]) + "garbage\n" + "".join(lines[3:]))
        line = refusal(("trace", str(timeline)), capsys)
        assert line.startswith(f"{timeline}:4: is no JSON object")

    def test_missing_file_is_named(self, tmp_path: Path, capsys: Captured) -> None:
        line = refusal(("trace", str(tmp_path / "none")), capsys)
        assert line == f"{tmp_path / 'none'}: cannot be read: No such file or directory"

    @pytest.mark.parametrize("flag", ["--chrome", "--html"])
    def test_output_must_be_writable(self, flag: str, timeline: Path, capsys: Captured) -> None:
        folder = timeline.parent
        for name, said in (
            ("no/out", f"there is no folder {folder / 'no'}; make it first"),
            ("", "is no file; name one"),
            (timeline.name, "is the timeline itself; name another file"),
        ):
            assert said in refusal(("trace", str(timeline), flag, str(folder / name)), capsys)

    @pytest.mark.parametrize("flag", ["--chrome", "--html"])
    def test_output_takes_no_devices_place(
        self, flag: str, timeline: Path, capsys: Captured
    ) -> None:
        fifo = timeline.with_name("fifo")
        os.mkfifo(fifo)
        assert "is no file" in refusal(("trace", str(timeline), flag, str(fifo)), capsys)
        assert fifo.is_fifo()

    def test_outputs_must_differ(self, timeline: Path, capsys: Captured) -> None:
        out = str(timeline.with_name("out"))
        line = refusal(("trace", str(timeline), "--chrome", out, "--html", out), capsys)
        assert line == f"--html {out}: is already written by --chrome; name another file"
        assert not Path(out).exists()
