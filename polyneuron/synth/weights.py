"""The bytes of every tensor, made on demand: any rows, in any order, always the same."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from polyneuron.io.gguf_tensors import GgufTensor
from polyneuron.kernels.quant import GgmlType
from polyneuron.kernels.random_rows import RowIds
from polyneuron.model.ncf_plan import layer_and_role
from polyneuron.model.spec import ModelSpec, tensor_map, tensor_shapes
from polyneuron.synth.codings import CODINGS, F16, Q4, Q8, Bytes, Chance, Coding
from polyneuron.synth.planting import PlainWeights, Planting
from polyneuron.synth.recipe import Recipe, stream_key

MAX_MATRICES = 8
"""Descriptions kept: threads are at work on few matrices at once."""
ROUTER = "ffn_gate_inp"
NORMS_OF_HEADS = ("attn_q_norm", "attn_k_norm")
TURNED_BYTES = 16 << 20
"""Of transposed matrices kept, where one alone does not take more."""


@dataclass(frozen=True, slots=True, eq=False)
class RandomMatrix:
    """A matrix as it is made; down, where sparsity is planted, with a row for each neuron."""

    rows: int
    cols: int
    coding: Coding
    recipe: Recipe
    chance: Chance

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.coding.row_bytes(self.cols)

    def fill(self, rows: Bytes, row_ids: RowIds) -> None:
        """The rows of these numbers into rows (num_rows, row_bytes), which may lie apart."""
        recipe = self.recipe
        self.coding.fill(rows, row_ids, self.chance)
        if recipe.block_sizes is not None:
            self.coding.resize(rows, recipe.block_sizes[None, :])
        if recipe.row_sizes is not None:
            self.coding.resize(rows, recipe.row_sizes[row_ids, None])
        if recipe.first_block is not None:
            self.coding.set_first_block(rows, recipe.first_block[row_ids])

    def make(self, first_row: int, num_rows: int) -> Bytes:
        """A run of rows (num_rows, row_bytes)."""
        rows = np.empty((num_rows, self.row_bytes), np.uint8)
        self.fill(rows, np.arange(first_row, first_row + num_rows, dtype=np.uint32))
        return rows


class WeightSource:
    """All tensors of one model; threads may ask at once."""

    def __init__(self, spec: ModelSpec, quant: str, sparsity: float | None, seed: int) -> None:
        self.spec = spec
        self._seed = seed
        self._coding = CODINGS[quant]
        is_planted = sparsity is not None or spec.experts is not None
        self.planting = Planting(spec, sparsity, seed) if is_planted else None
        self._recipe = (self.planting or PlainWeights(spec)).recipe
        self._shapes = tensor_shapes(spec)
        self.tensors = {name: self._ggml_tensor(name) for name in self._shapes}
        """As a GGUF would list them; offsets are 0."""
        self._turned: dict[tuple[str, int], Bytes] = {}
        self._lock = Lock()
        self.matrix = lru_cache(MAX_MATRICES)(self._matrix)
        """By name."""

    def _ggml_tensor(self, name: str) -> GgufTensor:
        shape = self._shapes[name]
        if len(shape) == 1:
            return GgufTensor(name, int(GgmlType.F32), shape, 0, 4 * shape[0])
        coding = self.coding(name)  # ggml's blocks take as many bytes as ours
        num_bytes = math.prod(shape[:-1]) * coding.row_bytes(shape[-1])
        return GgufTensor(name, int(coding.ggml_type), shape, 0, num_bytes)

    def coding(self, name: str) -> Coding:
        """How a matrix is stored: heads have 8 bits where others have 4, and routers halves."""
        if layer_and_role(name)[1] == ROUTER:
            return F16
        is_head = name == tensor_map(self.spec).output
        return Q8 if is_head and self._coding is Q4 else self._coding

    def _matrix(self, name: str) -> RandomMatrix:
        recipe, coding = self._recipe(*layer_and_role(name)), self.coding(name)
        *experts, rows, cols = self._shapes[name]
        if recipe.is_by_neuron:
            rows, cols = cols, rows
        rows *= math.prod(experts)
        choices = coding.choices(recipe.std)
        scale_key = stream_key(self._seed, f"{name} scales")
        shared = coding.tile_scales(scale_key, rows, cols, choices) if recipe.is_by_neuron else None
        chance = Chance(stream_key(self._seed, name), choices, scale_key, shared)
        return RandomMatrix(rows, cols, coding, recipe, chance)

    def vector(self, name: str) -> NDArray[np.float32]:
        """A norm: all ones, but of heads what gives them their size."""
        is_of_heads = layer_and_role(name)[1] in NORMS_OF_HEADS and self.planting is not None
        value = self.planting.head_norm() if is_of_heads and self.planting else 1.0
        return np.full(self._shapes[name], value, np.float32)

    def rows(self, name: str, first_row: int, num_rows: int) -> Bytes:
        """Rows of a matrix as the model multiplies by it (num_rows, row_bytes)."""
        matrix = self.matrix(name)
        if not matrix.recipe.is_by_neuron:
            return matrix.make(first_row, num_rows)
        of_expert, parts = matrix.cols, []
        while num_rows:
            expert, first = divmod(first_row, of_expert)
            count = min(num_rows, of_expert - first)
            parts.append(self._whole_turned(name, matrix, expert)[first : first + count])
            first_row, num_rows = first_row + count, num_rows - count
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _whole_turned(self, name: str, matrix: RandomMatrix, expert: int) -> Bytes:
        """One down matrix, its rows no longer neurons; kept, since it is asked for in parts."""
        key, d_ff = (name, expert), self.spec.d_ff
        with self._lock:
            if key not in self._turned:
                self._make_room(d_ff * matrix.row_bytes)
                made = matrix.make(expert * d_ff, d_ff)
                self._turned[key] = matrix.coding.transposed(made)
            return self._turned[key]

    def _make_room(self, num_bytes: int) -> None:
        """Give memory back, the oldest first."""
        while self._turned and num_bytes + _total(self._turned.values()) > TURNED_BYTES:
            del self._turned[next(iter(self._turned))]


def _total(parts: Iterable[Bytes]) -> int:
    return sum(part.nbytes for part in parts)
