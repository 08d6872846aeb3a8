"""What all tokens did in one layer of a mixture, expert by expert."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from polyneuron.kernels.routes import Routes
from polyneuron.profiling.layer_run import LayerRun
from polyneuron.profiling.layer_weights import deciding_rows, expert_weights
from polyneuron.profiling.sample import LayerSample, check_finite

F32 = NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class ExpertSample:
    """One expert's, of the tokens that chose it."""

    expert: int
    tokens: NDArray[np.intp]
    """(n), ascending."""
    sample: LayerSample
    """Its rows are those tokens; neurons are the expert's own."""


@dataclass(slots=True, eq=False)
class ExpertLayer:
    """One layer of a mixture; rows are tokens in the order of the text."""

    path: object
    layer_id: int
    attention_input: F32
    """Attention's input, normed (tokens, d_model)."""
    ffn_input: F32
    """Feed forward's input, normed (tokens, d_model)."""
    starts: tuple[int, ...]
    """Where sequences begin."""
    num_experts: int
    num_used: int
    run: LayerRun
    """The layer in memory, until the next one is asked for."""
    parts: list[tuple[int, Routes, F32]]
    """Of each sequence: its first token, routes, and what meets the down rows (entries, d_ff)."""

    @property
    def num_tokens(self) -> int:
        """Of the text."""
        return len(self.ffn_input)

    def experts(self) -> Iterator[ExpertSample]:
        """One expert after another."""
        for expert in range(self.num_experts):
            yield self.expert(expert)

    def tokens_of(self, expert: int) -> NDArray[np.intp]:
        """The tokens that chose it, ascending."""
        found = [
            first + routes.tokens[routes.entries(expert)].astype(np.intp)
            for first, routes, _ in self.parts
        ]
        return np.concatenate(found)

    def gate_rows(self, expert: int, count: int) -> F32:
        """So many of an expert's deciding rows, evenly spaced (count or fewer, d_model)."""
        return deciding_rows(self.run, expert, count)

    def expert(self, expert: int) -> ExpertSample:
        """Of one expert; its weights are decoded when they are asked for."""
        tokens, weights = self.tokens_of(expert), expert_weights(self.run, expert)
        hidden = np.concatenate([part[r.entries(expert)] for _, r, part in self.parts])
        ffn = np.ascontiguousarray(self.ffn_input[tokens])
        gate = weights.deciding.product(ffn)
        for what, values in (("gate values", gate), ("activations", hidden)):
            check_finite(self.path, self.layer_id, what, values)
        attention = np.ascontiguousarray(self.attention_input[tokens])
        sample = LayerSample(self.layer_id, attention, ffn, gate, hidden, (0,), weights)
        return ExpertSample(expert, tokens, sample)
