"""Which neurons tokens need: statistics that a model file states, made into tables to draw from.

A neuron's rate falls with its rank; from token to token it stays as it was unless it is drawn anew,
and how much is drawn anew differs from token to token (docs/SIMULATOR.md).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from polyneuron.errors import ConfigError
from polyneuron.kernels.simulation import LawTables

F64 = NDArray[np.float64]
U32 = NDArray[np.uint32]

MAX_RATE = 0.99
LEAST_NOVELTY = 0.01
NUM_LEVELS = 24
SHARE = 1 << 32
CHANCE_STEPS = 1 << 20
DRAW_PARTS = 256


@dataclass(frozen=True, slots=True)
class Activity:
    """Statistics of one model's neurons; shares are of 1."""

    active: float
    """Of a unit's neurons, those a token needs; of the experts it uses, if there are experts."""
    skew: float
    """Rates fall as exp(-skew * rank): the hottest tenth has e^(skew / 10) times the rate of those
    behind it."""
    overlap: float
    """Of what a token needs, the share that the one before it needed too."""
    burst: float = 0.0
    """Standard deviation of the logarithm of how much is new from token to token."""
    gate: float = 1.0
    """Of what is needed, the share whose gate is not zero."""
    expert_overlap: float = 0.0
    """Chance that an expert is kept for the next token, beyond drawing it again."""
    expert_skew: float = 0.0
    """Experts' popularity falls as exp(-expert_skew * rank)."""

    @classmethod
    def from_table(cls, table: Mapping[str, Any], where: str) -> Self:
        """An `[activity]` table; ConfigError names the key."""
        names = [field.name for field in fields(cls)]
        for key, value in table.items():
            if key == "source":
                continue
            if key not in names:
                raise ConfigError(f"{where}.{key}: not a key; there are {', '.join(names)}")
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not math.isfinite(value) or value < 0:
                raise ConfigError(f"{where}.{key} is {value!r}: give a number, 0 or more")
        for name in ("active", "skew", "overlap"):
            if name not in table:
                raise ConfigError(f"{where}.{name}: missing; give a number")
        found = cls(**{name: float(table[name]) for name in names if name in table})
        for name in ("active", "overlap", "gate", "expert_overlap"):
            if getattr(found, name) > 1:
                raise ConfigError(f"{where}.{name} is {getattr(found, name)}: at most 1")
        if found.active == 0:
            raise ConfigError(f"{where}.active is 0: a token needs some neurons")
        return found

    def rates(self, num_neurons: int) -> F64:
        """(num_neurons) hottest first, with the mean `active`."""
        return _rates(self, num_neurons)

    def novelty(self, num_neurons: int) -> float:
        """Mean share of neurons that are drawn anew, which gives the overlap."""
        return _novelty(self, num_neurons)

    def needed(self, num_neurons: int, tokens: int = 1) -> F64:
        """(num_neurons) chances that some of so many independent tokens needs it."""
        needed: F64 = 1.0 - (1.0 - self.rates(num_neurons)) ** tokens
        return needed

    def levels(self) -> F64:
        """(NUM_LEVELS) novelties that a token may have, the last one 1."""
        return np.geomspace(LEAST_NOVELTY, 1.0, NUM_LEVELS)

    def draw_levels(self, rng: np.random.Generator, num_neurons: int, n: int) -> list[int]:
        """The level of each of n tokens."""
        mean = self.novelty(num_neurons)
        spread = np.exp(self.burst * rng.standard_normal(n) - self.burst**2 / 2)
        bounded = np.minimum(np.maximum(mean * spread, LEAST_NOVELTY), 1.0)  # clip() is slow
        places = np.log(bounded / LEAST_NOVELTY)
        places *= (NUM_LEVELS - 1) / math.log(1.0 / LEAST_NOVELTY)
        return [int(level) for level in np.rint(places)]

    def tables(self, num_neurons: int, num_experts: int, num_used: int, place: U32) -> LawTables:
        """What C draws from; `place` (num_neurons): the neuron at each rank."""
        popularity = np.exp(-self.expert_skew * np.arange(num_experts))
        expert_share, expert_other = alias_table(popularity)
        return replace(
            neuron_tables(self.rates(num_neurons), self.levels(), self.gate, place),
            num_experts=num_experts, num_used=num_used,
            stay=int(_share(np.array([self.expert_overlap]))[0]),
            expert_share=expert_share, expert_other=expert_other,
        )  # fmt: skip

    def laws(
        self, num_neurons: int, num_experts: int, num_used: int, place: U32
    ) -> list[LawTables]:
        """The same as what holds for all layers."""
        return [self.tables(num_neurons, num_experts, num_used, place)]

    def with_table(self, table: Mapping[str, Any]) -> Self:
        """The same with some statistics replaced."""
        names = {field.name for field in fields(self)}
        return replace(self, **{k: float(v) for k, v in table.items() if k in names})


def neuron_tables(rates: F64, levels: F64, gate: float, place: U32) -> LawTables:
    """A law of neurons: rates by rank (num_neurons), novelties that a token may have (levels)."""
    pull, steps = -np.log1p(-rates), levels[:, None]
    joining = -np.expm1(-pull * steps)
    leave = np.empty((len(levels), len(rates)), np.uint32)
    leave[:, place] = _share(np.minimum(1.0, (1.0 - rates) / rates * joining / (1.0 - joining)))
    share, other = alias_table(pull)
    return LawTables(
        len(rates), place, share, other, leave,
        np.rint(levels * pull.sum() * DRAW_PARTS).astype(np.uint32), round(gate * 65536),
    )  # fmt: skip


@lru_cache(maxsize=64)
def _rates(activity: Activity, num_neurons: int) -> F64:
    """c * exp(-skew * rank), at most MAX_RATE, with c found by bisection."""
    falling = np.exp(-activity.skew * (np.arange(num_neurons) + 0.5) / num_neurons)
    low, high = 0.0, math.exp(activity.skew + 1.0)
    for _ in range(100):
        middle = (low + high) / 2
        mean = float(np.minimum(MAX_RATE, middle * falling).mean())
        low, high = (middle, high) if mean < activity.active else (low, middle)
    rates: F64 = np.clip(high * falling, 1e-12, MAX_RATE)
    rates.setflags(write=False)
    return rates


@lru_cache(maxsize=64)
def _novelty(activity: Activity, num_neurons: int) -> float:
    """As the method says; every step asks for it."""
    rates = activity.rates(num_neurons)
    again = float((rates**2).sum() / rates.sum())
    return min(1.0, max(LEAST_NOVELTY, (1.0 - activity.overlap) / max(1e-9, 1.0 - again)))


def _share(chances: F64) -> U32:
    """Chances as shares of 2^32, in steps so coarse that the last bit of an exponential, which
    differs between processors, plays no part."""
    steps = np.minimum(np.rint(chances * CHANCE_STEPS), CHANCE_STEPS - 1).astype(np.uint64)
    return (steps * (SHARE // CHANCE_STEPS)).astype(np.uint32)


def alias_table(weights: F64) -> tuple[U32, U32]:
    """(share, other): Vose's tables for drawing an index in proportion to its weight."""
    n = len(weights)
    scaled = weights * (n / weights.sum())
    share, other = np.ones(n), np.arange(n, dtype=np.uint32)
    small = [i for i in range(n) if scaled[i] < 1.0]
    large = [i for i in range(n) if scaled[i] >= 1.0]
    while small and large:
        less, more = small.pop(), large.pop()
        share[less], other[less] = scaled[less], more
        scaled[more] -= 1.0 - scaled[less]
        (small if scaled[more] < 1.0 else large).append(more)
    return _share(share), other
