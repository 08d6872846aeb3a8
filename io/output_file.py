"""What every maker of a file does: check the output, go on where it was broken off, or leave it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from polyneuron.errors import ConfigError, FormatError
from polyneuron.io.ncf_pieces import MadePiece
from polyneuron.io.piece_writer import PieceWriter, journal_path, partial_path
from polyneuron.io.write_journal import remove_stale

Progress = Callable[[int, int], None]
"""Gets data bytes done and in all."""


@dataclass(frozen=True, slots=True)
class Written:
    """How much of an output was there before."""

    resumed_bytes: int
    """Taken over from a run that was broken off; all of them when the file was there already."""
    was_there: bool
    """The output held the very same before."""


@dataclass(frozen=True, slots=True)
class OutputFile:
    """A file that is laid out and not yet written."""

    path: Path
    num_bytes: int
    open_writer: Callable[[], PieceWriter]
    """Blocks while another process writes the same output."""
    pieces: Callable[[int], Iterable[MadePiece]]
    """The pieces from that number on, each valid until the next one."""
    holds: Callable[[], bool]
    """Whether the file at `path` is this one already."""
    check_end: Callable[[], None] = lambda: None
    """Raises FormatError when what was written cannot be relied on."""

    def is_there(self, force: bool) -> bool:
        """Whether it need not be written; ConfigError where something else is, without `force`."""
        if force or not self.path.exists():
            return False
        if not self.holds():
            raise ConfigError(
                f"{self.path}: exists and holds something else; give another name, or --force to "
                "replace it"
            )
        remove_stale(journal_path(self.path), partial_path(self.path))
        return True


def write_output(output: OutputFile, force: bool, progress: Progress) -> Written:
    """Write the file, or go on with it; one of its name is only replaced with `force`."""
    if output.is_there(force):
        return Written(output.num_bytes, was_there=True)
    with output.open_writer() as writer:
        if output.path.exists() and not force:  # made by another process while this one waited
            writer.give_up()
            output.is_there(force)
            return Written(output.num_bytes, was_there=True)
        writer.resume(progress)
        resumed, total = writer.num_bytes, writer.end - writer.start
        for piece in output.pieces(writer.num_pieces):
            writer.write_piece(piece.data, piece.errors)
            progress(writer.num_bytes, total)
        try:
            output.check_end()
        except FormatError:
            writer.give_up()
            raise
        writer.finish()
    return Written(resumed, was_there=False)
