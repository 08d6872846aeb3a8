"""A gate matrix through a few directions: which ones, and how the predictor's two matrices follow.

Of all rank-r maps the one that tells gate values best, in squares over the calibration text, is the
projection on the leading principal directions of the gate values themselves: with gates G B z of
centred inputs z of covariance S, U the top eigenvectors of G B S (G B)', the first matrix is U' G B
and the second U. They are found by subspace iteration in products with G alone: nothing of size
d_model by d_model is formed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]

SHRINK = np.float32(0.1)
"""Share of the diagonal in the covariance: the text has seen few directions of a wide model."""
RIDGE = 0.1
"""Of the map between the two inputs, in mean variances."""
NUM_ROUNDS = 1
"""Beside the start from the text's own gate values, a round already; more gains nothing."""
OVERSAMPLE = 16


@dataclass(frozen=True, slots=True, eq=False)
class Inputs:
    """Centred inputs of the predictor, and how feed forward's input follows from them.

    The estimate of a centred ffn input is `scale * z + residual' @ (dual @ (z_all @ z))`: scaled
    column by column, and what attention adds by ridge regression in its dual form.
    """

    mean: F32
    """(d_model)"""
    centred: F32
    """(tokens, d_model)"""
    scale: F32
    """(d_model); ones where the input is feed forward's own."""
    dual: F32 | None
    """(tokens, d_model): ridge weights times residuals."""

    def to_ffn(self, columns: F32) -> F32:
        """B @ columns (d_model, n)."""
        mapped = self.scale[:, None] * columns
        return mapped if self.dual is None else mapped + self.dual.T @ (self.centred @ columns)

    def from_ffn(self, columns: F32) -> F32:
        """B' @ columns (d_model, n)."""
        mapped = self.scale[:, None] * columns
        return mapped if self.dual is None else mapped + self.centred.T @ (self.dual @ columns)

    def covariance(self, columns: F32) -> F32:
        """S @ columns (d_model, n), its diagonal weighted up."""
        product = self.centred.T @ (self.centred @ columns) / np.float32(len(self.centred))
        diagonal = np.mean(np.square(self.centred), axis=0)
        mixed: F32 = (1 - SHRINK) * product + SHRINK * diagonal[:, None] * columns
        return mixed


def own_inputs(x: F32) -> Inputs:
    """Inputs (tokens, d_model) that are feed forward's own."""
    mean = x.mean(axis=0)
    return Inputs(mean, x - mean, np.ones(x.shape[1], np.float32), None)


def earlier_inputs(x: F32, ffn: F32) -> Inputs:
    """Inputs x (tokens, d_model) from which `ffn` (tokens, d_model) has to be guessed."""
    mean = x.mean(axis=0)
    centred, wanted = x - mean, ffn - ffn.mean(axis=0)
    squares = np.maximum(np.sum(np.square(centred), axis=0), np.float32(1e-12))
    scale = np.sum(centred * wanted, axis=0) / squares
    residual = wanted - scale * centred
    gram = centred @ centred.T
    ridge = RIDGE * float(squares.mean())
    gram[np.diag_indices_from(gram)] += np.float32(ridge)
    return Inputs(mean, centred, scale, np.linalg.solve(gram, residual))


@dataclass(frozen=True, slots=True, eq=False)
class Directions:
    """Leading directions, best first: any prefix of them is the best map of its rank."""

    fc1: F32
    """(rank, d_model)"""
    lift: F32
    """(d_ff, rank): gate values, centred, are about lift @ fc1 @ z."""


def leading_directions(
    gate: F32, inputs: Inputs, rank: int, start: F32, rng: np.random.Generator
) -> Directions:
    """The first `rank` directions of gate (d_ff, d_model) over the inputs.

    `start` (tokens, d_ff), centred gate values, is where the search begins.
    """
    width = min(rank + OVERSAMPLE, *gate.shape)
    mixed = rng.standard_normal((width, len(start)), np.float32) @ start
    basis = orthonormal(mixed.T + _noise(rng, (gate.shape[0], width), mixed))
    for _ in range(NUM_ROUNDS):
        inner = inputs.covariance(inputs.from_ffn(gate.T @ basis))
        basis = orthonormal(gate @ inputs.to_ffn(inner))
    rows = inputs.from_ffn(gate.T @ basis)  # (d_model, width)
    small = rows.T @ inputs.covariance(rows)
    values, vectors = np.linalg.eigh((small + small.T).astype(np.float64))
    best = vectors[:, np.argsort(-values)[:rank]].astype(np.float32)
    return Directions(np.ascontiguousarray((rows @ best).T), basis @ best)


def _noise(rng: np.random.Generator, shape: tuple[int, int], like: F32) -> F32:
    """A little of every direction: the text may have fewer tokens than are wanted."""
    size = np.float32(0.01) * np.float32(np.sqrt(np.mean(np.square(like))) + 1e-12)
    return size * rng.standard_normal(shape, np.float32)


def orthonormal(columns: F32) -> F32:
    """An orthonormal basis of what the columns (n, width) span; QR without its slow inner loop."""
    for _ in range(2):
        gram = (columns.T @ columns).astype(np.float64)
        gram[np.diag_indices_from(gram)] += 1e-7 * np.trace(gram) / len(gram) + 1e-30
        factor = np.linalg.cholesky(gram)
        columns = columns @ np.linalg.inv(factor).T.astype(np.float32)
    return columns
