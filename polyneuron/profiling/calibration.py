"""Runs a text through a model, layer by layer, and hands out what each layer saw.

All tokens pass one layer before the next is read: the memory taken is that of one layer's weights
and of a few rows a token, whatever the model's size. The arithmetic is the engine's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from polyneuron.errors import ConfigError, FormatError
from polyneuron.io.file_device import open_device
from polyneuron.io.ncf_format import EXTENT_BYTES
from polyneuron.io.ncf_reader import NcfFile
from polyneuron.io.section_range import SectionRange
from polyneuron.kernels.gemv import gather_row
from polyneuron.kernels.quant import TILE_ROWS, tile_bytes
from polyneuron.model.ncf_plan import SPARSE_KINDS
from polyneuron.model.spec import ModelSpec
from polyneuron.profiling.layer_run import LayerRun
from polyneuron.profiling.layer_weights import LayerWeights, layer_weights

F32 = NDArray[np.float32]

SEQUENCE_TOKENS = 512
MIN_TOKENS = 32


@dataclass(frozen=True, slots=True, eq=False)
class LayerSample:
    """What all tokens did in one layer; rows are tokens in the order of the text."""

    layer_id: int
    attention_input: F32
    """Attention's input, normed (tokens, d_model)."""
    ffn_input: F32
    """Feed forward's input, normed (tokens, d_model)."""
    gate: F32
    """The value that decides (tokens, d_ff): gate, or up where there is none."""
    hidden: F32
    """What meets the down matrix (tokens, d_ff)."""
    starts: tuple[int, ...]
    """Where sequences begin."""
    weights: LayerWeights
    """Valid until the next layer is asked for."""
    bound: float = 0.0
    """Activations of gates up to it count as zero."""

    @property
    def needed(self) -> NDArray[np.bool_]:
        """Whose value decides that more than its gate is computed (tokens, d_ff)."""
        return self.gate > 0 if self.bound == 0 else self.hidden != 0


def check_sparse(path: object, spec: ModelSpec) -> None:
    """Raise ConfigError for a model whose neurons are never exactly zero."""
    if spec.experts is not None:
        raise ConfigError(
            f"{path}: a mixture of experts, whose neurons are not profiled; it runs without"
        )
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


def check_finite(path: object, layer: int, what: str, values: F32) -> None:
    """FormatError naming file, layer and token when values (tokens, n) are not all finite."""
    if not np.isfinite(values).all():
        token = int(np.flatnonzero(~np.isfinite(values).all(axis=1))[0])
        raise FormatError(
            f"{path}: layer {layer}'s {what} at token {token} are not finite numbers: its weights "
            "are damaged or overflow; nothing can be told from them, convert the source again"
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
        longest = max(len(sequence) for sequence in self.sequences)
        while self.layer_id < self.spec.num_layers:
            with LayerRun(self.ncf, self.spec, self.layer_id, longest) as run:
                sample = self._sample(run, progress)
                self.layer_id += 1
                yield sample

    def _sample(self, run: LayerRun, progress: Callable[[int, int], None]) -> LayerSample:
        spec, count = self.spec, len(self.stream)
        bound = self.bounds[self.layer_id] if self.bounds else 0.0
        if bound:
            run.cut(bound)
        attention = np.empty((count, spec.d_model), np.float32)
        normed = np.empty((count, spec.d_model), np.float32)
        hidden = np.empty((count, spec.d_ff), np.float32)
        total = count * spec.num_layers
        for rows in self.rows():
            stream = self.stream[rows]
            attention[rows] = run.attention(stream)
            normed[rows], hidden[rows] = run.feed_forward(stream)
            progress(self.layer_id * count + rows.stop, total)
        weights = layer_weights(run)
        gate = weights.deciding.product(normed)
        for what, values in (
            ("attention's input", attention), ("feed forward's input", normed),
            ("gate values", gate), ("activations", hidden),
        ):  # fmt: skip
            check_finite(self.ncf.path, self.layer_id, what, values)
        starts = tuple(rows.start for rows in self.rows())
        return LayerSample(self.layer_id, attention, normed, gate, hidden, starts, weights, bound)
