"""What `simulate` and `replay` share: scenarios, overrides, and results for people and programs."""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.table import Table

from polyneuron.cli.options import OUTPUT, option
from polyneuron.cli.shown import result_console
from polyneuron.errors import ConfigError
from polyneuron.timeline import check_writable

if TYPE_CHECKING:
    from polyneuron.scenarios.expectation import Player
    from polyneuron.scenarios.playing import Play
    from polyneuron.scenarios.result import ScenarioResult

PLAIN_WIDTH = 100
FAILED = 1
MAX_SEEDS = 10_000
ROUNDS = "recording_rounds"
"""The figure that tells how often a recording was gone through."""
Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="SCENARIO [--KEY.PATH=VALUE]",
        help="files or names of the library, and keys to change, as --engine.memory=7GiB",
        show_default=False,
    ),
]
Seed = Annotated[int, option("--seed", "-s", text="the first seed; -1: the scenario's own")]
Seeds = Annotated[int, option("--seeds", min=1, max=MAX_SEEDS, text="seeds, from the first on")]
Trace = Annotated[Path | None, option("--trace", panel=OUTPUT, text="write the timeline here")]
All = Annotated[bool, option("--all", text="the library's scenarios, but those of the paper")]
List = Annotated[bool, option("--list", panel=OUTPUT, text="the scenarios that come along")]


def split_words(words: Iterable[str]) -> tuple[list[str], dict[str, Any]]:
    """Scenarios, and overrides by dotted key; ConfigError for what is neither."""
    scenarios: list[str] = []
    overrides: dict[str, Any] = {}
    for word in words:
        if not word.startswith("-"):
            scenarios.append(word)
            continue
        key, equals, value = word.removeprefix("--").partition("=")
        if not (word.startswith("--") and equals and "." in key and all(key.split("."))):
            raise ConfigError(f"{word}: no such option; a scenario's key is --engine.memory=7GiB")
        overrides[key] = override_value(value)
    return scenarios, overrides


def override_value(text: str) -> Any:
    """A value as TOML would read it; what it would not is a string: 7GiB."""
    try:
        found = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return found["value"] if len(found) == 1 else text


def load_plays(
    words: list[str], player: Player, seed: int, seeds: int, *, play_library: bool = False
) -> list[Play]:
    """Every scenario, on request all of the library too, with every seed; nothing is played yet."""
    from polyneuron.scenarios.library import find_scenario
    from polyneuron.scenarios.playing import Play
    from polyneuron.scenarios.script import load_script

    scenarios, overrides = split_words(words)
    if play_library:
        scenarios += library_for(player, with_folders=False)
    if not scenarios:
        raise ConfigError("no scenario: give a file or a name; --list shows those that come along")
    plays = []
    for word in scenarios:
        path = find_scenario(word)
        first = load_script(path, overrides).seed if seed < 0 else seed
        for number in range(first, first + seeds):
            plays.append(Play.load(path, {**overrides, "seed": number}, player))
    return plays


def check_trace(trace: Path | None) -> None:
    """Refuse a file that could not be written, before anything is played."""
    if trace is not None:
        check_writable(trace)


def library_for(player: Player, *, with_folders: bool) -> dict[str, str]:
    """The scenarios of the library that are for this player, with what each is about.

    Folders of it hold those that belong together, as the paper's figures do.
    """
    from polyneuron.scenarios.library import find_scenario, library_names
    from polyneuron.scenarios.script import load_script

    names = [name for name in library_names() if with_folders or "/" not in name]
    scripts = {name: load_script(find_scenario(name)) for name in names}
    return {name: script.about for name, script in scripts.items() if player in script.players}


def show_library(player: Player, *, as_json: bool) -> None:
    """Print the library: a line each, or one object."""
    shown = library_for(player, with_folders=True)
    if as_json:
        sys.stdout.write(json.dumps(shown) + "\n")
        return
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, about in shown.items():
        table.add_row(name, about)
    result_console(PLAIN_WIDTH).print(table)


def show_results(results: Iterable[ScenarioResult], *, as_json: bool) -> None:
    """Print each result as it comes; exit 1 at the end when an expectation was not met."""
    is_met = True
    for result in results:
        is_met &= result.is_met
        if as_json:
            sys.stdout.write(json.dumps(result.as_dict()) + "\n")
            sys.stdout.flush()
        else:
            show_result(result)
    if not is_met:
        raise typer.Exit(FAILED)


def show_result(result: ScenarioResult) -> None:
    """A table of figures, then one line for each expectation."""
    console = result_console(PLAIN_WIDTH)
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column(f"{result.scenario}, seed {result.seed}")
    table.add_column("", justify="right")
    for name, value in result.figures.items():
        if value is not None:
            table.add_row(name, shown_figure(name, value))
    console.print(table)
    for checked in result.expectations:
        got = "not measured" if checked.got is None else f"{checked.got:.6g}"
        source = f" ({checked.source})" if checked.source else ""
        word = "ok    " if checked.ok else "MISSED"
        line = f"{word} {checked.name}: {got}, expected {checked.expected}{source}"
        console.print(line, soft_wrap=True)
    rounds = max((v or 0.0 for n, v in result.figures.items() if n.startswith(ROUNDS)), default=0.0)
    if rounds > 1.0:
        console.print(f"the recording was shorter than what was played: {rounds:.1f} rounds of it")


def shown_figure(name: str, value: float) -> str:
    """A figure for people; shares as percentages."""
    figure = name.partition("@")[0]
    if figure.endswith(("_rate", "_share", "_rate_p99")):
        return f"{value:.2%}"
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.3f}"
