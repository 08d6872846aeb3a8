"""A GGUF given as a model is converted once and then found again.

An entry is named after the source's content key and the time of its last change. The key looks at
the header and at samples of every tensor, which tells models, quantisations and fine-tunes apart;
an edit in place of a few weights would escape it, but not the time. A copy with a new time is
converted once more: that costs minutes, a stale entry would cost wrong answers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from polyneuron.config import cache_folder
from polyneuron.errors import ConfigError, FormatError
from polyneuron.io.content_key import content_key
from polyneuron.io.file_kind import is_ncf
from polyneuron.io.gguf_file import GgufHeader
from polyneuron.io.ncf_format import VERSION, Layout
from polyneuron.io.ncf_pieces import RECIPE
from polyneuron.io.ncf_reader import read_ncf
from polyneuron.io.output_file import Progress
from polyneuron.model.convert import convert, open_source

KEY_DIGITS = 16


def entry_path(header: GgufHeader, folder: Path, layout: Layout) -> Path:
    """Where the conversion of a GGUF is kept."""
    changed = " ".join(str(changed_ns) for _, changed_ns in header.files.stamp())
    text = f"{content_key(header)} {changed} {VERSION} {RECIPE} {layout}"
    digits = hashlib.sha256(text.encode()).hexdigest()[:KEY_DIGITS]
    stem = header.path.stem if header.path.suffix == ".gguf" else header.path.name
    return folder / f"{stem}-{digits}.ncf"


def cached_ncf(
    path: Path,
    progress: Progress = lambda done, total: None,
    on_wait: Callable[[], None] = lambda: None,
    folder: Path | None = None,
    layout: Layout = Layout.TILES,
) -> Path:
    """The neuron-cluster file of a model: `path` itself, or the entry, converted where missing.

    Two processes that start at once convert once: the second waits, having called `on_wait`.
    """
    if is_ncf(path):
        return path
    header = open_source(path)
    folder = cache_folder() if folder is None else folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{folder}: {error.strerror}; set XDG_CACHE_HOME to a folder that can be written"
        ) from None
    entry = entry_path(header, folder, layout)
    if not entry.exists() or _is_damaged(entry):
        convert(
            path,
            entry,
            layout=layout,
            force=entry.exists(),
            progress=progress,
            on_wait=on_wait,
        )
    return entry


def converted(path: Path, layout: Layout) -> Path | None:
    """The entry of a GGUF that has been converted to `layout` before; None of another one."""
    entry = entry_path(open_source(path), cache_folder(), layout)
    return entry if entry.exists() and not _is_damaged(entry) else None


def _is_damaged(entry: Path) -> bool:
    try:
        read_ncf(entry)
    except FormatError:
        return True
    return False
