"""Which neurons tokens of a real model need: each neuron of each layer as often as it was counted.

The same chains as of stated statistics (docs/SIMULATOR.md), with the rates that lie beside a model
file in place of a law, and a novelty for each layer: how much of a token's neurons is new was
counted as a mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyneuron.errors import ConfigError
from polyneuron.io.profile_file import Profile
from polyneuron.kernels.simulation import LawTables
from polyneuron.planning.known_model import known_hotness, known_predictor, ordered_by
from polyneuron.planning.source import ModelSource
from polyneuron.scenarios.activity import LEAST_NOVELTY, neuron_tables

F64 = NDArray[np.float64]
U32 = NDArray[np.uint32]
LEAST_RATE, MOST_RATE = 1e-7, 0.999
"""A neuron that a text never needed may be needed; chances of 0 and 1 have no logarithm."""


@dataclass(frozen=True, slots=True, eq=False)
class CountedActivity:
    """What was counted of a model; neurons in the order of its file."""

    layer_rates: F64
    """(layers, neurons): shares of tokens."""
    novelties: F64
    """(layers): share of the neurons that each token draws anew."""
    gate: float = 1.0
    """Of what is needed, the share whose gate is not zero."""
    expert_overlap: float = 0.0
    expert_skew: float = 0.0

    def rates(self, num_neurons: int) -> F64:
        """(num_neurons) by place in the file, as the layers' mean."""
        mean: F64 = self._padded(num_neurons).mean(axis=0)
        return mean

    def needed(self, num_neurons: int, tokens: int = 1) -> F64:
        """(num_neurons) chances that some of so many independent tokens needs it."""
        union: F64 = 1.0 - (1.0 - self._padded(num_neurons)) ** tokens
        mean: F64 = union.mean(axis=0)
        return mean

    def draw_levels(self, rng: np.random.Generator, num_neurons: int, n: int) -> list[int]:
        """The level of each of n tokens: all alike."""
        return [0] * n

    def laws(
        self, num_neurons: int, num_experts: int, num_used: int, place: U32
    ) -> list[LawTables]:
        """What C draws from, a law for each layer; `place` (num_neurons): the neuron whose rate
        each has."""
        return [
            neuron_tables(rates, np.array([novelty, 1.0]), self.gate, place)
            for rates, novelty in zip(self._padded(num_neurons), self.novelties, strict=True)
        ]

    def _padded(self, num_neurons: int) -> F64:
        """The same with neurons that there are not, and that nothing needs."""
        missing = num_neurons - self.layer_rates.shape[1]
        padded: F64 = np.pad(self.layer_rates, ((0, 0), (0, missing)), constant_values=LEAST_RATE)
        return padded


def counted_activity(source: ModelSource, *, is_predicted: bool) -> CountedActivity:
    """What lies beside a model: how often its neurons are named by its predictors, or gated.

    Without a profile a law is supposed (docs/SYNTH.md). Raises ConfigError for predictors that are
    missing or another model's, FormatError for damaged files.
    """
    layers, neurons, profile = source.spec.num_layers, source.spec.d_ff, source.profile()
    gate, rates = 1.0, _gated(source, profile)
    if is_predicted:
        file, hotness = source.predictors(), known_hotness(source, neurons)
        predictor = known_predictor(source, hotness)
        assert predictor is not None
        gate = min(1.0, predictor.found.needed() / predictor.asked.needed())
        if file.named is not None:
            rates = np.asarray(file.named, np.float64)
        else:
            rates = rates * (predictor.asked.needed() / hotness.needed())
    novelties = np.ones(layers) if profile is None else _novelties(profile)
    return CountedActivity(np.clip(rates, LEAST_RATE, MOST_RATE), novelties, gate)


def _gated(source: ModelSource, profile: Profile | None) -> F64:
    """(layers, neurons): how often each decides to be computed."""
    layers, neurons = source.spec.num_layers, source.spec.d_ff
    if profile is not None:
        counts = np.stack([layer.gated[0] for layer in profile.layers])
        return counts / float(profile.num_tokens)
    supposed = known_hotness(source, neurons).rates[0]
    law = np.interp(np.linspace(0, 1, neurons), np.linspace(0, 1, len(supposed)), supposed)
    if not ordered_by(source):  # hot and cold lie anywhere, but not anew in every run
        law = np.random.default_rng(0).permutation(law)
    return np.tile(law, (layers, 1))


def _novelties(profile: Profile) -> F64:
    """(layers): from how many of a token's neurons the one before it needed, and how many by
    chance."""
    overlap, by_chance = _facts(profile, "overlap"), _facts(profile, "overlap_by_chance")
    found: F64 = np.clip((1.0 - overlap) / np.maximum(1e-9, 1.0 - by_chance), LEAST_NOVELTY, 1.0)
    return found


def _facts(profile: Profile, name: str) -> F64:
    found: list[Any] = [layer.facts.get(name) for layer in profile.layers]
    if not all(isinstance(value, int | float) for value in found):
        raise ConfigError(f"{name}: the profile does not tell; make it anew: polyneuron profile")
    return np.array(found, np.float64)
