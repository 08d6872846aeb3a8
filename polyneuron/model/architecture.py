"""The check of a GGUF against its family, and what model it holds."""

from polyneuron.errors import FormatError, UnsupportedError
from polyneuron.io.gguf_file import GgufHeader
from polyneuron.io.gguf_values import quoted, some_of
from polyneuron.kernels.gemv import FeedForwardKind
from polyneuron.model.block import NormKind
from polyneuron.model.block_keys import read_block
from polyneuron.model.experts import expert_width, read_experts
from polyneuron.model.families import FAMILIES, SUPPORTED_FAMILIES, Family, Presence
from polyneuron.model.fused import split_fused
from polyneuron.model.metadata import ModelKeys
from polyneuron.model.refusals import refuse_kind, refuse_pooling
from polyneuron.model.rope import ROPE_TENSORS, read_rope
from polyneuron.model.spec import ExpertSpec, ModelSpec, RopeSpec, tensor_shapes

__all__ = ["ACTIVATIONS", "FAMILIES", "SUPPORTED_FAMILIES", "Family", "Presence", "describe"]

MAX_NAMED = 5

# Converters name no activation: a file that departs from its family's says so by this key, or, as
# PowerInfer's own converter does for ReLU models, by a sparsity threshold.
ACTIVATION_KEY = "feed_forward_activation"
SPARSE_THRESHOLD = "powerinfer.sparse_threshold"
RELUFIED = ("llama", "falcon")
ACTIVATIONS = {
    ("silu", True): FeedForwardKind.SILU,
    ("relu", True): FeedForwardKind.REGLU,
    ("reglu", True): FeedForwardKind.REGLU,
    ("drelu", True): FeedForwardKind.DRELU,
    ("geglu", True): FeedForwardKind.GEGLU,
    ("relu", False): FeedForwardKind.RELU,
    ("gelu", False): FeedForwardKind.GELU,
}

# Keys that would change the arithmetic of a supported family, with their neutral values.
NEUTRAL_KEYS: tuple[tuple[str, tuple[object, ...]], ...] = (
    ("leading_dense_block_count", (0,)),
    ("expert_group_count", (0, 1)),
    ("expert_weights_scale", (0.0, 1.0)),
    ("attention.clamp_kqv", (0.0,)),
    ("attention.max_alibi_bias", (0.0,)),
    ("attention.causal", (True,)),
    ("logit_scale", (0.0, 1.0)),
    ("residual_scale", (0.0, 1.0)),
    ("embedding_scale", (0.0, 1.0)),
    ("tensor_data_layout", ("reference", "Meta AI original pth", "jploski")),
)


def describe(header: GgufHeader) -> ModelSpec:
    """The model a GGUF holds; every tensor it needs is there with the shape it must have."""
    header = split_fused(header)
    family = _family(header)
    keys = ModelKeys(header, family.name)
    for key, neutral in NEUTRAL_KEYS:
        keys.refuse_unless(key, *neutral)
    spec = _read_spec(keys, family)
    _check_tensors(header, spec)
    return spec


def _family(header: GgufHeader) -> Family:
    architecture = header.metadata.get("general.architecture")
    refuse_kind(header.path, header.metadata, SUPPORTED_FAMILIES)
    if not header.tensors and not architecture:
        raise FormatError(f"{header.path}: no general.architecture and no tensors: an empty GGUF")
    if not isinstance(architecture, str) or not architecture:
        raise FormatError(f"{header.path}: metadata key missing: general.architecture")
    if architecture not in FAMILIES:
        raise UnsupportedError(
            f"{header.path}: architecture {quoted(architecture)} is not supported; "
            f"supported: {SUPPORTED_FAMILIES}"
        )
    if not header.tensors:
        only = "a vocabulary only" if "tokenizer.ggml.tokens" in header.metadata else "no tensors"
        raise FormatError(
            f"{header.path}: holds {only}, and no model's tensors; give the model's own file"
        )
    refuse_pooling(header.path, header.metadata, architecture)
    return FAMILIES[architecture]


def _read_spec(keys: ModelKeys, family: Family) -> ModelSpec:
    header = keys.header
    num_heads, d_model = keys.count("attention.head_count"), keys.count("embedding_length")
    num_kv_heads = keys.count("attention.head_count_kv", num_heads)
    num_layers = keys.count("block_count")
    experts = _experts(keys, family)
    d_ff = expert_width(keys) if experts else keys.count("feed_forward_length")
    context_length = keys.count("context_length")
    rms = "" if family.block.norm is NormKind.LAYER else "rms_"
    norm_eps = keys.number(f"attention.layer_norm_{rms}epsilon", family.norm_eps)
    head_dim = keys.count("attention.key_length", max(d_model // num_heads, 1))
    keys.refuse_unless("attention.value_length", head_dim)
    rope = RopeSpec(family.rope_layout, 0, 10000.0)
    if family.has_rope:
        rope = read_rope(keys, family.rope_layout, head_dim)
    block = read_block(keys, family, num_layers, context_length)
    if block.learned_positions:  # PowerInfer's converter counts the rows before position 0, too
        context_length = min(context_length, block.learned_positions - block.position_offset)
    keys.raise_if_missing()
    if num_heads % num_kv_heads:
        keys.fail(f"{num_heads} attention heads cannot share {num_kv_heads} key-value heads")
    if num_layers > len(header.tensors):
        keys.fail(f"{family.name}.block_count is {num_layers} for {len(header.tensors)} tensors")
    return ModelSpec(
        family=family.name,
        name=str(header.metadata.get("general.name", header.path.stem)),
        num_layers=num_layers,
        d_model=d_model,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        d_ff=d_ff,
        vocab_size=_vocab_size(keys),
        context_length=context_length,
        norm_eps=norm_eps,
        rope=rope,
        feed_forward=_feed_forward(keys, family),
        qk_norm=family.qk_norm,
        is_qk_norm_wide=family.is_qk_norm_wide,
        experts=experts,
        qkv_bias=_has_bias(header, family.qkv_bias, "attn_q.bias"),
        output_bias=_has_bias(header, Presence.OPTIONAL, "attn_output.bias"),
        tied_head="output.weight" not in header.by_name,
        block=block,
    )


def _experts(keys: ModelKeys, family: Family) -> ExpertSpec | None:
    if family.experts is Presence.ABSENT:
        keys.refuse_unless("expert_count", 0)
    if family.experts is not Presence.REQUIRED and not keys.get("expert_count"):
        return None
    return read_experts(keys, family.is_normalised, family.is_router_early)


def _has_bias(header: GgufHeader, presence: Presence, role: str) -> bool:
    if presence is Presence.OPTIONAL:
        return f"blk.0.{role}" in header.by_name
    return presence is Presence.REQUIRED


def _feed_forward(keys: ModelKeys, family: Family) -> FeedForwardKind:
    names = keys.header.by_name
    has_gate = "blk.0.ffn_gate.weight" in names or "blk.0.ffn_gate_exps.weight" in names
    name = keys.text(ACTIVATION_KEY)
    if name is None and SPARSE_THRESHOLD in keys.header.metadata and family.name in RELUFIED:
        name = "relu"
    if name is None:
        return family.feed_forward
    found = ACTIVATIONS.get((name, has_gate))
    if found is None:
        gate = "with" if has_gate else "without"
        keys.unsupported(
            f"{family.name}.{ACTIVATION_KEY} is {quoted(name)} {gate} a gate matrix; supported: "
            "silu relu reglu drelu geglu with a gate, relu gelu without"
        )
    return found


def _vocab_size(keys: ModelKeys) -> int:
    """Rows of the embedding, which every other count of the vocabulary must agree with."""
    header = keys.header
    embedding = header.by_name.get("token_embd.weight")
    if embedding is None:
        keys.fail("tensors missing: token_embd.weight")
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    for what, count in (
        (f"{keys.architecture}.vocab_size", keys.get("vocab_size")),
        ("the number of tokenizer.ggml.tokens", len(tokens) if isinstance(tokens, list) else None),
    ):
        if count is not None and count != embedding.num_rows:
            keys.fail(f"{what} is {count}, but token_embd.weight has {embedding.num_rows} rows")
    return embedding.num_rows


def _check_tensors(header: GgufHeader, spec: ModelSpec) -> None:
    expected = tensor_shapes(spec)
    missing = [name for name in expected if name not in header.by_name]
    if missing:
        raise FormatError(f"{header.path}: tensors missing: {some_of(missing, MAX_NAMED)}")
    for name, shape in expected.items():
        found = header.by_name[name].shape
        if found != shape:
            raise FormatError(
                f"{header.path}: tensor {name} has shape {found}, but the metadata ask for {shape}"
            )
    unknown = [
        t.name for t in header.tensors if t.name not in expected and t.name not in ROPE_TENSORS
    ]
    if unknown:
        shown = some_of([quoted(name) for name in unknown], MAX_NAMED)
        raise UnsupportedError(
            f"{header.path}: tensors that a {spec.family} model does not use, so that leaving them "
            f"out could change its answers: {shown}"
        )
