"""`polyneuron convert`: a model file becomes a neuron-cluster file."""

from __future__ import annotations

import sys
import time
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from polyneuron.cli.options import option
from polyneuron.cli.progress import LoadProgress
from polyneuron.model.locate import locate_model

if TYPE_CHECKING:
    from polyneuron.model.convert import ConvertReport

MAX_NAMED = 3


class LayoutChoice(StrEnum):
    """What `--layout` takes."""

    AUTO = "auto"
    TILES = "tiles"
    BUNDLES = "bundles"


class DownChoice(StrEnum):
    """What `--down` takes."""

    AUTO = "auto"
    Q8 = "q8"
    Q4 = "q4"
    F16 = "f16"


class WeightsChoice(StrEnum):
    """What `--weights` takes."""

    AUTO = "auto"
    Q8 = "q8"
    Q4 = "q4"
    F16 = "f16"
    F32 = "f32"


def convert(
    source: Annotated[
        str, typer.Argument(help="a .gguf file, a Hugging Face folder, or the word smollm2")
    ],
    output: Annotated[Path, option("--output", "-o", text="the .ncf file to write")],
    layout: Annotated[
        LayoutChoice,
        option("--layout", text="tiles: lossless, run from memory or file; bundles: by neuron"),
    ] = LayoutChoice.TILES,
    down: Annotated[
        DownChoice,
        option("--down", text="type of down's columns in bundles; auto: q8, of float sources own"),
    ] = DownChoice.AUTO,
    weights: Annotated[
        WeightsChoice,
        option("--weights", text="type of a float source's matrices; auto: as precise as they are"),
    ] = WeightsChoice.AUTO,
    force: Annotated[bool, option("--force", text="replace an output that differs")] = False,
) -> None:
    """Write a neuron-cluster file; broken off and run again, it goes on where it stopped."""
    from polyneuron.io.ncf_format import Layout
    from polyneuron.kernels.quant import StorageType
    from polyneuron.model import convert as conversion

    wanted = None if layout is LayoutChoice.AUTO else Layout(layout.value)
    down_type = None if down is DownChoice.AUTO else StorageType[down.name]
    weight_type = None if weights is WeightsChoice.AUTO else StorageType[weights.name]
    started = time.monotonic()
    with LoadProgress("converting") as progress:
        report = conversion.convert(
            locate_model(source),
            output,
            layout=wanted,
            down=down_type,
            weights=weight_type,
            force=force,
            progress=progress,
            on_wait=note_wait,
        )
    note_report(report, time.monotonic() - started)
    if report.has_predictors:
        note(f"its predictors can be taken: polyneuron profile -m {output} --import {source}")


def note_wait() -> None:
    """Say why nothing happens."""
    note("another process is writing this file; waiting for it")


def note(line: str) -> None:
    """A line for the person."""
    print(line, file=sys.stderr, flush=True)


def note_report(report: ConvertReport, seconds: float) -> None:
    """What was written, how fast, and what was rounded."""
    mib = report.file_bytes / 2**20
    if report.was_there:
        note(f"{report.output}: converted before, {mib:,.1f} MiB; nothing to do")
        return
    rate = (report.file_bytes - report.resumed_bytes) / 1e6 / max(seconds, 1e-9)
    resumed = report.resumed_bytes >> 20
    kept = f", {resumed:,} MiB of them from an earlier run" if resumed else ""
    note(
        f"{report.output}: {mib:,.1f} MiB in {report.layout}{kept}, "
        f"{seconds:.1f} s, {rate:,.0f} MB/s"
    )
    if report.lossy:
        worst = sorted(report.lossy, key=lambda tensor: -tensor.rms_error)
        named = ", ".join(f"{t.name} {100 * t.rms_error:.2g} %" for t in worst[:MAX_NAMED])
        rest = len(worst) - MAX_NAMED
        more = f" and {rest} more, less" if rest > 0 else ""
        note(f"rounded once more, relative rms error: {named}{more}; `inspect` lists all")
    else:
        note("every weight is the source's, bit for bit in value")
