"""A plain numpy forward pass over a GGUF: the oracle that the engine's logits are compared with.

No cache, no tiles, no quantised activations: weights are decoded by the `gguf` package and all
arithmetic is in one float type.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import DTypeLike, NDArray

from polyneuron.io.gguf_file import check_supported
from polyneuron.io.model_files import FilesReader
from polyneuron.kernels.gemv import FeedForwardKind, RopeLayout
from polyneuron.model.architecture import describe
from polyneuron.model.block import Residual
from polyneuron.model.model_header import read_model_header
from polyneuron.model.rope import rope_frequencies
from polyneuron.model.spec import LayerTensors, tensor_map, tensor_shapes

Floats = NDArray[Any]
_erf = np.vectorize(math.erf, otypes=[np.float64])


class ReferenceModel:
    """The weights of a GGUF, or of a folder, in `dtype` and its forward pass."""

    def __init__(self, path: Path | str, dtype: DTypeLike = np.float64) -> None:
        header = read_model_header(Path(path))
        check_supported(header)
        self.spec = describe(header)
        self.names = tensor_map(self.spec)
        self.dtype = dtype
        self.cache_dtype = dtype
        """What keys and values are rounded to; an engine's cache has float16."""
        self._header = header
        self._routed: Floats | None = None
        """What the running layer's router reads, where that is not feed forward's input."""
        self.weights = self._load(tuple(tensor_shapes(self.spec)))

    def _load(self, names: tuple[str, ...]) -> dict[str, Floats]:
        return {name: self.decoded(name) for name in names}

    def decoded(self, name: str) -> Floats:
        """The values of one tensor."""
        tensor = self._header.tensor(name)
        raw = np.empty(tensor.num_bytes, np.uint8)
        with FilesReader(self._header.files) as reader:
            reader.read(tensor.offset, raw)
        rows = tensor.num_cols if tensor.is_turned else tensor.num_rows
        values = dequantize(raw.reshape(rows, -1), GGMLQuantizationType(tensor.type_id))
        values = values.T if tensor.is_turned else values.reshape(tensor.shape)
        decoded: Floats = values.astype(self.dtype)
        return decoded

    def logits(self, token_ids: NDArray[np.integer[Any]]) -> Floats:
        """token_ids (n) -> logits (n, vocab_size), row i after tokens 0..i."""
        block, names = self.spec.block, self.names
        x = self.weights[names.token_embd][token_ids]
        if block.embedding_scale:
            x = x * np.asarray(block.embedding_scale, self.dtype)
        if names.positions is not None:
            first = block.position_offset
            x = x + self.weights[names.positions][first : first + len(x)]
        for layer_id, layer in enumerate(names.layers):
            x = self._layer(layer_id, layer, x)
        normed = self._norm(x, names.output_norm, names.output_norm_bias)
        return self._capped(normed @ self.weights[names.output].T, block.logit_cap)

    def _layer(self, layer_id: int, layer: LayerTensors, x: Floats) -> Floats:
        experts = self.spec.experts
        self._routed = x if experts is not None and experts.is_early else None
        first = self._norm(x, layer.attn_norm, layer.attn_norm_bias)
        attended = self._attention(layer_id, layer, first)
        if layer.post_attn_norm is not None:
            attended = self._norm(attended, layer.post_attn_norm)
        second = first
        if layer.ffn_norm is not None:
            is_parallel = self.spec.block.residual is Residual.PARALLEL_NORMS
            source = x if is_parallel else x + attended
            second = self._norm(source, layer.ffn_norm, layer.ffn_norm_bias)
        fed = self._feed_forward(layer, second)
        if layer.post_ffn_norm is not None:
            fed = self._norm(fed, layer.post_ffn_norm)
        out: Floats = x + attended + fed
        return out

    def _capped(self, values: Floats, cap: float) -> Floats:
        capped: Floats = values if not cap else cap * np.tanh(values / cap)
        return capped.astype(self.dtype)

    def gate_and_up(self, layer_id: int, x: Floats) -> tuple[Floats | None, Floats]:
        """Pre-activations (n, d_ff) of one layer's neurons for normed inputs x (n, d_model)."""
        layer = self.names.layers[layer_id]
        gate = None
        if layer.ffn_gate is not None:
            gate = self._project(x, layer.ffn_gate, layer.ffn_gate_bias)
        return gate, self._project(x, layer.ffn_up, layer.ffn_up_bias)

    def expert_weights(self, layer: LayerTensors, x: Floats) -> Floats:
        """x (n, d_model) -> (n, num_experts), zero where a token has not chosen an expert."""
        experts = self.spec.experts
        assert experts is not None and layer.router is not None
        logits = (x if self._routed is None else self._routed) @ self.weights[layer.router].T
        if experts.is_sigmoid:
            return self._sigmoid_weights(logits, experts.num_used)
        shares = np.exp(logits - logits.max(axis=-1, keepdims=True))
        shares /= shares.sum(axis=-1, keepdims=True)
        chosen = np.argsort(-logits, axis=-1, kind="stable")[:, : experts.num_used]
        weights = np.zeros_like(shares)
        np.put_along_axis(weights, chosen, np.take_along_axis(shares, chosen, 1), 1)
        if experts.is_normalised:
            weights /= weights.sum(axis=-1, keepdims=True)
        return weights

    def _sigmoid_weights(self, logits: Floats, num_used: int) -> Floats:
        """The same where weights are sigmoids of the chosen experts' logits, by their sum."""
        chosen = np.argsort(-logits, axis=-1, kind="stable")[:, :num_used]
        weights = np.zeros_like(logits)
        gates = 1.0 / (1.0 + np.exp(-np.take_along_axis(logits, chosen, 1)))
        np.put_along_axis(weights, chosen, gates / gates.sum(axis=1, keepdims=True), 1)
        return weights

    def _mixture(self, layer: LayerTensors, x: Floats) -> Floats:
        weights = self.expert_weights(layer, x)
        out: Floats = np.zeros_like(x)
        for expert in range(weights.shape[1]):
            names = (layer.ffn_gate, layer.ffn_up, layer.ffn_down)
            matrices = [self.weights[name][expert] if name else None for name in names]
            out = out + weights[:, expert : expert + 1] * self._block(x, *matrices)
        if layer.shared_gate is None:
            return out
        assert layer.shared_ffn_up is not None and layer.shared_ffn_down is not None
        names = (layer.shared_ffn_gate, layer.shared_ffn_up, layer.shared_ffn_down)
        shared = self._block(x, *(self.weights[name] if name else None for name in names))
        share = 1.0 / (1.0 + np.exp(-(x @ self.weights[layer.shared_gate])))
        return out + share[:, None].astype(self.dtype) * shared

    def _rotations(self, layer_id: int, num_positions: int) -> tuple[Floats, Floats]:
        is_local = self.spec.block.is_local(layer_id)
        rope = (self.spec.local_rope if is_local else None) or self.spec.rope
        frequencies, magnitude = rope_frequencies(rope, self.spec.context_length)
        angles = np.arange(num_positions)[:, None] * frequencies
        return (
            (np.cos(angles) * magnitude).astype(self.dtype),
            (np.sin(angles) * magnitude).astype(self.dtype),
        )

    def _norm(self, x: Floats, name: str | None, bias: str | None = None) -> Floats:
        assert name is not None
        if bias is not None:
            x = x - x.mean(axis=-1, keepdims=True)
        mean_square = np.mean(np.square(x), axis=-1, keepdims=True)
        normed: Floats = x / np.sqrt(mean_square + np.asarray(self.spec.norm_eps, self.dtype))
        return normed * self.weights[name] + (0 if bias is None else self.weights[bias])

    def _project(self, x: Floats, weight: str, bias: str | None) -> Floats:
        out: Floats = x @ self.weights[weight].T
        return out if bias is None else out + self.weights[bias]

    def _rotate(self, x: Floats, cos: Floats, sin: Floats) -> Floats:
        """x (n, heads, head_dim), turned in its first rotary_dim elements."""
        rotary_dim, half = self.spec.rope.rotary_dim, self.spec.rope.rotary_dim // 2
        is_interleaved = self.spec.rope.layout is RopeLayout.INTERLEAVED
        first = slice(0, rotary_dim, 2) if is_interleaved else slice(0, half)
        second = slice(1, rotary_dim, 2) if is_interleaved else slice(half, rotary_dim)
        a, b = x[..., first], x[..., second]
        out = x.copy()
        out[..., first] = a * cos[:, None] - b * sin[:, None]
        out[..., second] = a * sin[:, None] + b * cos[:, None]
        return out

    def _attention(self, layer_id: int, layer: LayerTensors, x: Floats) -> Floats:
        spec, num_tokens = self.spec, len(x)
        cos, sin = self._rotations(layer_id, num_tokens)
        is_rotated = spec.block.is_rotated(layer_id)
        q = self._project(x, layer.attn_q, layer.attn_q_bias)
        k = self._project(x, layer.attn_k, layer.attn_k_bias)
        v = self._project(x, layer.attn_v, layer.attn_v_bias)
        q = q.reshape(num_tokens, spec.num_heads, spec.head_dim)
        k = k.reshape(num_tokens, spec.num_kv_heads, spec.head_dim)
        v = v.reshape(num_tokens, spec.num_kv_heads, spec.head_dim)
        if layer.attn_q_norm is not None and layer.attn_k_norm is not None:
            if spec.is_qk_norm_wide:
                q, k = (part.reshape(num_tokens, 1, -1) for part in (q, k))
            q, k = self._norm(q, layer.attn_q_norm), self._norm(k, layer.attn_k_norm)
        q = q.reshape(num_tokens, spec.num_heads, spec.head_dim)
        k = k.reshape(num_tokens, spec.num_kv_heads, spec.head_dim)
        if is_rotated:
            q, k = self._rotate(q, cos, sin), self._rotate(k, cos, sin)
        group = spec.num_heads // spec.num_kv_heads
        k, v = (part.astype(self.cache_dtype).astype(self.dtype) for part in (k, v))
        k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
        scale = np.asarray(spec.attention_scale, self.dtype)
        scores = self._capped(np.einsum("qhd,khd->hqk", q, k) * scale, spec.block.attention_cap)
        seen = np.tri(num_tokens, dtype=bool)
        if window := spec.block.window_of(layer_id):
            seen = seen & ~np.tri(num_tokens, k=-window, dtype=bool)
        scores = np.where(seen, scores, -np.inf)
        shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
        shares /= shares.sum(axis=-1, keepdims=True)
        mixed = np.einsum("hqk,khd->qhd", shares, v).reshape(num_tokens, spec.q_dim)
        return self._project(mixed, layer.attn_output, layer.attn_output_bias)

    def _feed_forward(self, layer: LayerTensors, x: Floats) -> Floats:
        if self.spec.experts:
            return self._mixture(layer, x)
        gate, up = self.gate_and_up(self.names.layers.index(layer), x)
        return self._project(self._activated(gate, up), layer.ffn_down, layer.ffn_down_bias)

    def _block(
        self, x: Floats, gate_rows: Floats | None, up_rows: Floats | None, down: Floats | None
    ) -> Floats:
        assert up_rows is not None and down is not None
        gate = x @ gate_rows.T if gate_rows is not None else None
        return self._activated(gate, x @ up_rows.T) @ down.T

    def _activated(self, gate: Floats | None, up: Floats) -> Floats:
        zero = np.asarray(0.0, self.dtype)
        match self.spec.feed_forward:
            case FeedForwardKind.SILU:
                assert gate is not None
                hidden = gate / (1.0 + np.exp(-gate)) * up
            case FeedForwardKind.REGLU:
                assert gate is not None
                hidden = np.maximum(gate, zero) * up
            case FeedForwardKind.DRELU:
                assert gate is not None
                hidden = np.maximum(gate, zero) * np.maximum(up, zero)
            case FeedForwardKind.RELU:
                hidden = np.maximum(up, zero)
            case FeedForwardKind.GEGLU:
                assert gate is not None
                inner = np.sqrt(2.0 / np.pi) * (gate + 0.044715 * gate**3)
                hidden = 0.5 * gate * (1.0 + np.tanh(inner)) * up
            case FeedForwardKind.GELU:
                hidden = 0.5 * up * (1.0 + _erf(up / np.sqrt(2.0)))
        activated: Floats = hidden.astype(self.dtype)
        return activated
