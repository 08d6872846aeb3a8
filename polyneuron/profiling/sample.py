"""What all tokens did in one layer, and the check that these are numbers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from polyneuron.errors import FormatError
from polyneuron.profiling.layer_weights import LayerWeights

F32 = NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class LayerSample:
    """What all tokens did in one layer; rows are tokens in the order of the text."""

    layer_id: int
    attention_input: F32
    """Attention's input, normed (tokens, d_model)."""
    ffn_input: F32
    """Feed forward's input, normed (tokens, d_model)."""
    gate: F32
    """The value that decides (tokens, d_ff): gate, or up where there is none."""
    hidden: F32
    """What meets the down matrix (tokens, d_ff)."""
    starts: tuple[int, ...]
    """Where sequences begin."""
    weights: LayerWeights
    """Valid until the next layer is asked for."""
    bound: float = 0.0
    """Activations of gates up to it count as zero."""

    @property
    def needed(self) -> NDArray[np.bool_]:
        """Whose value decides that more than its gate is computed (tokens, d_ff)."""
        return self.gate > 0 if self.bound == 0 else self.hidden != 0


def check_finite(path: object, layer: int, what: str, values: F32) -> None:
    """FormatError naming file, layer and token when values (tokens, n) are not all finite."""
    if not np.isfinite(values).all():
        token = int(np.flatnonzero(~np.isfinite(values).all(axis=1))[0])
        raise FormatError(
            f"{path}: layer {layer}'s {what} at token {token} are not finite numbers: its weights "
            "are damaged or overflow; nothing can be told from them, convert the source again"
        )
