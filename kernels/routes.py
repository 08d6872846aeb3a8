"""Which experts the tokens of a step chose in the running layer (`struct routes`)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from polyneuron.kernels.arena import Arena

HEAD_WORDS = 4
Words = NDArray[np.uint32]


@dataclass(frozen=True, slots=True, eq=False)
class Routes:
    """Entries, each a token with one of its experts: in the order of experts, of one in that of
    tokens."""

    starts: Words
    """(num_experts + 1): the first entry of each expert."""
    tokens: Words
    """(entries)"""

    @property
    def chosen(self) -> NDArray[np.bool_]:
        """(num_experts): whether some token chose it."""
        return np.diff(self.starts.astype(np.int64)) > 0

    def entries(self, expert: int) -> slice:
        """Those of one expert."""
        return slice(int(self.starts[expert]), int(self.starts[expert + 1]))


def read_routes(arena: Arena, offset: int) -> Routes:
    """Of the layer whose router has computed last."""
    num_experts, num_used, _, most = arena.view(offset, (HEAD_WORDS,), np.uint32)
    starts_at = offset + 4 * HEAD_WORDS
    starts = arena.view(starts_at, (int(num_experts) + 1,), np.uint32).copy()
    tokens_at = starts_at + 4 * (2 * int(num_experts) + 1 + int(most))
    tokens = arena.view(tokens_at, (int(starts[-1]),), np.uint32).copy()
    assert num_used and len(tokens) % num_used == 0
    return Routes(starts, tokens)
