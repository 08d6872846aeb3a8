"""Reads the small JSON files beside a checkpoint's weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from polyneuron.errors import FormatError

MAX_BYTES = 256 << 20
"""Eight times the largest tokenizer.json seen."""


def read_json(path: Path) -> dict[str, Any]:
    """A file's object; FormatError in one line when it holds none."""
    text = read_text(path)
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        if text.startswith("version https://git-lfs"):
            raise FormatError(
                f"{path}: a Git-LFS pointer; run `git lfs pull` to fetch the file itself"
            ) from None
        found = None
    if not isinstance(found, dict):
        raise FormatError(f"{path}: no JSON object, or cut off; fetch it again")
    return found


def read_text(path: Path) -> str:
    """A file's text; FormatError in one line when it cannot be read."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise FormatError(f"{path}: larger than {MAX_BYTES >> 20} MiB; not what it should be")
        return path.read_text("utf-8")
    except UnicodeDecodeError:
        raise FormatError(f"{path}: no UTF-8 text; fetch it again") from None
    except OSError as error:
        raise FormatError(f"{path}: {error.strerror or error}; fetch it again") from None
