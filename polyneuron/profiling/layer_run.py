"""One layer of a model in an arena of its own, computed by the engine's kernels and programs.

The arena holds that layer's weights and nothing else of the model, so a model larger than memory is
run in about one layer's memory.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from polyneuron.actors.arena import LocalArena, format_arena
from polyneuron.config import EngineConfig, FeedForwardMode, Phase, usable_cores
from polyneuron.errors import EngineError
from polyneuron.io.arena_loader import read_all
from polyneuron.io.file_device import open_device
from polyneuron.io.ncf_format import (
    EXTENT_BYTES,
    NcfManifest,
    NcfSection,
    NcfTensor,
    SectionKind,
    round_up,
)
from polyneuron.io.ncf_format import PAGE_BYTES as FILE_PAGE_BYTES
from polyneuron.io.ncf_reader import NcfFile
from polyneuron.io.section_range import SectionRange
from polyneuron.kernels.arena import SPIN_LIMIT, OpFlag, OpKind, ServeStatus, StepStatus, Unit
from polyneuron.model.spec import ModelSpec
from polyneuron.planning.bundles import Residency
from polyneuron.planning.layout import ArenaLayout, plan_layout
from polyneuron.planning.rope_tables import write_rope
from polyneuron.planning.source import ModelSource
from polyneuron.planning.step_program import Compiler, StepOp, write_program

F32 = NDArray[np.float32]

SERVE_SLICE_NS = 1_000_000_000
WAIT_SLICE_NS = 250_000_000
JOIN_TIMEOUT_S = 10.0
FEED_FORWARD_PLACE = "decode.0"
PROGRAM_PLACES = {"attention": "prefill", "feed_forward": FEED_FORWARD_PLACE}
"""The two halves of a layer lie where the engine has its two programs."""


@dataclass(frozen=True, slots=True, eq=False)
class OneLayer:
    """A layer as a model of its own: its tensors are those of layer 0."""

    source: ModelSource
    fixed_begin: int
    """Where in the file's fixed section the layer's norms and attention begin."""
    fixed_bytes: int


def one_layer(ncf: NcfFile, spec: ModelSpec, layer_id: int) -> OneLayer:
    """Describe a layer of a file as a model of one layer."""
    own = [tensor for tensor in ncf.tensors if tensor.layer_id == layer_id]
    fixed = [t for t in own if ncf.sections[t.section_index].kind is SectionKind.FIXED]
    begin = min(tensor.offset for tensor in fixed)
    num_bytes = max(tensor.offset + tensor.num_bytes for tensor in fixed) - begin
    head = NcfSection(
        "fixed", SectionKind.FIXED, 0, round_up(num_bytes, FILE_PAGE_BYTES), np.zeros(0, np.uint32)
    )
    manifest = NcfManifest(
        layout=ncf.manifest.layout,
        spec=ncf.manifest.spec,
        metadata={},
        source=ncf.manifest.source,
        sections=(head, ncf.layer_section(layer_id)),
        tensors=tuple(_as_first(tensor, begin, tensor in fixed) for tensor in own),
    )
    source = ModelSource(ncf.path, replace(spec, num_layers=1), {}, manifest, None)
    return OneLayer(source, begin, num_bytes)


def _as_first(tensor: NcfTensor, begin: int, is_fixed: bool) -> NcfTensor:
    name = f"blk.0.{tensor.name.split('.', 2)[2]}"
    if not is_fixed:
        return replace(tensor, name=name, layer_id=0, section_index=1)
    offset = tensor.offset - begin
    return replace(tensor, name=name, layer_id=0, section_index=0, offset=offset)


class LayerRun:
    """A layer that is in memory; sequences run through it one by one.

    `max_tokens` is the length of the longest sequence. Executor threads run while it is open.
    """

    def __init__(
        self, ncf: NcfFile, spec: ModelSpec, layer_id: int, max_tokens: int, num_threads: int = 0
    ) -> None:
        part = one_layer(ncf, spec, layer_id)
        self.layer_id = layer_id
        self.source = part.source
        self.spec = part.source.spec
        config = EngineConfig(
            num_ctx=max_tokens, num_workers=num_threads or len(usable_cores()), num_npu_threads=0,
            max_tokens=max_tokens, max_sequences=1, max_requests=1, max_logit_rows=1,
            mode=FeedForwardMode.DENSE,
        )  # fmt: skip
        resident = None if self.spec.experts else Residency(1)
        self.layout = plan_layout(part.source.manifest, self.spec, config, resident)
        self._local = LocalArena(self.layout)
        self.arena = self._local.arena
        format_arena(self.arena, self.layout, config.num_workers)
        self._num_ops = {name: self._write(name) for name in PROGRAM_PLACES}
        self._write_inputs()
        self._load(ncf, part)
        self._threads = [self._start_executor(index) for index in range(config.num_workers)]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Let the executors leave and give the memory back."""
        self.arena.stop()
        for thread in self._threads:
            thread.join(JOIN_TIMEOUT_S)
        self._local.close()

    # ---- setting up

    def _write(self, half: str) -> int:
        ops = layer_program(self.spec, self.layout, half)
        write_program(self.arena, self.layout.at(f"boards.program.{PROGRAM_PLACES[half]}"), ops)
        return len(ops)

    def _write_inputs(self) -> None:
        layout, config = self.layout, self.layout.config
        write_rope(self.arena, self.spec, layout)
        for name, values in (
            ("positions", np.arange(config.max_tokens)),
            ("tables", np.arange(layout.num_kv_blocks)),
        ):
            place = layout.at(f"inputs.{name}")
            self.arena.view(place, (len(values),), np.int32)[:] = values
        step = self.arena.step
        step.num_parties[Unit.CPU], step.num_parties[Unit.NPU] = config.num_workers, 0
        step.spin_limit, step.max_tokens = SPIN_LIMIT, config.max_tokens
        step.table_stride = layout.num_kv_blocks
        for name in ("token_ids", "positions", "block_tables", "tables", "logit_rows"):
            setattr(step, name, layout.at(f"inputs.{name}"))

    def _load(self, ncf: NcfFile, part: OneLayer) -> None:
        with open_device(ncf.path, EXTENT_BYTES) as device:
            fixed = SectionRange(ncf, device, ncf.sections[0])
            place = self.layout.at("fixed.section")
            fixed.read_into(part.fixed_begin, self.arena.view(place, (part.fixed_bytes,), np.uint8))
        reads = part.source.reads(self.layout)[1:]  # the first is the fixed section
        read_all(ncf.path, reads, self.arena, lambda _: None)

    def _start_executor(self, index: int) -> threading.Thread:
        # Attached here, not in the thread: an executor takes part in steps rung after that.
        generation = self.arena.attach(index, Unit.CPU, os.getpid())
        thread = threading.Thread(target=self._serve, args=(index, generation), daemon=True)
        thread.start()
        return thread

    def _serve(self, executor: int, generation: int) -> None:
        while self.arena.serve(executor, generation, SERVE_SLICE_NS) is ServeStatus.SLICE:
            pass

    # ---- running

    def cut(self, bound: float) -> None:
        """From now on activations of gates up to `bound` count as zero; of layers in bundles."""
        ops = layer_program(self.spec, self.layout, "feed_forward")
        cut = [replace(op, eps=bound) if op.kind is OpKind.ROWS_UP else op for op in ops]
        write_program(self.arena, self.layout.at(f"boards.program.{FEED_FORWARD_PLACE}"), cut)

    def attention(self, stream: F32) -> F32:
        """Attention: adds to `stream` (tokens, d_model), one sequence; returns its input normed."""
        self._run("attention", stream)
        return self._rows("normed", len(stream), self.spec.d_model)

    def feed_forward(self, stream: F32) -> tuple[F32, F32]:
        """Adds feed forward to `stream`; returns its input normed, and all activations.

        Of a mixture, of each entry of the routes, times its expert's weight.
        """
        self._run("feed_forward", stream)
        count = len(stream)
        normed = self._rows("normed", count, self.spec.d_model)
        each = self.spec.experts.num_used if self.spec.experts else 1
        return normed, self._rows("hidden", count * each, self.spec.d_ff)

    def _rows(self, name: str, count: int, width: int) -> F32:
        stride = self.layout.strides[name] // 4
        place = self.layout.at(f"activations.{name}")
        return self.arena.view(place, (count, stride), np.float32)[:, :width].copy()

    def _run(self, half: str, stream: F32) -> None:
        """One step over a whole sequence from position 0 on; `stream` is changed in place."""
        layout, width = self.layout, self.spec.d_model
        shape = (len(stream), layout.strides["stream"] // 4)
        rows = self.arena.view(layout.at("activations.stream"), shape, np.float32)[:, :width]
        rows[:] = stream
        seq = self.arena.open_step()
        step = self.arena.step
        step.program = layout.at(f"boards.program.{PROGRAM_PLACES[half]}")
        step.program_ops, step.num_tokens = self._num_ops[half], len(stream)
        step.num_logit_rows, step.flags = 0, 0
        self.arena.ring(seq)
        while self.arena.wait_step(seq, WAIT_SLICE_NS) is not StepStatus.DONE:
            if not all(thread.is_alive() for thread in self._threads):
                raise EngineError("an executor thread has ended inside a step")
        stream[:] = rows


def layer_program(spec: ModelSpec, layout: ArenaLayout, half: str) -> list[StepOp]:
    """The prefill ops of one half of the layer; norms and activations are left as floats, too."""
    compiler = Compiler(spec, layout, Phase.PREFILL, [])
    (compiler.attention if half == "attention" else compiler.feed_forward)(0)
    seen = (OpKind.NORM, OpKind.FEED_FORWARD)
    return [
        replace(op, flags=op.flags | OpFlag.WRITE_F32) if op.kind in seen else op
        for op in compiler.ops
    ]
