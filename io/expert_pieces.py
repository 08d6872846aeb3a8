"""Which bytes of a piece of a layer are those of experts that some token chose."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from polyneuron.io.block_device import ByteRange


@dataclass(frozen=True, slots=True)
class ExpertPieces:
    """How the loads of a pass are made up: every layer of as many pieces, experts in order."""

    per_layer: int
    piece_bytes: int
    """Of all pieces of a layer but the last one, which may be shorter."""
    expert_bytes: int

    def chosen_ranges(
        self, load: int, num_bytes: int, chosen: NDArray[np.bool_]
    ) -> Iterator[ByteRange]:
        """Runs of chosen experts in a load's `num_bytes`, from the load's start.

        `chosen` (num_experts): whether some token chose it.
        """
        start = load % self.per_layer * self.piece_bytes
        end = min(start + num_bytes, len(chosen) * self.expert_bytes)
        first, last = start // self.expert_bytes, -(-end // self.expert_bytes)
        padded = np.concatenate([[False], chosen[first:last], [False]])
        edges = np.flatnonzero(padded[1:] != padded[:-1]).reshape(-1, 2) + first
        for begin, stop in edges * self.expert_bytes:
            low, high = max(int(begin), start), min(int(stop), end)
            yield ByteRange(low - start, high - low)
