"""Random but sane ggml blocks of any supported type, for types that `gguf` cannot quantise too."""

import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import quantize
from numpy.typing import NDArray

from polyneuron.io.ggml_types import GGML_TYPES

# Where the fp16 scales of a K-quant block lie: (offset, count).
_HALF_FIELDS = {"Q2_K": (80, 2), "Q3_K": (108, 1), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208, 1)}
_SUPER_SCALE = {"Q2_K": 64.0, "Q3_K": 128.0, "Q4_K": 512.0, "Q5_K": 1024.0, "Q6_K": 2048.0}
K_QUANTS = tuple(_HALF_FIELDS)


def random_blocks(
    type_name: str, num_rows: int, num_cols: int, rng: np.random.Generator, size: float = 1.0
) -> NDArray[np.uint8]:
    """K-quant bytes (num_rows, row bytes) with random quants and weights of about `size`."""
    kind = next(kind for kind in GGML_TYPES.values() if kind.name == type_name)
    num_blocks = num_cols // kind.block_values
    blocks = rng.integers(0, 256, (num_rows, num_blocks, kind.block_bytes), dtype=np.uint8)
    offset, count = _HALF_FIELDS[type_name]
    scale = size / _SUPER_SCALE[type_name]
    halves = (rng.uniform(0.5, 1.5, (num_rows, num_blocks, count)) * scale).astype("<f2")
    blocks[..., offset : offset + 2 * count] = halves.view(np.uint8)
    return blocks.reshape(num_rows, num_blocks * kind.block_bytes)


def encode(type_name: str, weights: NDArray[np.float32]) -> NDArray[np.generic]:
    """`weights` in a ggml type as the `gguf` writer takes them; K-quants are random instead."""
    if type_name in K_QUANTS:
        num_rows, num_cols = weights.shape
        seed = int(np.abs(weights).sum() * 1e6) & 0xFFFFFFFF  # deterministic, differs by tensor
        size = float(np.abs(weights).mean())
        return random_blocks(type_name, num_rows, num_cols, np.random.default_rng(seed), size)
    encoded: NDArray[np.generic] = quantize(weights, GGMLQuantizationType[type_name])
    return encoded
