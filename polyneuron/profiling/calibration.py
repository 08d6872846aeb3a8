"""Runs a text through a model, layer by layer, and hands out what each layer saw.

All tokens pass one layer before the next is read: the memory taken is that of one layer's weights
and of a few rows a token, whatever the model's size. The arithmetic is the engine's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from polyneuron.errors import ConfigError
from polyneuron.io.file_device import open_device
from polyneuron.io.ncf_format import EXTENT_BYTES
from polyneuron.io.ncf_reader import NcfFile
from polyneuron.io.section_range import SectionRange
from polyneuron.kernels.gemv import gather_row
from polyneuron.kernels.quant import TILE_ROWS, tile_bytes
from polyneuron.kernels.routes import Routes, read_routes
from polyneuron.model.ncf_plan import SPARSE_KINDS
from polyneuron.model.spec import ModelSpec
from polyneuron.profiling.expert_sample import ExpertLayer
from polyneuron.profiling.layer_run import LayerRun
from polyneuron.profiling.layer_weights import layer_weights
from polyneuron.profiling.sample import LayerSample, check_finite

F32 = NDArray[np.float32]

SEQUENCE_TOKENS = 512
MIN_TOKENS = 32


def check_sparse(path: object, spec: ModelSpec) -> None:
    """Raise ConfigError for a model whose neurons are never exactly zero."""
    if spec.feed_forward not in SPARSE_KINDS:
        raise ConfigError(
            f"{path}: {spec.feed_forward.name.lower()} activations are never exactly zero: every "
            "neuron is active and there is nothing to profile; give a ReLU, dReLU or ReGLU model, "
            "or --threshold to find bounds under which neurons may count as inactive"
        )
    if not spec.block.is_profiled:
        raise ConfigError(
            f"{path}: layers of {spec.family} are made otherwise than Llama's, and a profile does "
            "not follow them; run it without one: --mode exact, or dense where it keeps tiles"
        )


def cut_sequences(tokens: Sequence[int], length: int = SEQUENCE_TOKENS) -> list[list[int]]:
    """The text in sequences of at most `length`; a rest of under 32 tokens is left out.

    ConfigError when the text is shorter than that.
    """
    parts = [list(tokens[at : at + length]) for at in range(0, len(tokens), length)]
    kept = [part for part in parts if len(part) >= min(MIN_TOKENS, length)]
    if not kept:
        raise ConfigError(
            f"the text has {len(tokens)} tokens, a profile needs at least {MIN_TOKENS}: give a "
            "longer text with --text"
        )
    return kept


def embed(ncf: NcfFile, spec: ModelSpec, tokens: NDArray[np.int64]) -> F32:
    """The embedding rows of `tokens` (tokens, d_model); only their tiles are read."""
    tensor = ncf.tensor("token_embd.weight")
    assert tensor.storage is not None
    one_tile = tile_bytes(tensor.storage, tensor.cols)
    out = np.empty((len(tokens), spec.d_model), np.float32)
    tile = np.empty(one_tile, np.uint8)
    at_tile = -1
    with open_device(ncf.path, EXTENT_BYTES) as device:
        fixed = SectionRange(ncf, device, ncf.sections[tensor.section_index])
        for place in np.argsort(tokens, kind="stable"):
            index, row = divmod(int(tokens[place]), TILE_ROWS)
            if index != at_tile:
                fixed.read_into(tensor.offset + index * one_tile, tile)
                at_tile = index
            out[place] = gather_row(tensor.storage, tile, tensor.cols, row)
    return out


@dataclass(slots=True)
class Calibration:
    """All tokens on their way through the layers; `stream` (tokens, d_model) is before `layer`."""

    ncf: NcfFile
    spec: ModelSpec
    sequences: list[list[int]]
    stream: F32
    layer_id: int = 0
    bounds: Sequence[float] = ()
    """Of each layer: what counts as zero; empty: nothing does but zeros."""

    @classmethod
    def begin(cls, ncf: NcfFile, spec: ModelSpec, sequences: list[list[int]]) -> Calibration:
        """Before the first layer."""
        tokens = np.concatenate([np.asarray(s, np.int64) for s in sequences])
        return cls(ncf, spec, sequences, embed(ncf, spec, tokens))

    def rows(self) -> list[slice]:
        """The rows of each sequence."""
        ends = np.cumsum([len(sequence) for sequence in self.sequences])
        return [slice(int(e) - len(s), int(e)) for e, s in zip(ends, self.sequences, strict=True)]

    def layers(
        self, progress: Callable[[int, int], None] = lambda done, total: None
    ) -> Iterator[LayerSample]:
        """Run layer after layer from `layer_id` on; `stream` is the next one's input at each.

        `progress` gets tokens times layers, done and in all. DeviceError or ChecksumError name
        file and place.
        """
        for run in self._runs():
            yield self._sample(run, progress)

    def expert_layers(
        self, progress: Callable[[int, int], None] = lambda done, total: None
    ) -> Iterator[ExpertLayer]:
        """The same of a mixture of experts."""
        for run in self._runs():
            yield self._expert_layer(run, progress)

    def _runs(self) -> Iterator[LayerRun]:
        longest = max(len(sequence) for sequence in self.sequences)
        while self.layer_id < self.spec.num_layers:
            with LayerRun(self.ncf, self.spec, self.layer_id, longest) as run:
                yield run

    def _step(
        self, run: LayerRun, progress: Callable[[int, int], None]
    ) -> Iterator[tuple[slice, F32, F32, F32]]:
        """A sequence's rows, its two normed inputs, and the activations; then the next layer's."""
        count = len(self.stream)
        for rows in self.rows():
            stream = self.stream[rows]
            attention = run.attention(stream)
            normed, hidden = run.feed_forward(stream)
            progress(self.layer_id * count + rows.stop, count * self.spec.num_layers)
            yield rows, attention, normed, hidden
        self.layer_id += 1

    def _inputs(self) -> tuple[F32, F32]:
        shape = (len(self.stream), self.spec.d_model)
        return np.empty(shape, np.float32), np.empty(shape, np.float32)

    def _check_inputs(self, layer_id: int, attention: F32, normed: F32) -> None:
        named = (("attention's input", attention), ("feed forward's input", normed))
        for what, values in named:
            check_finite(self.ncf.path, layer_id, what, values)

    def _sample(self, run: LayerRun, progress: Callable[[int, int], None]) -> LayerSample:
        layer_id, (attention, normed) = self.layer_id, self._inputs()
        bound = self.bounds[layer_id] if self.bounds else 0.0
        if bound:
            run.cut(bound)
        hidden = np.empty((len(self.stream), self.spec.d_ff), np.float32)
        for rows, *values in self._step(run, progress):
            attention[rows], normed[rows], hidden[rows] = values
        weights = layer_weights(run)
        gate = weights.deciding.product(normed)
        self._check_inputs(layer_id, attention, normed)
        for what, found in (("gate values", gate), ("activations", hidden)):
            check_finite(self.ncf.path, layer_id, what, found)
        starts = tuple(rows.start for rows in self.rows())
        return LayerSample(layer_id, attention, normed, gate, hidden, starts, weights, bound)

    def _expert_layer(self, run: LayerRun, progress: Callable[[int, int], None]) -> ExpertLayer:
        layer_id, (attention, normed) = self.layer_id, self._inputs()
        experts = self.spec.experts
        assert experts is not None
        parts: list[tuple[int, Routes, F32]] = []
        for rows, attended, fed, hidden in self._step(run, progress):
            attention[rows], normed[rows] = attended, fed
            routes = read_routes(run.arena, run.layout.at("activations.routes"))
            parts.append((rows.start, routes, hidden))
        self._check_inputs(layer_id, attention, normed)
        return ExpertLayer(
            self.ncf.path, layer_id, attention, normed, tuple(rows.start for rows in self.rows()),
            experts.num_experts, experts.num_used, run, parts,
        )  # fmt: skip
