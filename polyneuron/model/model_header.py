"""From a model's path to its header, whatever keeps it: a GGUF, all parts of one, a folder."""

from __future__ import annotations

from pathlib import Path

from polyneuron.io.gguf_file import GgufHeader
from polyneuron.io.gguf_split import gguf_of_folder, read_gguf


def read_model_header(path: Path) -> GgufHeader:
    """The header of a model that is no neuron-cluster file; nothing but headers is read.

    Raises FormatError, in one line that names the file and the cure, when it is none.
    """
    if path.is_dir():
        return read_gguf(gguf_of_folder(path))
    return read_gguf(path)
