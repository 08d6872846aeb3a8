"""Computes a whole dense op of a step by a back end's graphs: matrices, and gate, up, activation.

Rows go run by run of a hot width. Outputs get what `kernels/src/program.c` would write there; a
residual is added to when all runs are done, since an op that fails half way is computed again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyneuron.backends.backend import Backend, Buffers, Graph, ShapeBucket
from polyneuron.backends.graphs import GraphCache, row_runs, token_bucket
from polyneuron.errors import BackendError
from polyneuron.kernels.arena import Arena, OpFlag, OpKind
from polyneuron.kernels.buffers import ACT_BLOCK, F32
from polyneuron.kernels.gemv import FeedForwardKind, feed_forward_act, softcap
from polyneuron.kernels.quant import (
    BLOCK_COLS,
    TILE_ROWS,
    StorageType,
    num_tiles,
    quantize_acts,
    tile_bytes,
)

INPUT = 2
"""The slot of unpacked activations, after those of up and gate."""
Matrix = tuple[StorageType, int]
"""How a matrix is stored and where it begins."""
Graphs = dict[tuple[StorageType, int], Graph]
"""The graphs of an op by the storage of its matrices and the rows of a run."""


def matrices(op: Any) -> list[Matrix]:
    """The matrices of an op: one, or up and, where there is one, gate."""
    own = (StorageType(op.weight_type), int(op.weight))
    if op.kind == OpKind.MATMUL:
        return [own]
    return [(StorageType(op.up_type), int(op.up_weight)), *([own] if op.weight else [])]


def weight_bytes(op: Any) -> dict[int, int]:
    """Bytes of each matrix of an op, by its place in the arena."""
    return {
        offset: num_tiles(op.rows) * tile_bytes(storage, op.cols)
        for storage, offset in matrices(op)
    }


class DenseOps:
    """Ops of one arena on one back end."""

    def __init__(self, arena: Arena, backend: Backend, graphs: GraphCache) -> None:
        self._arena, self._backend, self._graphs = arena, backend, graphs
        self._takes_floats = backend.capabilities().takes_floats
        self._memory: dict[tuple[int, int, int], F32] = {}
        """Of outputs and unpacked activations, used again by every op."""
        self._x: NDArray[Any] = np.empty(0, np.float32)
        """The running op's input."""

    def graphs(self, op: Any, num_tokens: int) -> Graphs | None:
        """The graphs an op needs; None while there is one that is not there."""
        tokens = token_bucket(num_tokens, int(self._arena.step.max_tokens))
        wanted = {
            (storage, rows): ShapeBucket(tokens, rows, op.cols, storage)
            for storage, _ in matrices(op)
            for _, rows in row_runs(op.rows, op.cols)
        }
        found = {key: self._graphs.get(bucket) for key, bucket in wanted.items()}
        graphs = {key: graph for key, graph in found.items() if graph is not None}
        return graphs if len(graphs) == len(wanted) else None

    def run(self, op: Any, num_tokens: int, graphs: Graphs) -> None:
        """Compute the op; BackendError, or whatever the back end raises, when it could not."""
        tokens = max(graph.bucket.tokens for graph in graphs.values())
        self._x = self._input(op, matrices(op)[0][0], num_tokens, tokens)
        if op.kind == OpKind.FEED_FORWARD:
            for first, values in self._active(op, num_tokens, graphs):
                self._write_hidden(op, first, values)
        elif op.flags & OpFlag.RESIDUAL:
            whole = np.empty((num_tokens, num_tiles(op.rows) * TILE_ROWS), np.float32)
            for first, values in self._products(op, num_tokens, graphs):
                whole[:, first : first + values.shape[1]] = values
            self._rows(op, num_tokens)[:, : whole.shape[1]] += whole
        else:
            out = self._rows(op, num_tokens)
            for first, values in self._products(op, num_tokens, graphs):
                out[:, first : first + values.shape[1]] = values

    def _rows(self, op: Any, num_tokens: int) -> NDArray[np.float32]:
        """Where the op's float outputs go (tokens, at least rows)."""
        stride = op.out_stride // 4
        width = num_tiles(op.rows) * TILE_ROWS
        flat = self._arena.view(op.out, ((num_tokens - 1) * stride + width,), np.float32)
        return np.lib.stride_tricks.as_strided(flat, (num_tokens, width), (op.out_stride, 4))

    def _products(self, op: Any, num_tokens: int, graphs: Graphs) -> Iterator[tuple[int, F32]]:
        """Rows of a matrix times the input, with its bias: (first row, values)."""
        (matrix,) = matrices(op)
        for first, rows in row_runs(op.rows, op.cols):
            values = self._product(op, num_tokens, graphs, matrix, op.bias, first, rows, 0)
            if op.eps > 0:
                softcap(values, op.eps)
            yield first, values

    def _active(self, op: Any, num_tokens: int, graphs: Graphs) -> Iterator[tuple[int, F32]]:
        """Activations of neurons: (first neuron, values)."""
        up_matrix, *gates = matrices(op)
        kind = FeedForwardKind(op.activation)
        for first, rows in row_runs(op.rows, op.cols):
            place = (first, rows)
            up = self._product(op, num_tokens, graphs, up_matrix, op.up_bias, *place, 0)
            gate = up
            for matrix in gates:
                gate = self._product(op, num_tokens, graphs, matrix, op.bias, *place, 1)
            yield first, feed_forward_act(kind, gate, up)

    def _product(
        self, op: Any, num_tokens: int, graphs: Graphs,
        matrix: Matrix, bias: int, first: int, rows: int, slot: int,
    ) -> F32:  # fmt: skip
        """One run of rows times the input (tokens, rows), by a graph that may take more tokens."""
        storage, offset = matrix
        graph = graphs[storage, rows]
        tokens, cols = graph.bucket.tokens, graph.bucket.cols
        size = tile_bytes(storage, cols)
        weight = self._arena.view(
            offset + first // TILE_ROWS * size, (rows // TILE_ROWS * size,), np.uint8
        )
        out = self._floats(tokens, rows, slot)
        self._backend.bind(graph, Buffers(self._x[:tokens], weight, out))
        self._backend.run(graph)
        values = out[:num_tokens]
        if not np.isfinite(values).all():
            raise BackendError(f"what it gave for {tokens} x {rows} is not finite")
        if bias:
            values += self._arena.view(bias + 4 * first, (rows,), np.float32)
        return values

    def _floats(self, tokens: int, cols: int, slot: int) -> F32:
        """An array (tokens, cols) of which there is one for each slot."""
        key = (tokens, cols, slot)
        if key not in self._memory:
            self._memory[key] = np.zeros((tokens, cols), np.float32)
        return self._memory[key]

    def _input(self, op: Any, storage: StorageType, num_tokens: int, tokens: int) -> NDArray[Any]:
        """The op's input rows; those past the step's tokens hold what they did before."""
        if not storage.is_quantised:
            rows = self._arena.view(getattr(op, "in"), (tokens, op.in_stride // 4), np.float32)
            return np.ascontiguousarray(rows[:, : op.cols])
        blocks = op.cols // BLOCK_COLS
        acts = self._arena.view(getattr(op, "in"), (tokens, blocks), ACT_BLOCK)
        if not self._takes_floats:
            return acts
        out = self._floats(tokens, op.cols, INPUT)
        values, used = out.reshape(tokens, blocks, BLOCK_COLS), acts[:num_tokens]
        np.multiply(used["quants"], used["scale"][..., None], out=values[:num_tokens])
        return out

    def _write_hidden(self, op: Any, first: int, values: F32) -> None:
        """Neurons' activations for the down matrix: int8 blocks, floats or both."""
        num_tokens, rows = values.shape
        if op.flags & OpFlag.WRITE_ACTS:
            blocks = op.out_acts_stride // ACT_BLOCK.itemsize
            acts = self._arena.view(op.out_acts, (num_tokens, blocks), ACT_BLOCK)
            block = first // BLOCK_COLS
            acts[:, block : block + rows // BLOCK_COLS] = quantize_acts(values)
        if op.flags & OpFlag.WRITE_F32:
            self._rows(op, num_tokens)[:, first : first + rows] = values
