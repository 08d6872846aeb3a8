"""Model families as data: one row for each `general.architecture`."""

from dataclasses import dataclass, replace
from enum import Enum

from polyneuron.kernels.gemv import FeedForwardKind, RopeLayout
from polyneuron.model.block import LLAMA, BlockSpec, NormKind, Residual


class Presence(Enum):
    """Whether a family's files hold a tensor."""

    ABSENT = "absent"
    OPTIONAL = "optional"
    REQUIRED = "required"


@dataclass(frozen=True, slots=True)
class Family:
    """What every model of one `general.architecture` has in common."""

    name: str
    rope_layout: RopeLayout = RopeLayout.INTERLEAVED
    feed_forward: FeedForwardKind = FeedForwardKind.SILU
    qkv_bias: Presence = Presence.OPTIONAL
    qk_norm: bool = False
    is_qk_norm_wide: bool = False
    experts: Presence = Presence.ABSENT
    is_normalised: bool = True
    """Whether the weights of a token's experts add up to 1, unless the file says otherwise."""
    is_router_early: bool = False
    """Whether a layer's experts are chosen by its input, before attention."""
    block: BlockSpec = LLAMA
    """What all its models have; what a file says is set in it."""
    window: Presence = Presence.ABSENT
    """Of the size of a window in local layers; OPTIONAL: `block` has the default."""
    parallel: Presence = Presence.ABSENT
    """Of layers whose halves read one input; OPTIONAL: they do where feed forward has no norm."""
    norm_eps: float | None = None
    """Where no key says it; None: one must."""
    has_rope: bool = True
    """Without it learned positions are added to embeddings."""
    is_capped: bool = False
    """Whether files may say that attention scores or logits are capped."""
    is_embedding_scaled: bool = False
    """Embeddings are multiplied by the root of their size."""
    narrow_heads_at: int = 0
    """The number of layers at which scores are scaled as if heads were d_model / heads wide."""


_GEMMA2 = BlockSpec(has_post_norms=True, window=4096, window_period=2)
_GEMMA3 = BlockSpec(has_post_norms=True, window_period=6, local_rope_base=10000.0)

FAMILIES = {
    family.name: family
    for family in (
        Family("llama", experts=Presence.OPTIONAL),  # Mixtral's too
        Family("mistral", window=Presence.OPTIONAL),
        Family("qwen2", RopeLayout.HALVES, qkv_bias=Presence.REQUIRED),
        Family("qwen3", RopeLayout.HALVES, qkv_bias=Presence.ABSENT, qk_norm=True),
        Family(
            "qwen2moe",
            RopeLayout.HALVES,
            qkv_bias=Presence.REQUIRED,
            experts=Presence.REQUIRED,
            is_normalised=False,
        ),
        Family(
            "qwen3moe",
            RopeLayout.HALVES,
            qkv_bias=Presence.ABSENT,
            qk_norm=True,
            experts=Presence.REQUIRED,
        ),
        Family(
            "olmoe",
            RopeLayout.HALVES,
            qkv_bias=Presence.ABSENT,
            qk_norm=True,
            is_qk_norm_wide=True,
            experts=Presence.REQUIRED,
            is_normalised=False,
        ),
        Family(
            "turbosparsemixtral",
            feed_forward=FeedForwardKind.DRELU,
            qkv_bias=Presence.ABSENT,
            experts=Presence.REQUIRED,
        ),
        Family(
            "smallthinker",
            RopeLayout.HALVES,
            FeedForwardKind.REGLU,
            qkv_bias=Presence.ABSENT,
            experts=Presence.REQUIRED,
            is_router_early=True,
            block=BlockSpec(window_period=4, is_first_global=True, is_global_unrotated=True),
            window=Presence.OPTIONAL,
        ),
        Family(
            "gemma",
            RopeLayout.HALVES,
            FeedForwardKind.GEGLU,
            qkv_bias=Presence.ABSENT,
            is_embedding_scaled=True,
        ),
        Family(
            "gemma2",
            RopeLayout.HALVES,
            FeedForwardKind.GEGLU,
            qkv_bias=Presence.ABSENT,
            block=replace(_GEMMA2, attention_cap=50.0, logit_cap=30.0),
            window=Presence.OPTIONAL,
            is_capped=True,
            is_embedding_scaled=True,
            narrow_heads_at=46,  # 27B
        ),
        Family(
            "gemma3",
            RopeLayout.HALVES,
            FeedForwardKind.GEGLU,
            qkv_bias=Presence.ABSENT,
            qk_norm=True,
            block=_GEMMA3,
            window=Presence.OPTIONAL,
            is_capped=True,
            is_embedding_scaled=True,
            narrow_heads_at=62,  # 27B
        ),
        Family("phi3", RopeLayout.HALVES, qkv_bias=Presence.ABSENT, window=Presence.OPTIONAL),
        Family(
            "stablelm",
            RopeLayout.HALVES,
            block=BlockSpec(norm=NormKind.LAYER),
            parallel=Presence.OPTIONAL,
        ),
        Family(
            "falcon",
            RopeLayout.HALVES,
            FeedForwardKind.GELU,
            qkv_bias=Presence.ABSENT,
            block=BlockSpec(norm=NormKind.LAYER, residual=Residual.PARALLEL),
            parallel=Presence.REQUIRED,
        ),
        Family(
            "opt",
            RopeLayout.HALVES,
            FeedForwardKind.RELU,
            qkv_bias=Presence.REQUIRED,
            block=BlockSpec(norm=NormKind.LAYER, ffn_bias=True, position_offset=2),
            norm_eps=1e-5,
            has_rope=False,
        ),
        Family("bamboo", feed_forward=FeedForwardKind.DRELU, qkv_bias=Presence.ABSENT),
    )
}
SUPPORTED_FAMILIES = " ".join(FAMILIES)
