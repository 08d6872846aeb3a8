"""Traces of neuron use, and what other policies would make of them.

A trace is a list of uses in order, each (epoch, ascending neuron ids). Epochs are layers of tokens,
as the engine counts them.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from polyneuron.kernels.neuron_cache import NeuronCache

Neurons = NDArray[np.uint32]
Trace = list[tuple[int, Neurons]]

MAX_PROBABILITY = 0.98


def cyclic_scan(num_neurons: int, epoch_neurons: int, num_scans: int) -> Trace:
    """Every neuron in turn, again and again."""
    starts = range(0, num_neurons, epoch_neurons)
    uses = [
        np.arange(start, min(start + epoch_neurons, num_neurons), dtype=np.uint32)
        for _ in range(num_scans)
        for start in starts
    ]
    return list(enumerate(uses, 1))


@dataclass(frozen=True)
class SparseModel:
    """Neurons whose activity follows a power law and lasts for some tokens.

    In each token a neuron keeps with probability `persistence` the state it has; else it is active
    with a probability of its own. Over a layer these are c * rank^-exponent with the given mean.
    """

    num_layers: int = 8
    layer_neurons: int = 400
    mean_active: float = 0.1
    exponent: float = 1.0
    persistence: float = 0.3

    @property
    def num_neurons(self) -> int:
        return self.num_layers * self.layer_neurons

    def probabilities(self, rng: np.random.Generator) -> NDArray[np.float64]:
        """One for each neuron, hot ones anywhere in their layer."""
        weights = np.arange(1, self.layer_neurons + 1) ** -self.exponent
        low, high = 0.0, float(self.layer_neurons)
        for _ in range(60):
            middle = (low + high) / 2
            mean = np.minimum(middle * weights, MAX_PROBABILITY).mean()
            low, high = (middle, high) if mean < self.mean_active else (low, middle)
        layer = np.minimum(low * weights, MAX_PROBABILITY)
        return np.concatenate([rng.permutation(layer) for _ in range(self.num_layers)])

    def trace(self, rng: np.random.Generator, num_tokens: int, first_epoch: int = 1) -> Trace:
        """Tokens with probabilities of their own: two traces have different hot sets."""
        probabilities = self.probabilities(rng)
        active = rng.random(self.num_neurons) < probabilities
        uses = []
        for _ in range(num_tokens):
            is_kept = rng.random(self.num_neurons) < self.persistence
            active = np.where(is_kept, active, rng.random(self.num_neurons) < probabilities)
            layers = active.reshape(self.num_layers, -1)
            uses += [
                (np.flatnonzero(layer) + index * self.layer_neurons).astype(np.uint32)
                for index, layer in enumerate(layers)
            ]
        return list(enumerate(uses, first_epoch))


def total_uses(trace: Trace) -> int:
    return sum(neurons.size for _, neurons in trace)


def run_trace(cache: NeuronCache, trace: Trace) -> float:
    """The share of uses that hit, with reads that land before the next use."""
    num_misses = 0
    for epoch, neurons in trace:
        found = cache.use(epoch, neurons)
        assert found is not None
        for neuron in found.misses["neuron"].tolist():
            cache.landed(neuron)
        num_misses += found.misses.size
    return 1 - num_misses / total_uses(trace)


def lru_hit_rate(num_slots: int, warm_up: Trace, trace: Trace) -> float:
    """Of a plain LRU over neurons, after the warm-up."""
    order: OrderedDict[int, None] = OrderedDict()
    num_hits = 0
    for part in (warm_up, trace):
        num_hits = 0
        for neuron in (neuron for _, neurons in part for neuron in neurons.tolist()):
            if neuron in order:
                num_hits += 1
                order.move_to_end(neuron)
                continue
            if len(order) == num_slots:
                order.popitem(last=False)
            order[neuron] = None
    return num_hits / total_uses(trace)


def best_fixed_hit_rate(num_slots: int, trace: Trace) -> float:
    """Of the fixed set of neurons that is best for this trace, chosen by who knows all of it."""
    counts = np.bincount(np.concatenate([neurons for _, neurons in trace]))
    return float(np.sort(counts)[::-1][:num_slots].sum() / counts.sum())
