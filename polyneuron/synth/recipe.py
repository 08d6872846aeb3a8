"""What a random matrix is made of, apart from chance."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class Recipe:
    """Size of a matrix's random values, and what is planted in it."""

    std: float
    first_block: NDArray[np.float32] | None
    """(rows): the value of columns 0 to 31 in each row; None: random as the others are."""
    block_sizes: NDArray[np.float32] | None = None
    """(cols / 32): by what the values of each 32 columns are larger than std; None: by nothing."""
    row_sizes: NDArray[np.float32] | None = None
    """(rows): the same of each row."""
    is_by_neuron: bool = False
    """Made with a row for each neuron: the transpose of what a GGUF holds."""


def stream_key(seed: int, name: str) -> int:
    """Names the stream of random words that one thing is made of."""
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:8], "little")
