"""What a model is, as data: hyper-parameters and the names of its tensors."""

from dataclasses import dataclass
from enum import Enum

from polyneuron.kernels.gemv import FeedForwardKind, RopeLayout
from polyneuron.model.block import LLAMA, BlockSpec, NormKind, Residual


class RopeScaling(Enum):
    """How the rotation frequencies were stretched for a longer context."""

    NONE = "none"
    LINEAR = "linear"
    LLAMA3 = "llama3"
    YARN = "yarn"
    LONGROPE = "longrope"


@dataclass(frozen=True, slots=True)
class YarnSpec:
    """YaRN's parameters beside the factor."""

    original_context: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0


@dataclass(frozen=True, slots=True)
class LongRopeSpec:
    """LongRoPE's parameters: a context chooses its divisors once, by its length."""

    original_context: int
    """Positions up to which `short_factors` count."""
    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    """rotary_dim / 2 divisors of the frequencies each."""
    magnitude: float = 1.0
    """Factor of cosines and sines."""


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """The rotary embedding of a model."""

    layout: RopeLayout
    rotary_dim: int
    base: float
    scaling: RopeScaling = RopeScaling.NONE
    factor: float = 1.0
    """Of linear and yarn scaling."""
    frequency_factors: tuple[float, ...] = ()
    """Of llama3 scaling: rotary_dim / 2 divisors of the frequencies."""
    yarn: YarnSpec | None = None
    long: LongRopeSpec | None = None


@dataclass(frozen=True, slots=True)
class ExpertSpec:
    """A mixture of experts in every layer (PAPER §1.9); `ModelSpec.d_ff` is the width of one."""

    num_experts: int
    num_used: int
    """Experts of a token."""
    is_normalised: bool
    """Whether the weights of a token's experts add up to 1; else they are shares of all."""
    shared_d_ff: int = 0
    """Width of an expert that every token has, behind a sigmoid gate; 0: there is none."""
    is_sigmoid: bool = False
    """Weights are sigmoids of the chosen experts' logits, which then add up to 1."""
    is_early: bool = False
    """The router reads the layer's input as it is, so experts are known before attention."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One decoder-only transformer: Llama's, with the departures that `block` names."""

    family: str
    name: str
    num_layers: int
    d_model: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    d_ff: int
    vocab_size: int
    context_length: int
    norm_eps: float
    rope: RopeSpec
    feed_forward: FeedForwardKind
    qk_norm: bool
    qkv_bias: bool
    output_bias: bool
    tied_head: bool
    experts: ExpertSpec | None = None
    is_qk_norm_wide: bool = False
    """With `qk_norm`: one norm over all heads of a token, not one a head."""
    block: BlockSpec = LLAMA

    @property
    def num_neurons(self) -> int:
        """Neurons of a layer that are read by need: those of all experts that are not shared."""
        return self.d_ff * (self.experts.num_experts if self.experts else 1)

    @property
    def has_gate(self) -> bool:
        """Whether a feed-forward block has a gate matrix."""
        return self.feed_forward.has_gate

    @property
    def attention_scale(self) -> float:
        """What attention scores are multiplied by."""
        return self.block.attention_scale or float(self.head_dim**-0.5)

    @property
    def local_rope(self) -> RopeSpec | None:
        """The rotary embedding of local layers where it is another one."""
        base = self.block.local_rope_base
        return RopeSpec(self.rope.layout, self.rope.rotary_dim, base) if base else None

    @property
    def q_dim(self) -> int:
        """Rows of the query matrix."""
        return self.num_heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        """Rows of the key matrix, and of the value matrix."""
        return self.num_kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class LayerTensors:
    """GGUF tensor names of one layer by role; None where the family has no such tensor."""

    attn_norm: str
    attn_q: str
    attn_k: str
    attn_v: str
    attn_output: str
    ffn_norm: str | None
    """None: feed forward reads attention's norm."""
    ffn_up: str
    ffn_down: str
    ffn_gate: str | None
    attn_q_bias: str | None
    attn_k_bias: str | None
    attn_v_bias: str | None
    attn_output_bias: str | None
    attn_q_norm: str | None
    attn_k_norm: str | None
    router: str | None = None
    shared_gate: str | None = None
    """A vector: how much of the shared expert a token gets."""
    shared_ffn_gate: str | None = None
    shared_ffn_up: str | None = None
    shared_ffn_down: str | None = None
    attn_norm_bias: str | None = None
    ffn_norm_bias: str | None = None
    post_attn_norm: str | None = None
    post_ffn_norm: str | None = None
    ffn_gate_bias: str | None = None
    ffn_up_bias: str | None = None
    ffn_down_bias: str | None = None


@dataclass(frozen=True, slots=True)
class TensorMap:
    """GGUF tensor names of a model by role; a tied head names the embedding again."""

    token_embd: str
    output_norm: str
    output: str
    layers: tuple[LayerTensors, ...]
    output_norm_bias: str | None = None
    positions: str | None = None
    """Learned positions."""


def tensor_map(spec: ModelSpec) -> TensorMap:
    """The tensor each role of `spec` is read from."""
    return TensorMap(
        token_embd="token_embd.weight",
        output_norm="output_norm.weight",
        output="token_embd.weight" if spec.tied_head else "output.weight",
        layers=tuple(_layer_tensors(spec, layer_id) for layer_id in range(spec.num_layers)),
        output_norm_bias="output_norm.bias" if spec.block.norm is NormKind.LAYER else None,
        positions="position_embd.weight" if spec.block.learned_positions else None,
    )


def _layer_tensors(spec: ModelSpec, layer_id: int) -> LayerTensors:
    def name(role: str, present: bool = True) -> str | None:
        return f"blk.{layer_id}.{role}" if present else None

    prefix = f"blk.{layer_id}."
    exps = "_exps" if spec.experts else ""
    has_shared = bool(spec.experts and spec.experts.shared_d_ff)
    block, bias = spec.block, spec.block.ffn_bias
    is_layer_norm = block.norm is NormKind.LAYER
    # Where both halves have norms of the layer's input, files call that of feed forward attn_norm.
    attn_norm, ffn_norm = {
        Residual.SEQUENTIAL: ("attn_norm", "ffn_norm"),
        Residual.PARALLEL: ("attn_norm", None),
        Residual.PARALLEL_NORMS: ("attn_norm_2", "attn_norm"),
    }[block.residual]
    return LayerTensors(
        attn_norm=f"{prefix}{attn_norm}.weight",
        attn_q=prefix + "attn_q.weight",
        attn_k=prefix + "attn_k.weight",
        attn_v=prefix + "attn_v.weight",
        attn_output=prefix + "attn_output.weight",
        ffn_norm=name(f"{ffn_norm}.weight", ffn_norm is not None),
        ffn_up=f"{prefix}ffn_up{exps}.weight",
        ffn_down=f"{prefix}ffn_down{exps}.weight",
        ffn_gate=name(f"ffn_gate{exps}.weight", spec.has_gate),
        attn_q_bias=name("attn_q.bias", spec.qkv_bias),
        attn_k_bias=name("attn_k.bias", spec.qkv_bias),
        attn_v_bias=name("attn_v.bias", spec.qkv_bias),
        attn_output_bias=name("attn_output.bias", spec.output_bias),
        attn_q_norm=name("attn_q_norm.weight", spec.qk_norm),
        attn_k_norm=name("attn_k_norm.weight", spec.qk_norm),
        router=name("ffn_gate_inp.weight", spec.experts is not None),
        shared_gate=name("ffn_gate_inp_shexp.weight", has_shared),
        shared_ffn_gate=name("ffn_gate_shexp.weight", has_shared and spec.has_gate),
        shared_ffn_up=name("ffn_up_shexp.weight", has_shared),
        shared_ffn_down=name("ffn_down_shexp.weight", has_shared),
        attn_norm_bias=name(f"{attn_norm}.bias", is_layer_norm),
        ffn_norm_bias=name(f"{ffn_norm}.bias", is_layer_norm and ffn_norm is not None),
        post_attn_norm=name("post_attention_norm.weight", block.has_post_norms),
        post_ffn_norm=name("post_ffw_norm.weight", block.has_post_norms),
        ffn_gate_bias=name("ffn_gate.bias", bias and spec.has_gate),
        ffn_up_bias=name("ffn_up.bias", bias),
        ffn_down_bias=name("ffn_down.bias", bias),
    )


def tensor_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Every tensor of the model with its row-major shape, in the order of a forward pass."""
    names = tensor_map(spec)
    shapes: dict[str, tuple[int, ...]] = {names.token_embd: (spec.vocab_size, spec.d_model)}
    if names.positions is not None:
        shapes[names.positions] = (spec.block.learned_positions, spec.d_model)
    experts = (spec.experts.num_experts,) if spec.experts else ()
    shared = spec.experts.shared_d_ff if spec.experts else 0
    wide = spec.is_qk_norm_wide
    for layer in names.layers:
        roles: tuple[tuple[str | None, tuple[int, ...]], ...] = (
            (layer.attn_norm, (spec.d_model,)),
            (layer.attn_norm_bias, (spec.d_model,)),
            (layer.attn_q, (spec.q_dim, spec.d_model)),
            (layer.attn_k, (spec.kv_dim, spec.d_model)),
            (layer.attn_v, (spec.kv_dim, spec.d_model)),
            (layer.attn_q_bias, (spec.q_dim,)),
            (layer.attn_k_bias, (spec.kv_dim,)),
            (layer.attn_v_bias, (spec.kv_dim,)),
            (layer.attn_q_norm, (spec.q_dim if wide else spec.head_dim,)),
            (layer.attn_k_norm, (spec.kv_dim if wide else spec.head_dim,)),
            (layer.attn_output, (spec.d_model, spec.q_dim)),
            (layer.attn_output_bias, (spec.d_model,)),
            (layer.post_attn_norm, (spec.d_model,)),
            (layer.ffn_norm, (spec.d_model,)),
            (layer.ffn_norm_bias, (spec.d_model,)),
            (layer.router, (*experts, spec.d_model)),
            (layer.ffn_gate, (*experts, spec.d_ff, spec.d_model)),
            (layer.ffn_up, (*experts, spec.d_ff, spec.d_model)),
            (layer.ffn_down, (*experts, spec.d_model, spec.d_ff)),
            (layer.ffn_gate_bias, (spec.d_ff,)),
            (layer.ffn_up_bias, (spec.d_ff,)),
            (layer.ffn_down_bias, (spec.d_model,)),
            (layer.post_ffn_norm, (spec.d_model,)),
            (layer.shared_gate, (spec.d_model,)),
            (layer.shared_ffn_gate, (shared, spec.d_model)),
            (layer.shared_ffn_up, (shared, spec.d_model)),
            (layer.shared_ffn_down, (spec.d_model, shared)),
        )
        shapes.update((name, shape) for name, shape in roles if name is not None)
    shapes[names.output_norm] = (spec.d_model,)
    if names.output_norm_bias is not None:
        shapes[names.output_norm_bias] = (spec.d_model,)
    shapes[names.output] = (spec.vocab_size, spec.d_model)
    return shapes
