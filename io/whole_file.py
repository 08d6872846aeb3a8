"""Files that are there as a whole or not at all."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, TextIO

from polyneuron.errors import DeviceError
from polyneuron.io.piece_writer import sync_folder


def write_whole(path: Path, data: bytes) -> None:
    """Give a file new contents; whoever opens it finds the old or the new ones.

    Raises DeviceError naming the file, and leaves nothing, when that fails.
    """

    def write(file: BinaryIO) -> None:
        file.write(data)

    _replace(path, write)


def write_whole_pieces(path: Path, pieces: Iterable[bytes]) -> None:
    """As `write_whole`, with contents that are made piece by piece."""

    def write(file: BinaryIO) -> None:
        file.writelines(pieces)

    _replace(path, write)


def write_whole_text(path: Path, write: Callable[[TextIO], None]) -> None:
    """As `write_whole`, with the text in UTF-8 that `write` writes piece by piece."""

    def write_encoded(file: BinaryIO) -> None:
        text = io.TextIOWrapper(file, encoding="utf-8", newline="\n")
        write(text)
        text.flush()
        text.detach()

    _replace(path, write_encoded)


def _replace(path: Path, write: Callable[[BinaryIO], None]) -> None:
    fresh = path.with_name(f".{path.name[:64]}.{os.getpid()}.new")
    try:
        with fresh.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, path)
        sync_folder(path.parent)
    except BaseException as error:  # Ctrl-C among them
        with suppress(OSError):
            fresh.unlink()
        if not isinstance(error, OSError):
            raise
        raise DeviceError(f"{path}: cannot be written: {error.strerror}") from error
