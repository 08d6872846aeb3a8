"""The numpy forward pass as the kernels compute it: activations in 8 bits, a float16 cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from tests.support.reference_model import ReferenceModel

Floats = NDArray[Any]
BLOCK = 32


def quantised(x: Floats) -> Floats:
    """Rows of x (n, cols) rounded to blocks of 32 signed bytes with one scale."""
    blocks = x.reshape(len(x), -1, BLOCK)
    scale = np.abs(blocks).max(axis=-1, keepdims=True) / 127
    safe = np.where(scale == 0, 1, scale)
    rounded: Floats = (np.rint(blocks / safe) * scale).reshape(x.shape)
    return rounded


def half(values: Floats) -> Floats:
    """Values as a float16 cache holds them."""
    return values.astype(np.float16).astype(values.dtype)


class QuantisedMatrix:
    """A weight whose products take activations in 8 bits."""

    __array_ufunc__ = None  # so that `x @ this` asks this

    def __init__(self, values: Floats) -> None:
        self._values = values

    @property
    def T(self) -> QuantisedMatrix:
        """Stands for the transpose, as `x @ weight.T` asks for it."""
        return self

    def __rmatmul__(self, x: Floats) -> Floats:
        product: Floats = quantised(x) @ self._values.T
        return product

    def __getitem__(self, index: Any) -> Floats:
        rows: Floats = self._values[index]
        return rows


class HalfCacheReference(ReferenceModel):
    """Keys and values rounded to float16, all else as it was."""

    def _project(self, x: Floats, weight: str, bias: str | None) -> Floats:
        out = super()._project(x, weight, bias)
        return half(out) if "attn_v" in weight else out

    def _rotate(self, x: Floats, cos: Floats, sin: Floats) -> Floats:
        out = super()._rotate(x, cos, sin)
        assert self.spec.num_kv_heads != self.spec.num_heads
        return half(out) if x.shape[1] == self.spec.num_kv_heads else out


class QuantisedReference(HalfCacheReference):
    """Every matrix of the GGUF is taken to be stored in a quantised type."""

    def __init__(self, path: Path | str) -> None:
        super().__init__(path, np.float64)
        for name, values in self.weights.items():
            if values.ndim == 2:
                self.weights[name] = cast(Floats, QuantisedMatrix(values))
