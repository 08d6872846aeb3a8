"""Where everything lies in the arena: computed from model and configuration, touching nothing.

Regions follow DESIGN §3: `hot` has the resident layers, `stage` the buffers of the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from polyneuron.backends.notice import NOTICE_BYTES
from polyneuron.config import EngineConfig, FeedForwardMode, Phase
from polyneuron.io.expert_pieces import ExpertPieces
from polyneuron.io.ncf_format import Layout, NcfManifest, NcfSection, round_up
from polyneuron.io.predictor_file import PredictorFile
from polyneuron.kernels.arena import board_bytes, neuron_reads_bytes, routes_bytes
from polyneuron.kernels.neuron_cache import neuron_cache_bytes
from polyneuron.kernels.quant import KV_BLOCK_TOKENS, TILE_ROWS, StorageType
from polyneuron.kernels.trace import trace_ring_bytes
from polyneuron.model.block import Residual
from polyneuron.model.spec import ModelSpec
from polyneuron.planning import attention
from polyneuron.planning.allocator import Allocator, Span
from polyneuron.planning.bundle_places import NUM_BUFFERS, place_bundles
from polyneuron.planning.bundles import (
    BundlePlan,
    NeuronRows,
    Residency,
    cluster_bytes,
    neuron_rows,
    ring_places,
    spread,
)

ACT_BLOCK_BYTES = 40
MAX_OPS_PER_LAYER = 20
MAX_OPS_OUTSIDE = 8
MAILBOX_HEAD_BYTES = 64
STEP_OP_BYTES = 256
TRACE_RECORDS = 1 << 14
LAYER_STREAM_BYTES = 192
LAYER_ACTIVITY_BYTES = 64
REGIONS = (
    "boards", "inputs", "activations", "mailbox", "kv", "fixed", "hot", "cold", "stage",
    "scratch", "trace",
)  # fmt: skip


def act_bytes(cols: int) -> int:
    """Bytes of `cols` values as int8 activation blocks."""
    return cols // 32 * ACT_BLOCK_BYTES


@dataclass(frozen=True, slots=True)
class WeightPlace:
    """One weight in the arena: tiles of a matrix (rows, cols), or a float vector (storage None)."""

    storage: StorageType | None
    rows: int
    cols: int
    offset: int
    """Of a streamed weight: its place in the first buffer."""
    num_bytes: int
    stream_index: int = 0
    """0: resident; j: part of the j-th streamed layer."""

    @property
    def end(self) -> int:
        """The first byte after it."""
        return self.offset + self.num_bytes

    @property
    def takes_acts(self) -> bool:
        """Whether its kernel reads int8 activations (else floats)."""
        return self.storage not in (StorageType.F16, StorageType.F32)


@dataclass(frozen=True, slots=True)
class SectionPlace:
    """One section of the model in the arena: the fixed weights, or a layer's feed-forward block."""

    section: NcfSection
    offset: int
    """Of a streamed layer: the first buffer."""
    stream_index: int = 0


@dataclass(frozen=True, slots=True)
class ArenaLayout:
    """Offsets from the arena's base; strides in bytes a token."""

    config: EngineConfig
    spans: Mapping[str, Span]
    """Named runs: regions by their names, buffers as region.name."""
    strides: Mapping[str, int]
    weights: Mapping[str, WeightPlace]
    """By GGUF tensor name."""
    sections: tuple[SectionPlace, ...]
    """In the model's order; of a file in bundles the fixed one only."""
    bundles: BundlePlan | None
    """The layers of a file in bundles."""
    predictors: PredictorFile | None
    """In predicted mode; they lie at `fixed.predictors`, their tensors are among the weights."""
    num_kv_blocks: int
    kv_layer_bytes: int
    max_ops: int
    num_bytes: int

    def at(self, name: str) -> int:
        """Offset of a named run."""
        return self.spans[name].offset

    @property
    def resident(self) -> list[SectionPlace]:
        """Sections that stay in the arena."""
        return [place for place in self.sections if not place.stream_index]

    @property
    def streamed(self) -> list[SectionPlace]:
        """Layers that pass through the stage buffers, in the order they are needed."""
        return [place for place in self.sections if place.stream_index]

    @property
    def resident_bytes(self) -> dict[str, int]:
        """Bytes of each section that is read before the first step, by its name."""
        sections = [place.section for place in self.resident]
        if self.bundles:
            layers = self.bundles.layers
            sections += [place.section for place in layers if not place.rows_are.passes_through]
        if self.predictors:
            sections.append(self.predictors.section)
        return {section.name: section.num_bytes for section in sections}

    def loads(self, phase: Phase) -> tuple[NcfSection, ...]:
        """What passes through the stage buffers in one pass of a phase, in order."""
        if self.bundles:
            return self.bundles.loads(phase)
        return tuple(place.section for place in self.streamed)

    @property
    def expert_pieces(self) -> ExpertPieces | None:
        """How a prompt's loads are made up of experts; None where there are none."""
        return self.bundles.expert_pieces if self.bundles else None

    @property
    def is_streaming(self) -> bool:
        """Whether anything is read while it runs."""
        return bool(self.loads(Phase.PREFILL))

    @property
    def has_neuron_cache(self) -> bool:
        """Whether single neurons are read while it runs."""
        return self.bundles is not None and self.bundles.cold_slots > 0

    @property
    def num_buffers(self) -> int:
        """Stage buffers."""
        return sum(name.startswith("stage.") for name in self.spans)


def num_executors(config: EngineConfig) -> int:
    """CPU workers first, then the NPU executor's threads."""
    return config.num_workers + config.num_npu_threads


def _activation_strides(
    spec: ModelSpec, predictors: PredictorFile | None, rows: NeuronRows | None
) -> dict[str, int]:
    width, hidden = round_up(spec.d_model, TILE_ROWS), round_up(spec.d_ff, TILE_ROWS)
    heads = round_up(spec.num_heads * spec.head_dim, TILE_ROWS)
    kv_heads = round_up(spec.num_kv_heads * spec.head_dim, TILE_ROWS)
    rank = max(predictors.ranks) if predictors else 0
    return (
        {
            "stream": 4 * width,
            "normed": 4 * width,
            "normed_acts": act_bytes(width),
            "qkv": 4 * (heads + 2 * kv_heads),
            "attended": 4 * heads,
            "attended_acts": act_bytes(heads),
            "hidden": 4 * hidden,
            "hidden_acts": act_bytes(hidden),
            "predicted": 4 * rank,
            "predicted_acts": act_bytes(rank),
            "logits": 4 * round_up(spec.vocab_size, TILE_ROWS),
        }
        | _branch_strides(spec)
        | _expert_strides(spec, rows)
    )


def _branch_strides(spec: ModelSpec) -> dict[str, int]:
    """Outputs that are normed before the stream gets them, and a second norm of its input."""
    width, strides = round_up(spec.d_model, TILE_ROWS), {}
    if spec.block.has_post_norms:
        strides["branch"] = 4 * width
    if spec.block.residual is Residual.PARALLEL_NORMS:
        strides |= {"fed": 4 * width, "fed_acts": act_bytes(width)}
    return strides


def _expert_strides(spec: ModelSpec, rows: NeuronRows | None) -> dict[str, int]:
    if rows is None or spec.experts is None:
        return {}
    width, shared = round_up(spec.d_model, TILE_ROWS), spec.experts.shared_d_ff
    takes_acts = rows.decide_type not in (StorageType.F16, StorageType.F32)
    return {
        "router": 4 * round_up(spec.experts.num_experts, TILE_ROWS),
        "gathered": act_bytes(width) if takes_acts else 4 * width,
        "shares": 4,
        "shared": 4 * round_up(shared, TILE_ROWS),
        "shared_acts": act_bytes(round_up(shared, TILE_ROWS)),
        "scores": 4 * rows.num_neurons if rows.is_named else 0,
    }


def _activation_parts(
    strides: Mapping[str, int], config: EngineConfig, rows: NeuronRows | None
) -> list[tuple[str, int]]:
    count = dict.fromkeys(strides, config.max_tokens) | {"logits": config.max_logit_rows}
    if rows is not None and rows.has_experts:
        entries = config.max_tokens * rows.num_used
        count |= {"hidden": entries, "gathered": entries, "scores": config.decode_tokens}
    parts = [(name, stride * count[name]) for name, stride in strides.items()]
    if rows is None:
        return parts
    partials = rows.num_clusters * config.decode_tokens * rows.cols * 4
    total = config.max_tokens * rows.cols * 4
    parts += [("partials", partials), ("total", total), ("clusters", cluster_bytes(rows))]
    if rows.has_experts:
        routes = routes_bytes(rows.num_experts, rows.num_used, config.max_tokens)
        parts.append(("routes", routes))
    return parts


def _input_parts(config: EngineConfig) -> list[tuple[str, int]]:
    tables = config.max_sequences * (config.num_ctx // KV_BLOCK_TOKENS + 1)
    return [
        ("token_ids", 4 * config.max_tokens),
        ("positions", 4 * config.max_tokens),
        ("block_tables", 4 * config.max_tokens),
        ("tables", 4 * tables),
        ("logit_rows", 4 * config.max_logit_rows),
        ("bytes_read", 8),
        ("npu_notice", NOTICE_BYTES),
    ]


def _scratch_parts(
    spec: ModelSpec, config: EngineConfig, rows: NeuronRows | None
) -> list[tuple[str, int]]:
    scores = attention.scratch_bytes(spec, config)
    tiles = rows.scratch_bytes if rows else 0
    num_bytes = max(scores, 4 * round_up(spec.d_model, TILE_ROWS), tiles)
    return [(str(i), num_bytes) for i in range(num_executors(config))]


def _place_sections(
    allocator: Allocator, manifest: NcfManifest, num_resident: int
) -> tuple[SectionPlace, ...]:
    """Give every section its place: fixed, hot (resident layers), stage (the others)."""
    fixed, layers = manifest.sections[0], manifest.sections[1:]
    streamed = spread(len(layers), num_resident)
    hot = [(str(i), s.num_bytes) for i, s in enumerate(layers) if i not in streamed]
    allocator.region("hot", hot)
    allocator.region("cold", [])
    largest = max((layers[i].num_bytes for i in streamed), default=0)
    buffers = min(NUM_BUFFERS, len(streamed) + 1) if streamed else 0
    allocator.region("stage", [(str(i), largest) for i in range(buffers)])
    places = [SectionPlace(fixed, allocator.spans["fixed.section"].offset)]
    for layer, section in enumerate(layers):
        if layer in streamed:
            offset, index = allocator.spans["stage.0"].offset, streamed.index(layer) + 1
            places.append(SectionPlace(section, offset, index))
        else:
            places.append(SectionPlace(section, allocator.spans[f"hot.{layer}"].offset))
    return tuple(places)


def _place_predictors(predictors: PredictorFile | None, offset: int) -> dict[str, WeightPlace]:
    tensors = predictors.tensors if predictors else {}
    return {
        name: WeightPlace(t.storage, t.rows, t.cols, offset + t.offset, t.num_bytes)
        for name, t in tensors.items()
    }


def _place_weights(
    manifest: NcfManifest, sections: tuple[SectionPlace, ...]
) -> dict[str, WeightPlace]:
    places = {}
    for tensor in manifest.tensors:
        if tensor.section_index >= len(sections):  # in bundles
            continue
        section = sections[tensor.section_index]
        offset = section.offset + tensor.offset
        places[tensor.name] = WeightPlace(
            tensor.storage, tensor.rows, tensor.cols, offset, tensor.num_bytes,
            section.stream_index,
        )  # fmt: skip
    return places


def hot_widths(config: EngineConfig) -> list[int]:
    """The different numbers of hot clusters that decode steps may have."""
    return sorted({config.hot_for(tokens) for tokens in range(1, config.decode_tokens + 1)})


def program_names(config: EngineConfig) -> list[str]:
    """One for prompts, and one a hot width for decode steps."""
    return ["prefill", *(f"decode.{width}" for width in hot_widths(config))]


def trace_rings(config: EngineConfig) -> list[str]:
    """One for each executor, by its number, and those of the two readers."""
    return [*(str(index) for index in range(num_executors(config))), "stream", "reads"]


def _board_parts(
    spec: ModelSpec, config: EngineConfig, rows: NeuronRows | None, residency: Residency
) -> tuple[int, list[tuple[str, int]]]:
    """Most ops of a program, and the parts of the region of boards."""
    pieces = len(rows.pieces()) if rows else 0
    max_ops = spec.num_layers * (MAX_OPS_PER_LAYER + 2 * pieces) + MAX_OPS_OUTSIDE
    parts = [
        ("board", board_bytes(max_ops)),
        *((f"program.{name}", max_ops * STEP_OP_BYTES) for name in program_names(config)),
        ("stream", LAYER_STREAM_BYTES),
    ]
    if rows is None:
        return max_ops, parts
    parts += [("activity", LAYER_ACTIVITY_BYTES * spec.num_layers)]
    if slots := residency.cold_slots:
        parts += [
            ("cache", neuron_cache_bytes(spec.num_layers * rows.num_kept, slots)),
            ("reads", neuron_reads_bytes(ring_places(slots))),
            ("bundle_offsets", 8 * spec.num_layers),
        ]
    return max_ops, parts


def plan_layout(
    manifest: NcfManifest,
    spec: ModelSpec,
    config: EngineConfig,
    residency: Residency | None = None,
    predictors: PredictorFile | None = None,
) -> ArenaLayout:
    """Lay out an arena with so much of the feed-forward weights (None: all) in it.

    Nothing is allocated. Of a file in tiles, layers are resident or streamed as a whole. Predicted
    mode needs the predictors.
    """
    assert (predictors is not None) == (config.mode is FeedForwardMode.PREDICTED)
    rows = neuron_rows(manifest, config.mode) if manifest.layout is Layout.BUNDLES else None
    residency = residency or Residency(spec.num_layers, 0, rows.num_clusters if rows else 0)
    assert manifest.layout is Layout.BUNDLES or residency.cold_slots == 0
    allocator = Allocator()
    max_ops, boards = _board_parts(spec, config, rows, residency)
    allocator.region("boards", boards)
    allocator.region("inputs", _input_parts(config))
    strides = _activation_strides(spec, predictors, rows)
    allocator.region("activations", _activation_parts(strides, config, rows))
    mailbox = MAILBOX_HEAD_BYTES + 4 * config.num_ctx
    allocator.region("mailbox", [(str(i), mailbox) for i in range(config.max_requests)])
    num_blocks = config.max_sequences * -(-config.num_ctx // KV_BLOCK_TOKENS)
    layer_bytes = num_blocks * attention.kv_layer_block_bytes(spec, config.kv_type)
    allocator.region("kv", [("blocks", spec.num_layers * layer_bytes)])
    rope_bytes = 4 * config.num_ctx * spec.rope.rotary_dim
    local_bytes = rope_bytes if spec.local_rope else 0
    fixed_bytes = manifest.sections[0].num_bytes
    named = predictors.section.num_bytes if predictors else 0
    fixed_parts = [("section", fixed_bytes), ("rope", rope_bytes)]
    fixed_parts += [("local_rope", local_bytes), ("predictors", named)]
    allocator.region("fixed", fixed_parts)
    sections: tuple[SectionPlace, ...]
    bundles = None
    if rows is not None:
        fixed = SectionPlace(manifest.sections[0], allocator.spans["fixed.section"].offset)
        sections = (fixed,)
        bundles = place_bundles(allocator, manifest, rows, config.mode, residency)
    else:
        sections = _place_sections(allocator, manifest, residency.num_resident)
    allocator.region("scratch", _scratch_parts(spec, config, rows))
    ring_bytes = trace_ring_bytes(TRACE_RECORDS) if config.trace else 0
    allocator.region("trace", [(name, ring_bytes) for name in trace_rings(config)])
    weights = _place_weights(manifest, sections)
    weights |= _place_predictors(predictors, allocator.at("fixed.predictors"))
    return ArenaLayout(
        config, allocator.spans, strides, weights, sections, bundles, predictors, num_blocks,
        layer_bytes, max_ops, allocator.offset,
    )  # fmt: skip
