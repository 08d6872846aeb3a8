"""How likely a text's tokens are by hidden states that have passed all layers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from polyneuron.io.file_device import open_device
from polyneuron.io.ncf_format import EXTENT_BYTES, NcfTensor
from polyneuron.io.ncf_reader import NcfFile
from polyneuron.io.section_range import SectionRange
from polyneuron.kernels.gemv import rmsnorm
from polyneuron.model.spec import ModelSpec
from polyneuron.profiling.layer_weights import TiledMatrix

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]

ROWS_AT_ONCE = 64
"""Of logits: a large vocabulary's are 10 MB."""


class NextToken:
    """A model's last norm and head, in memory."""

    def __init__(self, ncf: NcfFile, spec: ModelSpec) -> None:
        self._eps = spec.norm_eps
        head = ncf.tensor("token_embd.weight" if spec.tied_head else "output.weight")
        assert head.storage is not None
        self._head = TiledMatrix(head.storage, _bytes_of(ncf, head), head.rows, head.cols)
        self._norm = _bytes_of(ncf, ncf.tensor("output_norm.weight")).view(np.float32)

    def log_probs(self, stream: F32, tokens: Sequence[int]) -> F64:
        """ln P of each token but the first, given those before it; `stream` (tokens, d_model)."""
        normed = np.stack([rmsnorm(row, self._norm, self._eps) for row in stream[:-1]])
        following = np.asarray(tokens[1:])
        found = []
        for first in range(0, len(normed), ROWS_AT_ONCE):
            logits = self._head.product(normed[first : first + ROWS_AT_ONCE]).astype(np.float64)
            logits -= logits.max(axis=1, keepdims=True)
            named = following[first : first + ROWS_AT_ONCE]
            chosen = logits[np.arange(len(named)), named]
            found.append(chosen - np.log(np.exp(logits).sum(axis=1)))
        return np.concatenate(found)


def _bytes_of(ncf: NcfFile, tensor: NcfTensor) -> NDArray[np.uint8]:
    out = np.empty(tensor.num_bytes, np.uint8)
    with open_device(ncf.path, EXTENT_BYTES) as device:
        section = ncf.sections[tensor.section_index]
        SectionRange(ncf, device, section).read_into(tensor.offset, out)
    return out
