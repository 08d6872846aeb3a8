"""Small files that are there as a whole or not at all."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from polyneuron.errors import DeviceError
from polyneuron.io.piece_writer import sync_folder


def write_whole(path: Path, data: bytes) -> None:
    """Give a file new contents; whoever opens it finds the old or the new ones.

    Raises DeviceError naming the file, and leaves nothing, when that fails.
    """
    fresh = path.with_name(f".{path.name[:64]}.{os.getpid()}.new")
    try:
        with fresh.open("wb") as file:
            file.write(data)
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
