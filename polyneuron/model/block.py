"""How a family's layers, embedding and head depart from Llama's, as data."""

from dataclasses import dataclass, replace
from enum import Enum


class NormKind(Enum):
    """What is done to a row before its matrices read it."""

    RMS = "rms"
    LAYER = "layer"
    """Centred, and with a bias."""


class Residual(Enum):
    """What attention and feed forward of a layer read."""

    SEQUENTIAL = "sequential"
    """Feed forward reads the stream after attention was added to it."""
    PARALLEL = "parallel"
    """Both read one norm of the layer's input."""
    PARALLEL_NORMS = "parallel_norms"
    """Both read the layer's input, each by a norm of its own."""


@dataclass(frozen=True, slots=True)
class BlockSpec:
    """Departures from a Llama layer; every default is Llama's own way."""

    norm: NormKind = NormKind.RMS
    has_post_norms: bool = False
    """Outputs of attention and of feed forward are normed before the stream gets them."""
    residual: Residual = Residual.SEQUENTIAL
    ffn_bias: bool = False
    """Whether up and down have biases, and gate where there is one."""
    window: int = 0
    """Newest positions that a local layer's attention sees; 0: all."""
    window_period: int = 0
    """Every so many layers one is global, the last of each period; 0: none is."""
    is_first_global: bool = False
    """It is the first of each period instead."""
    is_global_unrotated: bool = False
    """Queries and keys of global layers are not rotated."""
    local_rope_base: float = 0.0
    """Rotary base of local layers, which have no scaling then; 0: that of all layers."""
    attention_scale: float = 0.0
    """Of scores; 0: one over the root of the head's size."""
    attention_cap: float = 0.0
    """Scores become cap * tanh(score / cap); 0: they stay."""
    logit_cap: float = 0.0
    """The same of logits."""
    embedding_scale: float = 0.0
    """Embeddings are multiplied by it; 0: they stay."""
    learned_positions: int = 0
    """Rows of a table that is added to embeddings; 0: there is none."""
    position_offset: int = 0
    """The table's row for position 0."""

    @property
    def is_profiled(self) -> bool:
        """Whether profiles follow it: Llama's own way, but for a window that all layers have."""
        return replace(self, window=0) == LLAMA

    def is_local(self, layer_id: int) -> bool:
        """Whether a layer is one of those that window and local rope are about."""
        place = layer_id if self.is_first_global else layer_id + 1
        return not self.window_period or place % self.window_period != 0

    def is_rotated(self, layer_id: int) -> bool:
        """Whether attention of a layer sees positions by rotation."""
        return self.is_local(layer_id) or not self.is_global_unrotated

    def window_of(self, layer_id: int) -> int:
        """Newest positions that attention of a layer sees; 0: all."""
        return self.window if self.is_local(layer_id) else 0


LLAMA = BlockSpec()
