"""The table of commands, and what stands around them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer

from polyneuron.cli.bench import bench
from polyneuron.cli.convert import convert
from polyneuron.cli.doctor import doctor
from polyneuron.cli.inspect import inspect
from polyneuron.cli.perplexity import perplexity
from polyneuron.cli.plan import plan
from polyneuron.cli.profile import profile
from polyneuron.cli.replay import replay
from polyneuron.cli.run import run
from polyneuron.cli.simulate import simulate
from polyneuron.cli.synth import synth
from polyneuron.cli.trace import trace
from polyneuron.cli.verify import verify

COMMANDS: tuple[Callable[..., Any], ...] = (
    run, plan, profile, perplexity, bench, inspect, convert, synth, verify,
    simulate, replay, trace, doctor,
)  # fmt: skip
# BadParameter < UsageError < ClickException, of whichever click this typer brings.
UsageFault: type[Exception] = typer.BadParameter.__mro__[2]

_HELP = {"help_option_names": ["-h", "--help"]}

app = typer.Typer(
    help="Runs language models bigger than a board's memory.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings=_HELP,
)
# Keys of a scenario are options that no table of options can know: --engine.memory=7GiB.
_WITH_KEYS = {**_HELP, "ignore_unknown_options": True}
for command in COMMANDS:
    settings = _WITH_KEYS if command in (simulate, replay) else _HELP
    app.command(context_settings=settings)(command)


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


def usage_message(error: Any, words: list[str]) -> str:
    """A usage error with where a bad value came from and whose help tells more."""
    message = error.format_message().rstrip(".").replace("Value error, ", "")  # of enumerations
    context, param = getattr(error, "ctx", None), getattr(error, "param", None)
    if context is not None and param is not None and param.envvar is not None:
        source = context.get_parameter_source(param.name)
        if source is not None and source.name == "ENVIRONMENT":
            message += f" (from the environment: {param.envvar})"
    path = context.command_path if context is not None else _command_path(words)
    return f"{message}; see {path} --help"


def _command_path(words: list[str]) -> str:
    """The command that was asked for: a parser's error does not carry it."""
    names = {command.__name__ for command in COMMANDS}
    return " ".join(["polyneuron", *[word for word in words if word in names][:1]])
