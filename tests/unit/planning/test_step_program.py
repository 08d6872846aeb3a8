"""Compiled programs: every op works inside the regions it may touch, in an order that holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from polyneuron.config import EngineConfig, Phase
from polyneuron.io.ncf_format import round_up
from polyneuron.kernels.arena import OpFlag, OpKind, Unit, routes_bytes
from polyneuron.model.spec import ModelSpec
from polyneuron.planning.attention import QUERY_ROWS
from polyneuron.planning.bundles import Residency
from polyneuron.planning.layout import ArenaLayout, plan_layout
from polyneuron.planning.source import open_source
from polyneuron.planning.step_program import StepOp, compile_program
from tests.support.families import FAMILY_CASES, gguf_path
from tests.support.tiny_gguf import TinyModel, write_tiny_gguf

COMPUTING = (Phase.PREFILL, Phase.DECODE)
Program = tuple[ModelSpec, ArenaLayout, list[StepOp]]
Span = tuple[int, int]


def make_program(
    path: Path, phase: Phase, num_npu_threads: int = 1, num_resident: int | None = None
) -> Program:
    config = EngineConfig(num_ctx=64, num_workers=2, num_npu_threads=num_npu_threads, max_tokens=8)
    source = open_source(path)
    layout = plan_layout(
        source.manifest,
        source.spec,
        config,
        Residency(num_resident) if num_resident is not None else None,
    )
    return source.spec, layout, compile_program(source.spec, layout, phase)


def family(case: str, phase: Phase = Phase.DECODE) -> Program:
    return make_program(Path(gguf_path(case)), phase)


def rows_of(layout: ArenaLayout, op: StepOp) -> int:
    is_logits = op.flags & OpFlag.LOGIT_ROWS
    return layout.config.max_logit_rows if is_logits else layout.config.max_tokens


def span(offset: int, stride: int, rows: int, width: int) -> Span:
    """Bytes of `rows` rows, `width` bytes of each."""
    return offset, offset + stride * (rows - 1) + width


def written(layout: ArenaLayout, op: StepOp) -> list[Span]:
    """Activations an op writes, at the most tokens a step may have."""
    rows = rows_of(layout, op)
    match op.kind:
        case OpKind.EMBED:
            return [span(op.out, op.out_stride, rows, 4 * op.cols)]
        case OpKind.NORM:
            width = op.cols
        case OpKind.MATMUL:
            return [span(op.out, op.out_stride, rows, 4 * round_up(op.rows, 32))]
        case OpKind.ROPE_KV:
            q, k = op.num_heads * op.head_dim, op.num_kv_heads * op.head_dim
            return [
                span(op.in_, op.in_stride, rows, 4 * q),
                span(op.out, op.in_stride, rows, 4 * k),
            ]
        case OpKind.ATTENTION:
            width = op.num_heads * op.head_dim
        case OpKind.QUANTIZE:
            return [span(op.out_acts, op.out_acts_stride, rows, op.cols // 32 * 40)]
        case OpKind.FEED_FORWARD:
            width = round_up(op.rows, 32)
        case _:
            return written_of_experts(layout, op)
    spans = []
    is_added = op.kind is OpKind.NORM and op.flags & OpFlag.RESIDUAL
    if op.flags & OpFlag.WRITE_F32 or op.kind is OpKind.ATTENTION or is_added:
        spans.append(span(op.out, op.out_stride, rows, 4 * width))
    if op.flags & OpFlag.WRITE_ACTS:
        spans.append(span(op.out_acts, op.out_acts_stride, rows, width // 32 * 40))
    return spans


def written_of_experts(layout: ArenaLayout, op: StepOp) -> list[Span]:
    """The same of ops of a mixture of experts; an entry is a token with one of its experts."""
    tokens, sequences = layout.config.max_tokens, layout.config.max_sequences
    entries = tokens * op.num_heads
    match op.kind:
        case OpKind.ROUTE:
            num_bytes = routes_bytes(op.rows, op.num_heads, tokens)
            return [(op.routes, op.routes + num_bytes)]
        case OpKind.SIGMOID:
            return [span(op.out, op.out_stride, tokens, 4)]
        case OpKind.GATHER:
            return [span(op.out, op.out_stride, entries, op.in_stride)]
        case OpKind.ROWS_UP:
            return [span(op.out, op.out_stride, entries, 4 * op.expert_neurons)]
        case OpKind.ROWS_DOWN:
            totals = span(op.partials, 4 * op.cols, tokens, 4 * op.cols)
            return [totals, span(op.out, op.out_stride, tokens, 4 * op.cols)]
        case OpKind.EXPERTS:
            num_clusters = op.layer_neurons // op.cluster_neurons
            return [(op.clusters, op.clusters + 64 * num_clusters + 8 * op.layer_neurons)]
        case OpKind.CLUSTERS:
            rows = op.layer_neurons // op.cluster_neurons * sequences
            return [span(op.partials, 4 * op.cols, rows, 4 * op.cols)]
        case OpKind.MERGE:
            return [span(op.out, op.out_stride, sequences, 4 * op.cols)]
    raise AssertionError(f"{op.kind.name} is in no program of these models")


def buffer_of(layout: ArenaLayout, offset: int) -> Span:
    """The activation buffer an offset lies in."""
    for name, place in layout.spans.items():
        if name.startswith("activations.") and 0 <= offset - place.offset < place.num_bytes:
            return place.offset, place.offset + place.num_bytes
    raise AssertionError(f"{offset} is in no activation buffer")


@pytest.mark.parametrize("phase", COMPUTING)
@pytest.mark.parametrize("case", FAMILY_CASES)
class TestPrograms:
    def test_writes_stay_in_their_buffer(self, case: str, phase: Phase) -> None:
        _, layout, ops = family(case, phase)
        for op in ops:
            assert written(layout, op)
            for first, last in written(layout, op):
                start, end = buffer_of(layout, first)
                assert start <= first < last <= end

    def test_order_is_ascending(self, case: str, phase: Phase) -> None:
        """An op waits for earlier ones only, and never for fewer than those before it did."""
        _, _, ops = family(case, phase)
        for index, op in enumerate(ops):
            assert op.after <= index
            assert op.after >= (ops[index - 1].after if index else 0)

    def test_ops_that_run_together_are_independent(self, case: str, phase: Phase) -> None:
        _, layout, ops = family(case, phase)
        for index, op in enumerate(ops):
            for other in ops[op.after : index]:
                for first, last in written(layout, op):
                    for start, end in written(layout, other):
                        rows = {(first - start) % op.out_stride}
                        assert op.out_stride == other.out_stride
                        assert rows != {0} or last <= start or end <= first
                    assert other.out != op.in_
                    assert op.out != other.in_

    def test_weights_are_the_models_own(self, case: str, phase: Phase) -> None:
        _, layout, ops = family(case, phase)
        places = {w.offset: w for w in layout.weights.values()}
        for op in ops:
            if op.kind in (OpKind.MATMUL, OpKind.FEED_FORWARD):
                main = places[op.up_weight if op.kind is OpKind.FEED_FORWARD else op.weight]
                assert op.cols == main.cols
                last = max(w.end for w in layout.weights.values())
                assert main.offset + main.num_bytes <= last
            if op.cluster_neurons:  # rows of experts
                hot = layout.spans["hot"]
                assert op.weight == 0
                assert hot.offset <= op.up_weight < hot.offset + hot.num_bytes
                continue
            for offset in (op.weight, op.up_weight):
                assert offset == 0 or offset in places
            factors = layout.spans.get("activations.shares")
            is_scaled = factors is not None and op.up_bias == factors.offset
            biases = (op.bias, 0 if is_scaled else op.up_bias)
            assert all(b == 0 or places[b].storage is None for b in biases)

    def test_kv_layers_are_disjoint(self, case: str, phase: Phase) -> None:
        spec, layout, ops = family(case, phase)
        for kind in (OpKind.ROPE_KV, OpKind.ATTENTION):
            starts = [op.kv for op in ops if op.kind is kind]
            base = layout.spans["kv.blocks"].offset
            assert starts == [base + i * layout.kv_layer_bytes for i in range(spec.num_layers)]


class TestUnits:
    def test_prefill_uses_the_npu(self) -> None:
        _, _, ops = family("llama_tied", Phase.PREFILL)
        dense = (OpKind.MATMUL, OpKind.FEED_FORWARD, OpKind.NORM)
        assert {op.unit for op in ops if op.kind in dense} == {Unit.NPU}
        assert {op.unit for op in ops if op.kind not in dense} == {Unit.CPU}

    def test_decode_and_plain_prefill_use_workers(self) -> None:
        path = Path(gguf_path("llama_tied"))
        for phase, npu in ((Phase.DECODE, 1), (Phase.PREFILL, 0)):
            _, _, ops = make_program(path, phase, npu)
            assert {op.unit for op in ops} == {Unit.CPU}

    def test_attention_takes_tokens_of_a_prompt_together(self) -> None:
        """Tokens of a decode step are of several sequences."""
        for phase, is_prompt in ((Phase.PREFILL, True), (Phase.DECODE, False)):
            spec, _, ops = family("llama_tied", phase)
            units = {(op.cols, op.heads_per_unit) for op in ops if op.kind is OpKind.ATTENTION}
            group = spec.num_heads // spec.num_kv_heads
            assert units == ({(QUERY_ROWS // group, group)} if is_prompt else {(1, 1)})

    def test_adjacent_projections_are_one_matmul(self, tmp_path: Path) -> None:
        path = write_tiny_gguf(tmp_path / "m.gguf", TinyModel(tensor_type="Q8_0"))
        _, layout, ops = make_program(path, Phase.DECODE)
        starts = [layout.weights[f"blk.0.attn_{part}.weight"].offset for part in "qkv"]
        found = [op for op in ops if op.kind is OpKind.MATMUL and op.weight in starts]
        assert [(op.weight, op.rows) for op in found] == [(starts[0], 64 + 2 * 32)]

    def test_projections_with_biases_run_together(self) -> None:
        _, layout, ops = family("qwen2")
        starts = [layout.weights[f"blk.0.attn_{part}.weight"].offset for part in "qkv"]
        found = [op for op in ops if op.kind is OpKind.MATMUL and op.weight in starts]
        assert [op.weight for op in found] == starts
        assert len({op.after for op in found}) == 1
        assert all(op.bias for op in found)
