"""From a model's path to its header, whatever keeps it: a GGUF, all parts of one, a folder."""

from __future__ import annotations

from pathlib import Path

from polyneuron.io.gguf_file import GgufHeader
from polyneuron.io.gguf_split import gguf_of_folder, read_gguf
from polyneuron.model.fused import split_fused
from polyneuron.model.hf_folder import is_hf_folder, read_hf_folder


def read_model_header(path: Path) -> GgufHeader:
    """The header of a model that is no neuron-cluster file; nothing but headers is read.

    Fused tensors are seen as their parts.
    Raises FormatError, in one line that names the file and the cure, when it is none.
    """
    if not path.is_dir():
        return split_fused(read_gguf(path))
    is_checkpoint = is_hf_folder(path)
    return split_fused(read_hf_folder(path) if is_checkpoint else read_gguf(gguf_of_folder(path)))
