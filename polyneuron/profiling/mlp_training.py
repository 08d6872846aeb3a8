"""Trains a predictor's two matrices by torch: the extra `train`, imported only here."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyneuron.config import usable_cores
from polyneuron.errors import ConfigError

F32 = NDArray[np.float32]

BATCH_TOKENS = 128
STEP_SHARE = 0.03
"""A step moves a weight by about this share of the mean weight of its matrix."""


@dataclass(frozen=True, slots=True, eq=False)
class Mlp:
    """logit = fc2 @ relu(fc1 @ x) + bias: positive where a neuron is worth computing."""

    fc1: F32
    """(rank, d_model)"""
    fc2: F32
    """(d_ff, rank)"""
    bias: F32
    """(d_ff)"""

    def logits(self, x: F32) -> F32:
        """x (tokens, d_model) -> (tokens, d_ff), in floats: what training works on."""
        found: F32 = np.maximum(x @ self.fc1.T, 0) @ self.fc2.T + self.bias
        return found


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """Inputs (tokens, d_model) and what neurons then contribute (tokens, d_ff)."""

    x: F32
    contribution: F32


def check_trainable() -> None:
    """ConfigError with the cure when torch is not installed."""
    if importlib.util.find_spec("torch") is None:
        raise ConfigError("--predictor mlp needs the extra train: pip install 'polyneuron[train]'")


def mean_active(contribution: F32) -> float:
    """The mean contribution of active neurons; 1 where there are none."""
    active = contribution[contribution > 0]
    return float(active.mean(dtype=np.float64)) if active.size else 1.0


def loss_of(logits: F32, contribution: F32, mean: float) -> float:
    """What is minimised, in numpy: cross entropy, an active neuron weighted by its contribution.

    It weighs in means of active neurons, an inactive one weighs 1: at the minimum a logit tells
    what a neuron is expected to contribute beside what it costs.
    """
    active = np.logaddexp(0, -logits) * (contribution / np.float32(mean))
    return float(np.where(contribution > 0, active, np.logaddexp(0, logits)).mean())


def train(start: Mlp, tokens: Tokens, seed: int) -> Iterator[Mlp]:
    """`start`, then the state after each pass over the tokens, without end.

    The same arguments give the same bytes on the same machine.
    """
    import torch

    yield start
    torch.set_num_threads(len(usable_cores()))
    random = torch.Generator().manual_seed(seed)
    x, contribution = torch.from_numpy(tokens.x), torch.from_numpy(tokens.contribution)
    weights = [torch.from_numpy(w.copy()) for w in (start.fc1, start.fc2, start.bias)]
    for weight in weights:
        weight.requires_grad_(True)
    sizes = (float(np.abs(start.fc1).mean()), float(np.abs(start.fc2).mean()), 1.0)
    groups = [
        {"params": [weight], "lr": STEP_SHARE * size + 1e-12}
        for weight, size in zip(weights, sizes, strict=True)
    ]
    optimizer = torch.optim.Adam(groups)
    mean = mean_active(tokens.contribution)
    while True:
        for rows in torch.randperm(len(x), generator=random).split(BATCH_TOKENS):
            optimizer.zero_grad()
            torch_loss(torch, weights, x[rows], contribution[rows], mean).backward()
            optimizer.step()
        yield Mlp(*(weight.detach().numpy().copy() for weight in weights))


def torch_loss(torch: Any, weights: list[Any], x: Any, contribution: Any, mean: float) -> Any:
    """`loss_of` the logits of fc1, fc2 and bias, as torch computes it and its gradients."""
    fc1, fc2, bias = weights
    logits = torch.relu(x @ fc1.T) @ fc2.T + bias
    softplus = torch.nn.functional.softplus
    active = softplus(-logits) * (contribution / mean)
    return torch.where(contribution > 0, active, softplus(logits)).mean()
