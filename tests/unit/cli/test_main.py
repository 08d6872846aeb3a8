"""What a wrong command line gets: one line on stderr that names it, and exit code 2."""

import errno
import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from polyneuron.cli import main as program
from polyneuron.cli.main import BAD_INPUT, FAILED, INTERRUPTED, main
from polyneuron.cli.run import read_prompt
from polyneuron.errors import EngineError
from tests.support.tiny_gguf import TinyModel, write_tiny_gguf

RUN = ("run", "-m", "smollm2", "-p", "x")

Captured = pytest.CaptureFixture[str]


def refusal(words: tuple[str, ...], capsys: Captured, code: int = BAD_INPUT) -> str:
    """The one line on stderr that these words end with."""
    with pytest.raises(SystemExit) as exit_info:
        main(list(words))
    out, err = capsys.readouterr()
    assert (exit_info.value.code, out) == (code, "")
    assert err.startswith("polyneuron: error: ")
    assert err.endswith("\n")
    assert err.count("\n") == 1
    return err.removeprefix("polyneuron: error: ").strip()


def finished(*command: str) -> "subprocess.CompletedProcess[str]":
    """A process that has ended, however it did."""
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)


class TestUsage:
    @pytest.mark.parametrize(
        ("words", "named"),
        [
            (("rnu",), "'rnu'"),
            (("run",), "--model"),
            (("inspect",), "file"),
            (("inspect", "a.gguf", "b.gguf"), "b.gguf"),
            ((*RUN, "--promt", "x"), "--promt (Possible options: "),
            ((*RUN, "-n"), "'-n' requires an argument; see polyneuron run --help"),
            ((*RUN, "-n", "1e3"), "--predict"),
            ((*RUN, "--temp", "hot"), "--temp"),
            ((*RUN, "-t", "-1"), "--threads"),
            ((*RUN, "-c", "-1"), "--ctx-size"),
        ],
    )
    def test_parser_refusal_names_the_word(
        self, words: tuple[str, ...], named: str, capsys: Captured
    ) -> None:
        line = refusal(words, capsys)
        assert named in line
        assert line.endswith("--help")

    @pytest.mark.parametrize(
        ("words", "line"),
        [
            ((*RUN, "-n", "-3"), "-n -3: give 0 or more, -1 (to the end) or -2"),
            ((*RUN, "-f", "text"), "give the prompt with -p TEXT or with -f FILE"),
            (RUN[:3], "give the prompt with -p TEXT or with -f FILE"),
            (("run", "-m", "smollm2", "-f", ""), "-f '': Is a directory"),
            (("run", "-m", "smollm2", "-f", "no.txt"), "-f 'no.txt': No such file"),
            ((*RUN, "--stop", ""), "--stop: a stop string is empty"),
            ((*RUN, "--best-of", "0"), "--best-of 0: give 1 to 64"),
            ((*RUN, "--best-of", "65"), "--best-of 65: give 1 to 64"),
            ((*RUN, "--top-p", "2"), "--top-p: 2.0 is outside of 0 to 1"),
            ((*RUN, "--temp", "nan"), "--temp: nan"),
            ((*RUN, "--seed", "-5"), "--seed: -5"),
            ((*RUN, "--trace-detail", "all"), "--trace-detail all: no timeline is written"),
            (("run", "-m", "no.gguf", "-p", "x"), "model 'no.gguf': no such file; give a .gguf"),
        ],
    )
    def test_bad_value_is_named(self, words: tuple[str, ...], line: str, capsys: Captured) -> None:
        assert refusal(words, capsys).startswith(line)

    def test_bad_environment_is_named(
        self, monkeypatch: pytest.MonkeyPatch, capsys: Captured
    ) -> None:
        monkeypatch.setenv("POLYNEURON_TOP_K", "many")
        assert "(from the environment: POLYNEURON_TOP_K)" in refusal(RUN, capsys)

    @pytest.mark.parametrize("words", [[], ["-h"], ["run", "--help"], ["--version"]])
    def test_help_and_version_are_results(self, words: list[str], capsys: Captured) -> None:
        with pytest.raises(SystemExit) as exit_info:
            main(words)
        out, err = capsys.readouterr()
        assert (exit_info.value.code, err) == (0, "")
        assert "polyneuron" in out


class TestFiles:
    """A file that cannot be run is refused before anything is started."""

    @pytest.mark.parametrize(
        ("content", "reason"),
        [
            (b"", "empty (0 bytes)"),
            (b"<!DOCTYPE html><html></html>", "an HTML page"),
            (b"version https://git-lfs.github.com/spec/v1\n", "a Git-LFS pointer"),
            (b"hello\n", "not a GGUF: it starts with b'hello\\n'"),
            (b"GGUF\3\0\0\0", "cut off inside the header"),
        ],
    )
    @pytest.mark.parametrize("command", ["run", "inspect", "perplexity"])
    def test_wrong_kind_is_named(
        self, command: str, content: bytes, reason: str, tmp_path: Path, capsys: Captured
    ) -> None:
        path = tmp_path / "model.gguf"
        path.write_bytes(content)
        text = tmp_path / "text"
        text.write_text("some text")
        words = (command, "-m", str(path), "-f", str(text))
        line = refusal(words if command != "inspect" else (command, str(path)), capsys)
        assert line.startswith(f"{path}: ")
        assert reason in line

    def test_directory_is_refused(self, tmp_path: Path, capsys: Captured) -> None:
        assert "a folder without a model" in refusal(("inspect", str(tmp_path)), capsys)

    def test_other_architecture_names_those_supported(
        self, tmp_path: Path, capsys: Captured
    ) -> None:
        metadata = {"general.architecture": "deepseek2"}
        path = write_tiny_gguf(tmp_path / "deepseek.gguf", metadata=metadata)
        line = refusal(("run", "-m", str(path), "-p", "x"), capsys)
        assert "'deepseek2' is not supported; supported: llama mistral qwen2" in line

    def test_cut_off_tensors_are_counted(self, tmp_path: Path, capsys: Captured) -> None:
        path = write_tiny_gguf(tmp_path / "cut.gguf")
        path.write_bytes(path.read_bytes()[:-1000])
        assert "bytes are missing: tensor" in refusal(("run", "-m", str(path), "-p", "x"), capsys)


class TestPrompt:
    """A prompt's text, whatever it comes from."""

    def test_bytes_that_are_no_text_are_replaced(self, tmp_path: Path) -> None:
        (tmp_path / "prompt").write_bytes(b"The \xff sky\n")
        assert read_prompt(None, str(tmp_path / "prompt")) == "The \ufffd sky\n"

    def test_dash_is_stdin(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\xffb")))
        assert read_prompt(None, "-") == "a\ufffdb"


class TestBeforeTheStart:
    """What the model's header shows to be impossible is refused before Ray starts."""

    @pytest.fixture
    def model(self, tmp_path: Path) -> str:
        return str(write_tiny_gguf(tmp_path / "tiny.gguf", TinyModel(context_length=64)))

    @pytest.mark.parametrize(
        ("words", "line"),
        [
            (("-p", ""), "the prompt is empty"),
            (("-p", "a b c d e f g h", "-c", "4"), "the prompt has"),
            (("-p", "x", "-c", "65"), "-c 65: the model was trained for 64 positions"),
            (("-p", "x", "-t", "65"), "65 workers and 0 NPU threads"),
        ],
    )
    def test_impossible_request_is_refused(
        self, model: str, words: tuple[str, ...], line: str, capsys: Captured
    ) -> None:
        assert refusal(("run", "-m", model, *words), capsys).startswith(line)


class TestEnds:
    """How errors that no command expects end the program."""

    @pytest.fixture
    def failing(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        """Has `run` meet an error where it reads its prompt."""

        def meet(error: BaseException) -> None:
            def read_prompt(*_args: object) -> str:
                raise error

            monkeypatch.setattr("polyneuron.cli.run.read_prompt", read_prompt)

        return meet

    @pytest.mark.parametrize(
        ("error", "line"),
        [
            (EngineError("the actor\nis lost"), "the actor is lost"),
            (OSError(errno.EACCES, "Permission denied", "a.bin"), "a.bin: Permission denied"),
            (KeyError("x"), "KeyError: 'x'; --debug shows where"),
            (RuntimeError("Traceback\n  File\nwhat happened"), "RuntimeError: what happened;"),
        ],
    )
    def test_failure_is_one_line(
        self, error: Exception, line: str, failing: Any, capsys: Captured
    ) -> None:
        failing(error)
        assert refusal(RUN, capsys, FAILED).startswith(line)

    def test_debug_shows_the_traceback(self, failing: Any) -> None:
        failing(KeyError("x"))
        with pytest.raises(KeyError):
            main([*RUN, "--debug"])

    def test_ctrl_c_is_quiet(self, failing: Any, capsys: Captured) -> None:
        failing(KeyboardInterrupt())
        with pytest.raises(SystemExit) as exit_info:
            main(list(RUN))
        assert exit_info.value.code == INTERRUPTED
        assert capsys.readouterr() == ("", "")


class TestStreams:
    """The program as a process of its own, with standard streams closed or full."""

    def run(self, redirection: str) -> "subprocess.CompletedProcess[str]":
        command = f'"$0" -m polyneuron --version {redirection}'
        return finished("bash", "-c", command, sys.executable)

    def test_closed_output_is_refused(self) -> None:
        done = self.run(">&-")
        assert done.returncode == BAD_INPUT
        assert done.stderr.startswith("polyneuron: error: standard output is closed")
        assert done.stderr.count("\n") == 1

    def test_closed_stderr_leaves_results_alone(self) -> None:
        done = self.run("2>&-")
        assert (done.returncode, done.stdout[:11]) == (0, "polyneuron ")

    def test_full_disk_fails_in_one_line(self) -> None:
        done = self.run(">/dev/full")
        assert done.returncode == FAILED
        assert done.stderr == "polyneuron: error: No space left on device\n"


def test_main_reads_few_modules() -> None:
    """Ctrl-C while Python reads the rest of them is caught by `main`."""
    code = f"import sys; import {program.__name__}; print('typer' in sys.modules)"
    assert finished(sys.executable, "-c", code).stdout == "False\n"
