"""PowerInfer's own GGUFs (magic PWRI): the model in them, without what is beside it (PAPER 4.1).

Their down matrices lie turned, one neuron a row, as bundles want them; predictors are taken by
`profile --import`. That a file has this magic says that its neurons are often exactly zero.
"""

from __future__ import annotations

import re
from dataclasses import replace

from polyneuron.errors import UnsupportedError
from polyneuron.io.gguf_file import POWERINFER, GgufHeader
from polyneuron.io.gguf_tensors import GgufTensor
from polyneuron.model.architecture import SPARSE_THRESHOLD

TURNED = re.compile(r"(blk\.[0-9]+\.ffn_down)_t(\.weight|\.bias)")
PREDICTOR = re.compile(r"blk\.[0-9]+\.fc[12]\.weight")
GPU_INDEX = "generic.gpu_index"


def without_predictors(header: GgufHeader) -> GgufHeader:
    """The model in a PowerInfer file as any GGUF has it; other headers stay as they are."""
    if header.format != POWERINFER:
        return header
    if header.metadata.get("general.architecture") == GPU_INDEX:
        raise UnsupportedError(
            f"{header.path}: PowerInfer's split between GPU and CPU, not a model; give the "
            ".powerinfer.gguf beside it"
        )
    tensors = tuple(_model_tensor(t) for t in header.tensors if not PREDICTOR.fullmatch(t.name))
    return replace(
        header,
        metadata={SPARSE_THRESHOLD: 0.0, **header.metadata},
        tensors=tensors,
        by_name={tensor.name: tensor for tensor in tensors},
    )


def is_turned(header: GgufHeader) -> bool:
    """Whether down matrices lie by neuron: bundles are made of them, tiles are not."""
    return any(tensor.is_turned for tensor in header.tensors)


def _model_tensor(tensor: GgufTensor) -> GgufTensor:
    named = TURNED.fullmatch(tensor.name)
    if named is None or len(tensor.shape) > 2:
        return tensor
    if len(tensor.shape) == 1:  # down's bias, called so too
        return replace(tensor, name=named[1] + named[2])
    return replace(tensor, name=named[1] + named[2], shape=tensor.shape[::-1], is_turned=True)
