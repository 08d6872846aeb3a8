"""How often each expert is chosen, and what the chosen ones' weights come to (docs/SYNTH.md).

A router's logit is normal over tokens. Each expert has a bias of its own, so that some are chosen
more often than others, as in models whose experts specialise.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from polyneuron.kernels.random_rows import random_bytes
from polyneuron.model.spec import ExpertSpec
from polyneuron.synth.rates import NORMAL

F64 = NDArray[np.float64]

LOGIT_STD = 1.0
"""Of a router's logits over tokens."""
SKEW = 0.4
"""Deviation of the experts' biases, in those of the logits: the most chosen quarter of them gets
0.4 to 0.6 of all choices (PAPER §4.3)."""
DRAWS = 4096
STEPS = 4096
"""Quantiles of the normal distribution that draws are taken from."""


def expert_biases(num_experts: int) -> F64:
    """What is added to each expert's standard normal logit (num_experts), the most chosen first."""
    places = (np.arange(num_experts) + 0.5) / num_experts
    return SKEW * np.array([NORMAL.inv_cdf(1.0 - place) for place in places])


@lru_cache(maxsize=4)
def drawn_logits(num_experts: int) -> F64:
    """Logits of tokens that have nothing in common (DRAWS, num_experts), the same every time."""
    quantiles = np.array([NORMAL.inv_cdf((i + 0.5) / STEPS) for i in range(STEPS)])
    words = random_bytes(0, 2 * DRAWS * num_experts).view(np.uint16).astype(np.int64) % STEPS
    logits: F64 = quantiles[words].reshape(DRAWS, num_experts) + expert_biases(num_experts)
    logits.setflags(write=False)
    return LOGIT_STD * logits


def chosen_weights(logits: F64, experts: ExpertSpec) -> tuple[NDArray[np.int64], F64]:
    """Which experts each token has, and their weights: both (tokens, num_used)."""
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    chosen = np.argsort(-powers, axis=1, kind="stable")[:, : experts.num_used]
    kept: F64 = np.take_along_axis(powers, chosen, axis=1)
    return chosen, kept / (kept if experts.is_normalised else powers).sum(axis=1, keepdims=True)


@lru_cache(maxsize=4)
def squared_weights(experts: ExpertSpec) -> float:
    """Mean over tokens of the sum of their experts' squared weights."""
    _, weights = chosen_weights(drawn_logits(experts.num_experts), experts)
    return float(np.square(weights).sum(axis=1).mean())
