"""What each matrix of a model with planted sparsity is made of; docs/SYNTH.md derives it.

Columns 0 to 31 of the residual stream hold a constant in every layer: embeddings set it, and no
attention output and no down row writes there. A row's values in those columns are its bias.
What is written to the columns behind them falls in size from block to block: the stream has a
decaying spectrum. What reads them treats all alike. A mixture's neurons are those of its experts,
one after another, each expert's with rates of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from polyneuron.kernels.gemv import RopeLayout
from polyneuron.kernels.quant import BLOCK_COLS
from polyneuron.kernels.random_rows import random_bytes
from polyneuron.model.rope import rope_frequencies
from polyneuron.model.spec import ModelSpec
from polyneuron.synth import routing
from polyneuron.synth.rates import gate_thresholds, squared_activation, up_shift
from polyneuron.synth.recipe import Recipe, stream_key
from polyneuron.synth.spectrum import block_variances

CONSTANT = 1.0
"""Of the constant columns in the residual stream; the others' variance begins with a mean of 1."""
ATTENTION_VARIANCE = 0.4
"""What all attention layers together add to it."""
FEED_FORWARD_VARIANCE = 0.5
RECENCY = 1.5
"""Attention falls with this power of the distance, about."""
RANDOM_QUERY_STD = 0.3
LOGIT_STD = 2.0
SILU_RMS = 0.6
"""Of silu(gate) * up, both standard normal."""
WINDOW = 512
"""Positions over which attention's averaging is counted."""


@dataclass(frozen=True, slots=True)
class StreamScales:
    """The residual stream where one layer reads it: rms of its varying columns, and its norm."""

    attention_rms: float
    attention_norm: float
    feed_forward_rms: float
    feed_forward_norm: float


class Planting:
    """Recipes of a model's matrices by layer and role; `sparsity` None: no neuron is ever zero."""

    def __init__(self, spec: ModelSpec, sparsity: float | None, seed: int) -> None:
        self.spec = spec
        self.sparsity = sparsity
        self._seed = seed
        self._varying = spec.d_model - BLOCK_COLS
        self._block_sizes = self._stream_sizes()
        self._scales = self._stream_scales()
        self._query = math.sqrt(2.0 * RECENCY * math.log(spec.rope.base) / spec.head_dim**0.5)
        self._averaging = self._attention_averaging()

    def hottest_first(self, layer_id: int) -> NDArray[np.uint32]:
        """The layer's neurons (num_neurons), of each expert in the order of their rates."""
        d_ff, count = self.spec.d_ff, self.spec.num_neurons
        key = stream_key(self._seed, f"blk.{layer_id}.neuron_order")
        words = random_bytes(key, 8 * count).view(np.uint64).reshape(-1, d_ff)
        order = np.argsort(words, axis=1, kind="stable") + np.arange(0, count, d_ff)[:, None]
        return order.reshape(count).astype(np.uint32)

    def experts_first(self, layer_id: int) -> NDArray[np.intp]:
        """The layer's experts (num_experts), the most chosen first."""
        assert self.spec.experts is not None
        key = stream_key(self._seed, f"blk.{layer_id}.expert_order")
        words = random_bytes(key, 8 * self.spec.experts.num_experts).view(np.uint64)
        return np.argsort(words, kind="stable")

    def head_norm(self) -> float:
        """Weight of the norms of q and k, where a family has them: the size heads have without."""
        return self._query / math.sqrt(2.0)

    def recipe(self, layer_id: int | None, role: str) -> Recipe:
        """What a matrix is made of."""
        spread = 1.0 / math.sqrt(self._varying)
        if layer_id is None:
            if role == "output":
                return Recipe(LOGIT_STD * spread, self._bias(self.spec.vocab_size, 0.0))
            return Recipe(1.0, self._bias(self.spec.vocab_size, CONSTANT), self._block_sizes)
        scales = self._scales[layer_id]
        match role:
            case "attn_q":
                return Recipe(
                    RANDOM_QUERY_STD * spread, self._position_bias(scales, self.spec.q_dim)
                )
            case "attn_k":
                return Recipe(
                    RANDOM_QUERY_STD * spread, self._position_bias(scales, self.spec.kv_dim)
                )
            case "attn_v":
                return Recipe(spread, self._bias(self.spec.kv_dim, 0.0))
            case "attn_output":
                row_sizes = np.repeat(self._block_sizes, BLOCK_COLS)
                return Recipe(self._output_std(scales), None, row_sizes=row_sizes)
            case "ffn_gate_inp":
                return Recipe(routing.LOGIT_STD * spread, self._router_bias(layer_id, scales))
            case "ffn_gate":
                return Recipe(spread, self._gate_bias(layer_id, scales))
            case "ffn_up":
                shift = 0.0 if self.sparsity is None else up_shift() * _one(scales)
                return Recipe(spread, self._bias(self.spec.num_neurons, shift))
            case "ffn_down":
                std = self._down_std(scales)
                return Recipe(std, None, self._block_sizes, is_by_neuron=True)
        raise ValueError(f"role: {role}")

    def _bias(self, num_rows: int, value: float) -> NDArray[np.float32]:
        return np.full(num_rows, value, np.float32)

    def _stream_sizes(self) -> NDArray[np.float32]:
        """(d_model / 32): rms of what is written to each block of columns; none to the constant."""
        variances = block_variances(self._varying // BLOCK_COLS)
        return np.concatenate([[0.0], np.sqrt(variances)]).astype(np.float32)

    def _stream_scales(self) -> list[StreamScales]:
        variance, scales = 1.0, []
        for _ in range(self.spec.num_layers):
            before, norm_before = math.sqrt(variance), self._norm(variance)
            variance += ATTENTION_VARIANCE / self.spec.num_layers
            scales.append(
                StreamScales(before, norm_before, math.sqrt(variance), self._norm(variance))
            )
            variance += FEED_FORWARD_VARIANCE / self.spec.num_layers
        return scales

    def _norm(self, variance: float) -> float:
        squares = BLOCK_COLS * CONSTANT**2 + self._varying * variance
        return math.sqrt(squares / self.spec.d_model)

    def _position_bias(self, scales: StreamScales, num_rows: int) -> NDArray[np.float32]:
        """The same vector in every head of q and k, in the first element of each rotated pair.

        Rotation turns it by the position, so scores fall with the logarithm of the distance.
        """
        value = self._query * scales.attention_norm / (BLOCK_COLS * CONSTANT)
        place = np.arange(num_rows) % self.spec.head_dim
        is_halved = self.spec.rope.layout is RopeLayout.HALVES
        is_first = place < self.spec.head_dim // 2 if is_halved else place % 2 == 0
        return np.where(is_first, np.float32(value), np.float32(0.0))

    def _attention_averaging(self) -> float:
        """Sum of squared attention weights: the variance that averaging leaves."""
        frequencies, _ = rope_frequencies(self.spec.rope)
        distance = np.arange(min(WINDOW, self.spec.context_length))
        score = self._query**2 * np.cos(distance[:, None] * frequencies).sum(axis=1)
        weights = np.exp((score - score.max()) / math.sqrt(self.spec.head_dim))
        return float(np.square(weights / weights.sum()).sum())

    def _output_std(self, scales: StreamScales) -> float:
        variance = ATTENTION_VARIANCE / self.spec.num_layers
        value = scales.attention_rms / scales.attention_norm * math.sqrt(self._averaging)
        return math.sqrt(variance / self.spec.q_dim) / value

    def _router_bias(self, layer_id: int, scales: StreamScales) -> NDArray[np.float32]:
        order = self.experts_first(layer_id)
        bias = np.empty(len(order), np.float32)
        bias[order] = routing.LOGIT_STD * routing.expert_biases(len(order)) * _one(scales)
        return bias

    def _gate_bias(self, layer_id: int, scales: StreamScales) -> NDArray[np.float32]:
        bias = self._bias(self.spec.num_neurons, 0.0)
        if self.sparsity is not None:
            thresholds = gate_thresholds(self.spec.d_ff, self.sparsity)
            num_experts = self.spec.num_neurons // self.spec.d_ff
            bias[self.hottest_first(layer_id)] = np.tile(-thresholds * _one(scales), num_experts)
        return bias

    def _down_std(self, scales: StreamScales) -> float:
        variance = FEED_FORWARD_VARIANCE / self.spec.num_layers
        size = scales.feed_forward_rms / scales.feed_forward_norm
        if self.sparsity is None:
            squares = SILU_RMS**2 * self.spec.d_ff
        else:
            squares = squared_activation(self.spec.d_ff, self.sparsity)
        if self.spec.experts is not None:
            squares *= routing.squared_weights(self.spec.experts)
        return math.sqrt(variance / squares) / size**2


def _one(scales: StreamScales) -> float:
    """The first block's value that adds one deviation of a row's product with the stream."""
    return scales.feed_forward_rms / (BLOCK_COLS * CONSTANT)


class PlainWeights:
    """Recipes of a model without planted sparsity: branches that keep the stream's size."""

    BRANCH_VARIANCE = 1.0
    """What all layers together add to the stream's, of either kind."""

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        head_std = LOGIT_STD / math.sqrt(spec.d_model)
        self._head_std = head_std
        self._stream_rms = head_std if spec.tied_head else 1.0

    def recipe(self, layer_id: int | None, role: str) -> Recipe:
        """What a matrix is made of."""
        spec = self.spec
        branch = self._stream_rms * math.sqrt(self.BRANCH_VARIANCE / spec.num_layers)
        if layer_id is None:
            return Recipe(self._head_std if role == "output" else self._stream_rms, None)
        if role == "attn_output":
            return Recipe(branch / math.sqrt(spec.q_dim), None)
        if role == "ffn_down":
            return Recipe(branch / SILU_RMS / math.sqrt(spec.d_ff), None)
        return Recipe(1.0 / math.sqrt(spec.d_model), None)
