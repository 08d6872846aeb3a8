"""From a model's path to its header, whatever keeps it: a GGUF, all parts of one, a folder."""

from __future__ import annotations

from pathlib import Path

from polyneuron.io.file_kind import GGUF_MAGIC, PWRI_MAGIC
from polyneuron.io.gguf_file import GgufHeader
from polyneuron.io.gguf_split import gguf_of_folder, read_gguf
from polyneuron.model.fused import split_fused
from polyneuron.model.hf_folder import is_hf_folder, read_hf_folder
from polyneuron.model.powerinfer import without_predictors


def read_model_header(path: Path) -> GgufHeader:
    """The header of a model that is no neuron-cluster file; nothing but headers is read.

    Fused tensors are seen as their parts.
    Raises FormatError, in one line that names the file and the cure, when it is none.
    """
    if path.is_dir() and is_hf_folder(path):
        return split_fused(read_hf_folder(path))
    file = gguf_of_folder(path) if path.is_dir() else path
    return split_fused(without_predictors(read_gguf(file, (GGUF_MAGIC, PWRI_MAGIC))))
