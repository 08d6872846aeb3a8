"""Choosing the next token from logits: llama.cpp's chain with its names, defaults and neutrals.

Order: penalties, top-k, typical, top-p, min-p, temperature. The choice depends on the parameters,
the seed, the tokens so far and the logits, on nothing else.
"""

import math
import secrets
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from polyneuron.errors import ConfigError, EngineError
from polyneuron.kernels.gemv import argmax, top_k

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
Ids = NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class Setting:
    """One sampling parameter: its flag, default, the value that changes nothing, and its range."""

    flag: str
    default: float
    neutral: float
    low: float = -math.inf
    high: float = math.inf
    whole: bool = False


SETTINGS: dict[str, Setting] = {  # field of SamplingParams -> what is known of it
    "repeat_last_n": Setting("--repeat-last-n", 64, 0, low=-1, whole=True),  # -1: all tokens
    "repeat_penalty": Setting("--repeat-penalty", 1.0, 1.0, low=1e-6),
    "frequency_penalty": Setting("--frequency-penalty", 0.0, 0.0),
    "presence_penalty": Setting("--presence-penalty", 0.0, 0.0),
    "top_k": Setting("--top-k", 40, 0, whole=True),  # below 0 is off too
    "typical_p": Setting("--typical", 1.0, 1.0, low=0.0, high=1.0),
    "top_p": Setting("--top-p", 0.95, 1.0, low=0.0, high=1.0),
    "min_p": Setting("--min-p", 0.05, 0.0, low=0.0, high=1.0),
    "temperature": Setting("--temp", 0.8, 1.0),  # 0 and below: the largest logit
    "seed": Setting("--seed", -1, -1, low=-1, high=2**64 - 1, whole=True),  # -1: random
}


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen; every field is checked against its range."""

    repeat_last_n: int = int(SETTINGS["repeat_last_n"].default)
    repeat_penalty: float = SETTINGS["repeat_penalty"].default
    frequency_penalty: float = SETTINGS["frequency_penalty"].default
    presence_penalty: float = SETTINGS["presence_penalty"].default
    top_k: int = int(SETTINGS["top_k"].default)
    typical_p: float = SETTINGS["typical_p"].default
    top_p: float = SETTINGS["top_p"].default
    min_p: float = SETTINGS["min_p"].default
    temperature: float = SETTINGS["temperature"].default
    seed: int = int(SETTINGS["seed"].default)

    def __post_init__(self) -> None:
        for name, setting in SETTINGS.items():
            _check(setting, getattr(self, name))

    def for_candidates(self, count: int) -> list[Self]:
        """Parameters of several answers to one prompt: as these, the i-th (from 0) with seed + i.

        So each of them is what its seed gives alone. A random seed is drawn once for all.
        """
        if count == 1:
            return [self]
        first = self.seed if self.seed >= 0 else secrets.randbits(32)
        return [replace(self, seed=(first + i) % 2**64) for i in range(count)]

    @property
    def has_penalties(self) -> bool:
        """Whether any token's logit is changed for having occurred."""
        changed = (self.repeat_penalty, self.frequency_penalty, self.presence_penalty) != (1, 0, 0)
        return changed and self.repeat_last_n != 0


def _check(setting: Setting, value: object) -> None:
    kinds = (int,) if setting.whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds):
        wanted = "a whole number" if setting.whole else "a number"
        raise ConfigError(f"{setting.flag}: {value!r} is not {wanted}")
    assert isinstance(value, int | float)
    if not setting.low <= value <= setting.high or math.isinf(value):
        bounds = f"{setting.low:g} to {setting.high:g}"
        raise ConfigError(
            f"{setting.flag}: {value} is outside of {bounds} (off: {setting.neutral:g})"
        )


class Sampler:
    """Chooses the tokens of one request; has a random generator of its own."""

    def __init__(self, params: SamplingParams, prompt_tokens: Iterable[int]) -> None:
        self.params = params
        self.seed = params.seed if params.seed >= 0 else secrets.randbits(32)
        self._random = np.random.Generator(np.random.PCG64(self.seed))
        length = None if params.repeat_last_n < 0 else params.repeat_last_n
        self._recent = deque(prompt_tokens, maxlen=length)

    def sample(self, logits: F32) -> int:
        """Choose a token by logits (vocab_size), which stay as they are, and remember it."""
        if self.params.has_penalties:
            logits = self._penalised(logits)
        if self.params.temperature <= 0:
            token_id = argmax(logits)
            _check_finite(float(logits[token_id]))
        else:
            token_id = self._draw(logits)
        self._recent.append(token_id)
        return token_id

    def _penalised(self, logits: F32) -> F32:
        """Logits with those of recent tokens lowered, in a copy."""
        params = self.params
        recent, counts = np.unique(np.fromiter(self._recent, np.int64), return_counts=True)
        touched = logits[recent]
        factor = np.float32(params.repeat_penalty)
        touched = np.where(touched <= 0, touched * factor, touched / factor)
        touched -= counts.astype(np.float32) * np.float32(params.frequency_penalty)
        touched -= np.float32(params.presence_penalty)
        logits = logits.copy()
        logits[recent] = touched
        return logits

    def _draw(self, logits: F32) -> int:
        params = self.params
        ids, values, total = self._candidates(logits)
        if params.typical_p < 1:
            ids, values = _typical(ids, values, params.typical_p)
            total = float(_weights(values).sum())
        if params.top_p < 1:
            kept = int(np.searchsorted(np.cumsum(_weights(values)), params.top_p * total)) + 1
            ids, values = ids[:kept], values[:kept]
        if params.min_p > 0:
            kept = int(np.count_nonzero(values >= values[0] + math.log(params.min_p)))
            ids, values = ids[:kept], values[:kept]
        mass = np.cumsum(_weights(values / params.temperature))
        chosen = int(np.searchsorted(mass, self._random.random() * mass[-1], side="right"))
        return int(ids[min(chosen, ids.size - 1)])

    def _candidates(self, logits: F32) -> tuple[Ids, F64, float]:
        """Ids and logits to draw from, descending, and the weight of the whole they are part of.

        Without top-k a long tail need not be sorted when min-p will drop it anyway.
        """
        params = self.params
        count, total = logits.size, None
        if params.top_k > 0:
            count = min(params.top_k, count)
        elif params.min_p > 0 and params.typical_p >= 1:
            largest = float(logits[argmax(logits)])
            _check_finite(largest)
            total = float(np.exp(logits.astype(np.float64) - largest).sum())
            count = int(np.count_nonzero(logits >= largest + math.log(params.min_p) - 1e-3))
        ids, top = top_k(logits, count)
        _check_finite(float(top[0]))
        values = top.astype(np.float64)
        return ids, values, float(_weights(values).sum()) if total is None else total


def _typical(ids: Ids, values: F64, typical_p: float) -> tuple[Ids, F64]:
    """Keep the tokens whose surprise is nearest to the entropy, up to `typical_p` of the mass."""
    probabilities = _weights(values)
    probabilities /= probabilities.sum()
    with np.errstate(divide="ignore"):
        surprise = -np.log(probabilities)
    entropy = float(np.sum(probabilities * surprise, where=probabilities > 0))
    nearest = np.argsort(np.abs(surprise - entropy), kind="stable")
    kept = int(np.searchsorted(np.cumsum(probabilities[nearest]), typical_p, side="right")) + 1
    chosen = np.sort(nearest[:kept])  # descending logits again
    return ids[chosen], values[chosen]


def _weights(values: F64) -> F64:
    """Probabilities of logits up to a common factor; the largest, values[0], has 1."""
    weights: F64 = np.exp(values - values[0])
    return weights


def _check_finite(largest: float) -> None:
    if not math.isfinite(largest):
        raise EngineError(f"the largest logit is {largest}: weights or activations are broken")


def log_probabilities(logits: F32, k: int) -> list[tuple[int, float]]:
    """The k likeliest tokens with the natural logarithm of their probability, likeliest first."""
    ids, values = top_k(logits, min(k, logits.size))
    total = _log_total(logits, float(values[0]))
    return [(int(i), float(value) - total) for i, value in zip(ids, values, strict=True)]


def log_probability(logits: F32, token_id: int) -> float:
    """Natural logarithm of the probability that logits (vocab_size), as they are, give a token."""
    return float(logits[token_id]) - _log_total(logits, float(logits.max()))


def _log_total(logits: F32, largest: float) -> float:
    return largest + math.log(float(np.exp(logits.astype(np.float64) - largest).sum()))
