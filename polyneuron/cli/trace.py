"""`polyneuron trace`: the figures of a timeline, and its pictures."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TextIO

import typer

from polyneuron.actors.trace_records import finish_timeline
from polyneuron.cli import options
from polyneuron.cli.options import OUTPUT, option
from polyneuron.cli.progress import LoadProgress
from polyneuron.cli.trace_tables import show
from polyneuron.errors import ConfigError
from polyneuron.io.whole_file import write_whole_text
from polyneuron.timeline import is_broken_off
from polyneuron.tracing.chrome_trace import write_chrome_trace
from polyneuron.tracing.collector import read_recording
from polyneuron.tracing.page import page_of
from polyneuron.tracing.recording import Recording
from polyneuron.tracing.summary import Figures, summarize

PART = re.compile(r"(.+)\.(?:records|[a-z]+\.part)")
"""Names of files that lie beside a timeline while it is written."""


def trace(
    file: Annotated[str, typer.Argument(help="a timeline that --trace wrote")],
    chrome: Annotated[
        str | None,
        option("--chrome", panel=OUTPUT, text="write a trace for Perfetto or chrome://tracing"),
    ] = None,
    html: Annotated[
        str | None, option("--html", panel=OUTPUT, text="write a page with the pipeline drawn")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """What a timeline tells: times, shares and rates; as a page; for Perfetto."""
    path = Path(file)
    _join(path)
    _check_outputs(path, {"--chrome": chrome, "--html": html})
    with LoadProgress("reading the timeline") as progress:
        recording = read_recording(path, progress)
    if recording.is_cut:
        _say(f"warning: {path}: its last line is cut short: this is what comes before")
    figures = summarize(recording)
    _write(chrome, lambda target: write_chrome_trace(recording, target))
    _write(html, lambda target: _write_page(recording, figures, target))
    if as_json:
        sys.stdout.write(json.dumps(figures) + "\n")
    else:
        show(figures)


def _join(path: Path) -> None:
    """Make the timeline of a run that was broken off from its parts, where these lie there."""
    path = path.resolve()
    if part := PART.fullmatch(path.name):
        whole = path.with_name(part[1])
        if is_broken_off(whole):
            raise ConfigError(
                f"{path}: is a part of a timeline; polyneuron trace {whole} reads the whole"
            )
    if not is_broken_off(path):
        return
    try:
        number = finish_timeline(path)
    except ConfigError as error:  # it goes on
        if not path.exists():
            raise
        _say(f"warning: {error}: this is the one before")
        return
    if number:
        _say(f"its run was broken off: put {number:,} events together in {path}")


def _write_page(recording: Recording, figures: Figures, target: TextIO) -> None:
    target.write(page_of(recording, figures))


def _write(path: str | None, write: Callable[[TextIO], None]) -> None:
    if path is not None:
        write_whole_text(Path(path), write)
        _say(f"wrote {path}")


def _say(line: str) -> None:
    print(f"polyneuron: {line}", file=sys.stderr, flush=True)


def _check_outputs(timeline: Path, outputs: dict[str, str | None]) -> None:
    """Refuse, before minutes of reading, what cannot be written or would overwrite what is read."""
    taken = {timeline.resolve(): "the timeline itself"}
    for flag, name in outputs.items():
        if name is None:
            continue
        path = Path(name)
        if not name or (path.exists() and not path.is_file()):  # a device would be replaced
            raise ConfigError(f"{flag} {name!r}: is no file; name one")
        if not path.parent.is_dir():
            raise ConfigError(f"{flag} {path}: there is no folder {path.parent}; make it first")
        if not os.access(path.parent, os.W_OK):
            raise ConfigError(
                f"{flag} {path}: may not be written; name a file in a folder of yours"
            )
        if path.resolve() in taken:
            raise ConfigError(f"{flag} {path}: is {taken[path.resolve()]}; name another file")
        taken[path.resolve()] = f"already written by {flag}"
