"""The `polyneuron` program's way in and out: every end is an exit code and at most one line."""

from __future__ import annotations

import os
import sys

FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130


def main(arguments: list[str] | None = None) -> None:
    """Run the program and exit: 0 done, 1 failed while running, 2 bad input."""
    words = sys.argv[1:] if arguments is None else arguments
    debug = "--debug" in words
    words = ["--debug", *(w for w in words if w != "--debug")] if debug else words
    try:
        _open_streams()
        code = _run(words or ["--help"], debug)
    except KeyboardInterrupt:
        code = INTERRUPTED
    sys.exit(code)


def _run(words: list[str], debug: bool) -> int:
    # Imported late, so that Ctrl-C while Python reads its modules ends quietly, too.
    import typer

    from polyneuron.cli.program import UsageFault, app, usage_message
    from polyneuron.errors import ConfigError, FormatError, PolyneuronError

    try:
        code = app(words, prog_name="polyneuron", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except typer.Abort:
        return INTERRUPTED
    except UsageFault as error:
        return _fail(usage_message(error, words), BAD_INPUT)
    except BrokenPipeError:  # who reads has had enough
        _drop_output()
        return FAILED
    except Exception as error:
        if debug:
            raise
        if isinstance(error, PolyneuronError):
            is_bad = isinstance(error, ConfigError | FormatError)
            return _fail(str(error), BAD_INPUT if is_bad else FAILED)
        if isinstance(error, OSError):
            if error.filename is None:  # as of a full disk behind standard output
                _drop_output()
                return _fail(str(error.strerror or error), FAILED)
            return _fail(f"{error.filename}: {error.strerror}", FAILED)
        # Ray's errors are whole tracebacks; their last line says what happened.
        line = [type(error).__name__, *str(error).strip().splitlines()[-1:]]
        return _fail(f"{': '.join(line)}; --debug shows where", FAILED)


def _fail(message: str, code: int) -> int:
    line = " ".join(message.split())
    print(f"polyneuron: error: {line}", file=sys.stderr, flush=True)
    return code


def _open_streams() -> None:
    """Give closed standard streams a bottom, so that no file we open takes their numbers."""
    if sys.stdin is None:
        sys.stdin = open(os.devnull)  # noqa: SIM115
    is_closed = sys.stdout is None
    if is_closed:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    if is_closed:
        cure = "redirect it to a file or to /dev/null"
        sys.exit(_fail(f"standard output is closed: {cure}", BAD_INPUT))


def _drop_output() -> None:
    """Lead standard output to nowhere: Python would fail once more to write it at exit."""
    sink = os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, 1)
    os.close(sink)
