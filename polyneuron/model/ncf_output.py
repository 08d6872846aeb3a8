"""What all makers of neuron-cluster files do: check the output, go on where one was broken off."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from polyneuron.errors import ConfigError, FormatError
from polyneuron.io.ncf_pieces import MadePiece
from polyneuron.io.ncf_reader import read_ncf
from polyneuron.io.ncf_writer import (
    NcfPlan,
    NcfWriter,
    check_free_space,
    encode_head,
    journal_path,
    partial_path,
    stripped,
)
from polyneuron.io.write_journal import remove_stale

Progress = Callable[[int, int], None]
PieceSource = Callable[[int], Iterable[MadePiece]]
"""Gives the pieces from that number on, each valid until the next one."""


@dataclass(frozen=True, slots=True)
class Written:
    """How much of an output was there before."""

    resumed_bytes: int
    """Taken over from a run that was broken off; all of them when the file was there already."""
    was_there: bool
    """The output held the very same before."""


def write_ncf(
    output: Path,
    plan: NcfPlan,
    recipe: str,
    pieces: PieceSource,
    *,
    force: bool,
    progress: Progress,
    on_wait: Callable[[], None],
    check_end: Callable[[], None] = lambda: None,
) -> Written:
    """Write what `plan` lays out, or go on with it; `recipe` says what decides the pieces.

    An output that holds something else is only replaced with `force`. `check_end` may raise before
    the file takes its name; then nothing is left.
    """
    check_output(output)
    if output.exists() and not force:
        return _existing(output, plan)
    check_free_space(output, plan.file_bytes)
    total = plan.file_bytes - plan.data_offset
    with NcfWriter(output, plan, recipe, on_wait) as writer:
        if output.exists() and not force:  # made by another process while this one waited
            writer.give_up()
            return _existing(output, plan)
        writer.resume(progress)
        resumed = writer.num_bytes
        for piece in pieces(writer.num_pieces):
            writer.write_piece(piece.data, piece.errors)
            progress(writer.num_bytes, total)
        try:
            check_end()
        except FormatError:
            writer.give_up()
            raise
        writer.finish()
    return Written(resumed, was_there=False)


def check_output(output: Path) -> None:
    """ConfigError unless a file can be written there."""
    if output.is_dir():
        raise ConfigError(f"{output}: a folder; give the name of the file to write")
    if not output.parent.is_dir():
        raise ConfigError(f"{output.parent}: no such folder; make it first")


def _existing(output: Path, plan: NcfPlan) -> Written:
    """An output that is there already; ConfigError when it is not what would be written."""
    try:
        manifest = stripped(read_ncf(output).manifest)
        is_same = encode_head(manifest, plan.data_offset, plan.file_bytes) == encode_head(
            plan.manifest, plan.data_offset, plan.file_bytes
        )
    except (FormatError, ValueError):
        is_same = False
    if not is_same:
        raise ConfigError(
            f"{output}: exists and holds something else; give another name, or --force to "
            "replace it"
        )
    remove_stale(journal_path(output), partial_path(output))
    return Written(plan.file_bytes - plan.data_offset, was_there=True)
