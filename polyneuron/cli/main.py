"""The `polyneuron` program: the table of commands, and how errors end."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import typer

from polyneuron.cli.inspect import inspect
from polyneuron.cli.run import run
from polyneuron.errors import ConfigError, FormatError, PolyneuronError

FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130
# BadParameter < UsageError < ClickException, of whichever click this typer brings.
UsageFault: type[Exception] = typer.BadParameter.__mro__[2]

app = typer.Typer(
    help="Runs language models bigger than a board's memory.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
COMMANDS: tuple[Callable[..., Any], ...] = (run, inspect)
for command in COMMANDS:
    app.command(context_settings={"help_option_names": ["-h", "--help"]})(command)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"polyneuron {version('polyneuron')}")
        raise typer.Exit


@app.callback()
def _program(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="print the version"
    ),
    debug: bool = typer.Option(False, "--debug", help="show tracebacks"),
) -> None:
    """Runs language models bigger than a board's memory."""


def _say(message: str) -> None:
    line = " ".join(message.split())
    print(f"polyneuron: error: {line}", file=sys.stderr, flush=True)


def _usage(error: Any) -> str:
    """A usage error with the command whose help tells more."""
    message = error.format_message().rstrip(".")
    context = getattr(error, "ctx", None)
    path = context.command_path if context else "polyneuron"
    return f"{message}; see {path} --help"


def main(arguments: list[str] | None = None) -> None:
    """Run the program and exit: 0 done, 1 failed while running, 2 bad input."""
    words = sys.argv[1:] if arguments is None else arguments
    debug = "--debug" in words
    words = ["--debug", *(w for w in words if w != "--debug")] if debug else words
    try:
        code = app(words, prog_name="polyneuron", standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)
    except typer.Abort:
        sys.exit(INTERRUPTED)
    except UsageFault as error:
        _say(_usage(error))
        sys.exit(BAD_INPUT)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(FAILED)
    except (PolyneuronError, OSError) as error:
        if debug:
            raise
        _say(str(error))
        sys.exit(BAD_INPUT if isinstance(error, ConfigError | FormatError) else FAILED)
