"""What a GGUF says of its mixture of experts."""

from polyneuron.kernels.arena import MAX_EXPERTS
from polyneuron.kernels.quant import TILE_ROWS
from polyneuron.model.metadata import ModelKeys
from polyneuron.model.spec import ExpertSpec

SHARED_GATE = "blk.0.ffn_gate_inp_shexp.weight"
GATING = "expert_gating_func"


SOFTMAX, SIGMOID = 1, 2
"""Values of expert_gating_func; without one it is a softmax."""


def read_experts(keys: ModelKeys, is_normalised: bool, is_early: bool = False) -> ExpertSpec:
    """The mixture of a model; `is_normalised`: what the family does unless the file tells.

    Routers that stand before attention may be sigmoids, if the file says so.
    """
    num_experts, num_used = keys.count("expert_count"), keys.count("expert_used_count")
    if not 2 <= num_experts <= MAX_EXPERTS:
        keys.unsupported(f"{num_experts} experts a layer; 2 to {MAX_EXPERTS} are supported")
    if num_used > num_experts:
        keys.fail(f"a token uses {num_used} experts of {num_experts}")
    has_shared = SHARED_GATE in keys.header.by_name
    shared = keys.count("expert_shared_feed_forward_length") if has_shared else 0
    told = keys.get("expert_weights_norm")
    normalised = told if isinstance(told, bool) else is_normalised
    is_sigmoid = is_early and keys.get(GATING) == SIGMOID
    if not is_sigmoid:
        keys.refuse_unless(GATING, 0, SOFTMAX)
    return ExpertSpec(num_experts, num_used, normalised, shared, is_sigmoid, is_early)


def expert_width(keys: ModelKeys) -> int:
    """Neurons of one expert: whole tiles, so that experts lie apart from each other."""
    named = "expert_feed_forward_length"
    width = keys.count(named if keys.get(named) is not None else "feed_forward_length")
    if width % TILE_ROWS:
        keys.unsupported(
            f"experts of {width} neurons; only widths that are multiples of {TILE_ROWS} are "
            "supported"
        )
    return width
