"""Compiles a model into step programs: flat lists of ops the executors walk (DESIGN §3).

A program serves any number of tokens up to the chunk; the step's parameters say how many. Prefill
and decode have one each: in prefill the dense matrices are the NPU executor's, in decode the CPU
workers do everything unless a real NPU is there.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import Any

from polyneuron.config import Phase
from polyneuron.io.ncf_format import round_up
from polyneuron.io.predictor_file import PredictorFile, PredictorInput
from polyneuron.kernels.arena import Arena, OpFlag, OpKind, Unit
from polyneuron.model.block import NormKind, Residual
from polyneuron.model.spec import ModelSpec, TensorMap, tensor_map
from polyneuron.planning.attention import kv_storage, prompt_tokens
from polyneuron.planning.expert_program import add_early_router, add_expert_feed_forward
from polyneuron.planning.layout import ArenaLayout, WeightPlace
from polyneuron.planning.predict_program import add_predictor, predictor_readers
from polyneuron.planning.row_program import add_row_feed_forward, row_readers
from polyneuron.planning.tile_program import add_tile_feed_forward, tile_readers

QUANT_BLOCK = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOp:
    """`struct step_op` (engine_api.h): offsets into the arena, strides in bytes, 0 for none."""

    kind: OpKind
    unit: Unit = Unit.CPU
    after: int = 0
    flags: int = 0
    layer: int = 0
    weight_type: int = 0
    up_type: int = 0
    activation: int = 0
    in_: int = 0
    in_stride: int = 0
    out: int = 0
    out_stride: int = 0
    out_acts: int = 0
    out_acts_stride: int = 0
    weight: int = 0
    up_weight: int = 0
    bias: int = 0
    up_bias: int = 0
    kv: int = 0
    rope: int = 0
    rows: int = 0
    cols: int = 0
    num_heads: int = 0
    num_kv_heads: int = 0
    head_dim: int = 0
    rotary_dim: int = 0
    rope_layout: int = 0
    heads_per_unit: int = 0
    stream_index: int = 0
    down_type: int = 0
    row_stride: int = 0
    gate_row: int = 0
    up_row: int = 0
    down_row: int = 0
    first_neuron: int = 0
    layer_neurons: int = 0
    cluster_neurons: int = 0
    clusters: int = 0
    partials: int = 0
    cache: int = 0
    reads: int = 0
    activity: int = 0
    expert_neurons: int = 0
    routes: int = 0
    eps: float = 0.0
    scale: float = 0.0


def write_program(arena: Arena, offset: int, ops: list[StepOp]) -> None:
    """Store a program in the arena."""
    for index, op in enumerate(ops):
        record = arena.op(offset, index)
        for item in fields(op):
            setattr(record, item.name.rstrip("_"), getattr(op, item.name))


Norm = tuple[str | None, str | None]
"""Names of a norm's weight and bias."""


@dataclass(slots=True)
class Compiler:
    """Builds one program, op after op."""

    spec: ModelSpec
    layout: ArenaLayout
    phase: Phase
    ops: list[StepOp]
    hot_clusters: int = 0
    """Predicted mode: clusters of each layer that are computed without being predicted."""
    names: TensorMap = field(init=False)

    def __post_init__(self) -> None:
        self.names = tensor_map(self.spec)

    @property
    def dense_unit(self) -> Unit:
        has_npu = self.layout.config.num_npu_threads > 0
        return Unit.NPU if self.phase is Phase.PREFILL and has_npu else Unit.CPU

    @property
    def hot_unit(self) -> Unit:
        """Who computes hot clusters in decode."""
        config = self.layout.config
        return Unit.NPU if config.hot_on_npu and config.num_npu_threads else Unit.CPU

    @property
    def predictors(self) -> PredictorFile | None:
        """Those of the model; prompts are computed without."""
        return self.layout.predictors if self.phase is Phase.DECODE else None

    def add(self, *, together: bool = False, **values: Any) -> None:
        """Append an op that waits for all before it, or (together) for what the last one waits."""
        after = self.ops[-1].after if together else len(self.ops)
        self.ops.append(StepOp(after=after, **values))

    def weight(self, name: str) -> WeightPlace:
        return self.layout.weights[name]

    def vector(self, name: str | None) -> int:
        """Offset of a float vector, 0 when the family or the file has none."""
        place = self.layout.weights.get(name) if name else None
        return place.offset if place else 0

    def buffer(self, name: str, prefix: str = "out") -> dict[str, Any]:
        """The fields that point an op's `prefix` at an activation buffer."""
        key = "in_" if prefix == "in" else prefix
        layout = self.layout
        return {
            key: layout.at(f"activations.{name}"),
            f"{prefix}_stride": layout.strides[name],
        }

    def outputs(self, name: str, readers: list[WeightPlace]) -> dict[str, Any]:
        """Where to write rows for the matrices that read them: int8 blocks, floats or both."""
        flags = 0
        values: dict[str, Any] = {}
        if any(reader.takes_acts for reader in readers):
            flags |= OpFlag.WRITE_ACTS
            values |= self.buffer(f"{name}_acts", "out_acts")
        if not all(reader.takes_acts for reader in readers):
            flags |= OpFlag.WRITE_F32
        values |= self.buffer(name)
        return values | {"flags": flags}

    def source(self, name: str, place: WeightPlace) -> dict[str, Any]:
        """Where a matrix reads its input rows."""
        return self.buffer(f"{name}_acts" if place.takes_acts else name, "in")

    def norm(
        self, layer: int, names: Norm, readers: list[WeightPlace], flags: int = 0,
        out: str = "normed", **values: Any,
    ) -> None:  # fmt: skip
        """The stream normed for the matrices that read it."""
        values |= self.outputs(out, readers)
        values["flags"] |= flags
        self.add_norm(layer, names, **self.buffer("stream", "in"), **values)

    def add_norm(self, layer: int, names: Norm, flags: int, **values: Any) -> None:
        """A norm of the family's kind, by its weight and its bias."""
        weight, bias = names
        is_centred = self.spec.block.norm is NormKind.LAYER
        self.add(
            kind=OpKind.NORM, layer=layer, weight=self.vector(weight), bias=self.vector(bias),
            cols=self.spec.d_model, eps=self.spec.norm_eps, unit=self.dense_unit,
            flags=flags | (OpFlag.LAYER_NORM if is_centred else 0), **values,
        )  # fmt: skip

    def matmul(self, layer: int, place: WeightPlace, source: str, **values: Any) -> None:
        self.add(
            kind=OpKind.MATMUL, layer=layer, unit=self.dense_unit, weight=place.offset,
            weight_type=int(place.storage or 0), cols=place.cols,
            stream_index=place.stream_index,
            **{"rows": place.rows} | self.source(source, place) | values,
        )  # fmt: skip

    # ---- one layer

    def qkv(self, layer: int) -> tuple[int, int, int]:
        """Projections to q, k and v; returns their offsets in a row of the qkv buffer."""
        spec, prefix = self.spec, f"blk.{layer}."
        places = [self.weight(f"{prefix}attn_{part}.weight") for part in "qkv"]
        biases = [self.vector(f"{prefix}attn_{part}.bias") for part in "qkv"]
        heads = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
        sizes = [4 * round_up(n * spec.head_dim, QUANT_BLOCK) for n in heads]
        base = self.layout.at("activations.qkv")
        starts = (base, base + sizes[0], base + sizes[0] + sizes[1])
        readers = places + predictor_readers(self, layer, PredictorInput.ATTENTION)
        self.input_norms(layer, readers)
        add_predictor(self, layer, PredictorInput.ATTENTION)
        stride = self.layout.strides["qkv"]
        if _stacked(places) and not any(biases):
            rows = sum(place.rows for place in places)
            self.matmul(layer, places[0], "normed", rows=rows, out=base, out_stride=stride)
        else:
            for i, place in enumerate(places):
                self.matmul(
                    layer, place, "normed", out=starts[i], out_stride=stride, bias=biases[i],
                    together=i > 0,
                )  # fmt: skip
        return starts

    def input_norms(self, layer: int, readers: list[WeightPlace]) -> None:
        """What attention reads, and feed forward where it does not wait for attention."""
        names, residual = self.names.layers[layer], self.spec.block.residual
        if residual is Residual.PARALLEL:
            readers = readers + self.ffn_readers(layer)
        self.norm(layer, (names.attn_norm, names.attn_norm_bias), readers)
        if residual is Residual.PARALLEL_NORMS:
            second = (names.ffn_norm, names.ffn_norm_bias)
            self.norm(layer, second, self.ffn_readers(layer), out="fed", together=True)

    def attention(self, layer: int) -> None:
        spec, layout, prefix = self.spec, self.layout, f"blk.{layer}."
        q, k, v = self.qkv(layer)
        kv = layout.at("kv.blocks") + layer * layout.kv_layer_bytes
        heads: dict[str, Any] = {
            "layer": layer, "kv": kv, "in_": q, "in_stride": layout.strides["qkv"],
            "num_heads": spec.num_heads, "num_kv_heads": spec.num_kv_heads,
            "head_dim": spec.head_dim, "weight_type": int(kv_storage(layout.config.kv_type)),
        }  # fmt: skip
        norms = [self.vector(f"{prefix}attn_{part}_norm.weight") for part in "qk"]
        if spec.is_qk_norm_wide:
            self.wide_norms(layer, (q, k), norms)
            norms = [0, 0]
        table = "local_rope" if spec.local_rope and spec.block.is_local(layer) else "rope"
        self.add(
            kind=OpKind.ROPE_KV, out=k, out_acts=v, bias=norms[0], up_bias=norms[1],
            rope=layout.at(f"fixed.{table}"),
            rotary_dim=spec.rope.rotary_dim if spec.block.is_rotated(layer) else 0,
            rope_layout=int(spec.rope.layout),
            eps=spec.norm_eps, **heads,
        )  # fmt: skip
        output = self.weight(f"{prefix}attn_output.weight")
        per_unit = self.heads_per_unit()
        fused = output.takes_acts and per_unit * spec.head_dim % QUANT_BLOCK == 0
        values = self.outputs("attended", [output]) if fused else self.buffer("attended")
        self.add(
            kind=OpKind.ATTENTION, heads_per_unit=per_unit, scale=spec.attention_scale,
            rows=spec.block.window_of(layer), cols=self.tokens_per_unit(),
            eps=spec.block.attention_cap, **heads, **values,
        )  # fmt: skip
        if output.takes_acts and not fused:
            self.add(
                kind=OpKind.QUANTIZE, layer=layer, cols=spec.num_heads * spec.head_dim,
                **self.buffer("attended", "in"), **self.buffer("attended_acts", "out_acts"),
            )  # fmt: skip
        post_norm = self.names.layers[layer].post_attn_norm
        self.residual(layer, output, "attended", f"{prefix}attn_output.bias", post_norm)

    def wide_norms(self, layer: int, places: tuple[int, int], norms: list[int]) -> None:
        """Norms over all heads of q and of k, in their places."""
        stride = self.layout.strides["qkv"]
        for index, cols in enumerate((self.spec.q_dim, self.spec.kv_dim)):
            self.add(
                kind=OpKind.NORM, layer=layer, weight=norms[index], cols=cols,
                eps=self.spec.norm_eps, in_=places[index], in_stride=stride, out=places[index],
                out_stride=stride, flags=OpFlag.WRITE_F32, together=index > 0,
            )  # fmt: skip

    def residual(
        self, layer: int, place: WeightPlace, source: str, bias: str, post_norm: str | None,
        **values: Any,
    ) -> None:  # fmt: skip
        """A product that is added to the stream, normed before where the family does."""
        last = OpFlag.STREAM_LAST if place.stream_index else 0
        values |= {"bias": self.vector(bias)}
        if post_norm is None:
            flags = OpFlag.RESIDUAL | last
            self.matmul(layer, place, source, flags=flags, **self.buffer("stream"), **values)
            return
        self.matmul(layer, place, source, flags=last, **self.buffer("branch"), **values)
        branch = self.buffer("branch", "in") | self.buffer("stream")
        self.add_norm(layer, (post_norm, None), OpFlag.RESIDUAL, **branch)

    def tokens_per_unit(self) -> int:
        """Of attention: single tokens where those of a step are of several sequences."""
        return prompt_tokens(self.spec) if self.phase is Phase.PREFILL else 1

    def heads_per_unit(self) -> int:
        """All heads of a KV head together, but single heads where that leaves workers idle."""
        group = self.spec.num_heads // self.spec.num_kv_heads
        if self.phase is Phase.PREFILL:
            return group
        return group if self.spec.num_kv_heads >= 4 * self.layout.config.num_workers else 1

    @property
    def ffn_input(self) -> str:
        """The buffer of the rows that feed forward reads."""
        return "fed" if self.spec.block.residual is Residual.PARALLEL_NORMS else "normed"

    def ffn_readers(self, layer: int) -> list[WeightPlace]:
        """What reads feed forward's norm, of a model without experts."""
        bundles = self.layout.bundles
        return row_readers(self, bundles, layer) if bundles else tile_readers(self, layer)

    def ffn_norm(self, layer: int, readers: list[WeightPlace]) -> None:
        """Feed forward's norm of the stream, unless it was made beside attention's."""
        names = self.names.layers[layer]
        if self.spec.block.residual is Residual.SEQUENTIAL:
            self.norm(layer, (names.ffn_norm, names.ffn_norm_bias), readers)

    def feed_forward(self, layer: int) -> None:
        if self.spec.experts and self.layout.bundles:
            return add_expert_feed_forward(self, self.layout.bundles, layer)
        if self.layout.bundles:
            return add_row_feed_forward(self, self.layout.bundles, layer)
        return add_tile_feed_forward(self, layer)

    def compile(self) -> list[StepOp]:
        self.embed()
        for layer in range(self.spec.num_layers):
            add_early_router(self, layer)
            self.attention(layer)
            self.feed_forward(layer)
        self.head()
        return self.ops

    def embed(self) -> None:
        """Token ids to the stream, with learned positions where the family has them."""
        place, block, positions = self.weight(self.names.token_embd), self.spec.block, None
        if self.names.positions:
            positions = self.weight(self.names.positions)
        self.add(
            kind=OpKind.EMBED, weight=place.offset, weight_type=int(place.storage or 0),
            cols=place.cols, scale=block.embedding_scale, rows=block.position_offset,
            up_weight=positions.offset if positions else 0,
            up_type=int(positions.storage or 0) if positions else 0, **self.buffer("stream"),
        )  # fmt: skip

    def head(self) -> None:
        """The last norm, and the logits of rows that want them."""
        names, last = self.names, self.spec.num_layers
        head = self.weight(names.output)
        norm = (names.output_norm, names.output_norm_bias)
        self.norm(last, norm, [head], flags=OpFlag.LOGIT_ROWS)
        self.matmul(
            last, head, "normed", flags=OpFlag.LOGIT_ROWS, eps=self.spec.block.logit_cap,
            **self.buffer("logits"),
        )  # fmt: skip


def _stacked(places: list[WeightPlace]) -> bool:
    """Whether matrices lie one after another and can be one: same storage, whole tiles."""
    return all(
        a.storage == b.storage and a.cols == b.cols and a.end == b.offset and a.rows % 32 == 0
        for a, b in pairwise(places)
    )


def compile_program(
    spec: ModelSpec, layout: ArenaLayout, phase: Phase, hot_clusters: int = 0
) -> list[StepOp]:
    """The ops of one forward pass in `phase`, with so many clusters of each layer hot."""
    ops = Compiler(spec, layout, phase, [], hot_clusters).compile()
    if len(ops) > layout.max_ops:
        raise AssertionError(f"{len(ops)} ops, room for {layout.max_ops}")
    return ops
