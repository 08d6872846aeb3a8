"""How often neurons are needed, and how often a cache of some of them has the one that is.

The neuron cache behaves like the best fixed set of its size less about a point (docs/DESIGN.md), so
what it will hit follows from the neurons' frequencies.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Self

import numpy as np
from numpy.typing import NDArray

from polyneuron.synth.rates import UP_SHARE, activation_rates

F64 = NDArray[np.float64]

DEFAULT_SPARSITY = 0.9
"""Of the models this is made for (PAPER §4.5)."""
CACHE_LOSS = 0.003
"""Hits that the neuron cache has fewer than the best fixed set where that misses nothing."""
CACHE_LOSS_SHARE = 0.05
"""And of what that set misses. Measured in all: 0.003 to 0.005 at 0 to 13 %, 0.019 at 20 %."""
STARVED_SHARE = 0.5
"""Of the best fixed set's hits, what is left when slots are few beside what one step needs: then
most of them wait for their own layer to come round again. Measured: 0.55 at a third of a step."""
GROUPS = 512
"""Groups of neurons of like rank that a layer's rates are kept as."""


@dataclass(frozen=True, slots=True, eq=False)
class Hotness:
    """P(a token's deciding value is above zero, or that it is named), hottest first in every layer.

    Parts of a layer are shares of its neurons, the hottest first.
    """

    rates: F64
    """(layers, groups of like rank); (1, groups): all layers are alike."""
    active_share: float
    """Of those, neurons whose product with up is not zero."""
    is_measured: bool
    """Counted in a text; else supposed."""

    @classmethod
    def supposed(cls, num_neurons: int, sparsity: float = DEFAULT_SPARSITY) -> Self:
        """The power law of docs/SYNTH.md."""
        gated = np.minimum(1.0, activation_rates(num_neurons, sparsity) / UP_SHARE)
        return cls(_grouped(gated[None, :]), UP_SHARE, is_measured=False)

    @classmethod
    def counted(cls, gated: NDArray[np.integer], tokens: int, active_share: float) -> Self:
        """From counts (layers, neurons) over so many tokens, in any order."""
        rates = np.asarray(gated, np.float64) / max(1, tokens)
        return cls.of_rates(rates, active_share)

    @classmethod
    def of_rates(
        cls, rates: NDArray[np.floating], active_share: float, cluster_neurons: int = 0
    ) -> Self:
        """From measured shares of tokens (layers, neurons).

        With `cluster_neurons` they are in the order of a file whose hottest clusters come first:
        they keep that order, since those are the clusters that can stay. Else they are ordered.
        """
        size = cluster_neurons or rates.shape[1]
        parts = [
            -np.sort(-np.asarray(rates[:, at : at + size], np.float64), axis=1)
            for at in range(0, rates.shape[1], size)
        ]
        ordered = np.clip(np.concatenate(parts, axis=1), 0.0, 1.0)
        return cls(_grouped(ordered), active_share, is_measured=True)

    def scaled(self, ratio: float, cold_ratio: float) -> Self:
        """The same neurons asked for so many times as often, as by a predictor.

        The colder half has a ratio of its own: predictors' thresholds count a read from the file
        ten times, so its neurons are named more rarely than they are needed (docs/PROFILE.md).
        """
        ratios = np.full(self.rates.shape[1], ratio)
        ratios[len(ratios) // 2 :] = cold_ratio
        return type(self)(np.minimum(1.0, self.rates * ratios), self.active_share, self.is_measured)

    def needed(self, batch: int = 1, begin: float = 0.0, end: float = 1.0) -> float:
        """Neurons of a layer's part [begin, end) that some token of a batch needs, by all of its
        neurons."""
        union = np.concatenate([[0.0], np.cumsum(_union(self.rates, batch).mean(axis=0))])
        places = np.linspace(0.0, 1.0, union.size)
        low, high = np.interp([begin, end], places, union)
        return float(high - low) / (union.size - 1)

    def hit_rate(self, cached: float, batch: int = 1, begin: float = 0.0) -> float:
        """Of the needed neurons in [begin, 1) of every layer, those in the cache.

        `cached` is the share of those neurons that there are slots for.
        """
        if cached >= 1.0 or begin >= 1.0:
            return 1.0
        demand, curve = _hit_curve(self, batch, begin)
        best = float(np.interp(cached, np.linspace(0.0, 1.0, curve.size), curve))
        fed = min(1.0, cached / demand) if demand > 0 else 1.0
        held = best * (1.0 - (1.0 - fed) * STARVED_SHARE)
        return max(0.0, held - CACHE_LOSS - CACHE_LOSS_SHARE * (1.0 - held))


def _grouped(rates: F64) -> F64:
    """Means over groups of neighbours (layers, groups)."""
    num = rates.shape[1]
    if num <= GROUPS:
        return rates
    edges = np.linspace(0, num, GROUPS + 1).astype(np.intp)
    sums = np.add.reduceat(rates, edges[:-1], axis=1)
    grouped: F64 = sums / np.diff(edges)
    return grouped


def _union(rates: F64, batch: int) -> F64:
    """P(some token of a batch needs it); tokens of different texts are independent."""
    union: F64 = 1.0 - (1.0 - rates) ** batch
    return union


@lru_cache(maxsize=512)
def _hit_curve(hotness: Hotness, batch: int, begin: float) -> tuple[float, F64]:
    """What a step needs of these neurons, and hits of the best fixed set by its share of them."""
    first = min(round(begin * hotness.rates.shape[1]), hotness.rates.shape[1] - 1)
    rates = hotness.rates[:, first:].ravel()
    uses = _union(rates, batch)[np.argsort(-rates, kind="stable")]
    sums = np.concatenate([[0.0], np.cumsum(uses)])
    total = sums[-1] or 1.0
    return float(uses.mean()), sums / total
