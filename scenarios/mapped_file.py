"""A mapped file that steps touch: which experts a token uses, and whose pages are not in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from polyneuron.scenarios.model_shape import ModelShape
from polyneuron.scenarios.page_cache import PageCache


@dataclass(frozen=True, slots=True)
class Touched:
    """Bytes of one step."""

    used: int
    """Of feed forward."""
    ffn_missed: int
    others_missed: int
    """Of attention and head."""


class MappedFile:
    """A dense model's file behind the system's page cache."""

    def __init__(self, shape: ModelShape, page_bytes: int, rng: np.random.Generator) -> None:
        self.shape = shape
        self.pages = PageCache(page_bytes)
        self._rng = rng
        self._experts = np.zeros((shape.layers, shape.experts_used), np.int64)

    def touch(self, tokens: int) -> Touched:
        """A step of so many tokens touches what it computes, layer by layer."""
        shape, ffn_missed, others, used = self.shape, 0, 0, 0
        for layer in range(shape.layers):
            experts = self._next_experts(layer, tokens)
            missed = self._touch_layer(layer, experts)
            ffn_missed, others = ffn_missed + missed[0], others + missed[1]
            used += len(experts) * shape.neurons * shape.neuron_bytes
        return Touched(used, ffn_missed, others + self._touch_head())

    def touch_all(self) -> None:
        """A prompt touches every page, layer by layer."""
        for layer in range(self.shape.layers):
            self._touch_layer(layer, range(self.shape.experts))
        self._touch_head()

    def _touch_layer(self, layer: int, experts: Sequence[int]) -> tuple[int, int]:
        """Bytes of feed forward and of attention that were not in memory."""
        shape, missed = self.shape, 0
        matrix_bytes = shape.neurons * (shape.row + shape.scales)
        others = self.pages.touch(self._head_number + 1 + layer, shape.attention)
        for expert in experts:
            first = (layer * shape.experts + expert) * shape.matrices
            for matrix in range(first, first + shape.matrices):
                missed += self.pages.touch(matrix, matrix_bytes)
        return missed, others

    def _touch_head(self) -> int:
        return self.pages.touch(self._head_number, self.shape.head)

    @property
    def _head_number(self) -> int:
        """Behind the matrices of all experts; attention's follow it."""
        return self.shape.units * self.shape.matrices

    def _next_experts(self, layer: int, tokens: int) -> list[int]:
        """The experts that a step uses in a layer."""
        shape, law = self.shape, self.shape.activity
        if shape.experts == 1:
            return [0]
        weights = np.exp(-law.expert_skew * np.arange(shape.experts))
        union: set[int] = set()
        for _ in range(tokens):
            kept = [int(e) for e in self._experts[layer] if self._rng.random() < law.expert_overlap]
            kept = list(dict.fromkeys(kept))
            while len(kept) < shape.experts_used:
                drawn = int(self._rng.choice(shape.experts, p=weights / weights.sum()))
                if (expert := (drawn + layer) % shape.experts) not in kept:
                    kept.append(expert)
            self._experts[layer] = kept
            union.update(kept)
        return sorted(union)
