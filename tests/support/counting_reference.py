"""The numpy forward pass with the neurons counted that its feed-forward blocks activate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from polyneuron.kernels.gemv import FeedForwardKind
from tests.support.reference_model import ReferenceModel

Floats = NDArray[Any]


class CountingReference(ReferenceModel):
    """Of a dReLU model: shares of each layer's neurons over the tokens of the last pass."""

    def __init__(self, path: Path | str, dtype: DTypeLike = np.float64) -> None:
        super().__init__(path, dtype)
        assert self.spec.feed_forward is FeedForwardKind.DRELU
        self.gated_shares: list[float] = []
        """Gate above zero."""
        self.active_shares: list[float] = []
        """Gate and up above zero."""

    def logits(self, token_ids: NDArray[np.integer[Any]]) -> Floats:
        """As of `ReferenceModel`."""
        self.gated_shares, self.active_shares = [], []
        return super().logits(token_ids)

    def gate_and_up(self, layer_id: int, x: Floats) -> tuple[Floats | None, Floats]:
        """As of `ReferenceModel`; layers come in order."""
        gate, up = super().gate_and_up(layer_id, x)
        assert gate is not None and layer_id == len(self.gated_shares)
        self.gated_shares.append(float(np.mean(gate > 0)))
        self.active_shares.append(float(np.mean((gate > 0) & (up > 0))))
        return gate, up
