"""The cache actor's state: which weights are where, within how many bytes.

Whole sections: read once, pinned, never evicted. Single neurons are the neuron cache's
(`kernels/neuron_cache.py`), in C and in the arena, with a table of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from polyneuron.errors import ProtocolError


class Residency(StrEnum):
    """Where a weight's bytes are now."""

    ABSENT = "absent"
    LOADING = "loading"
    RESIDENT = "resident"
    PINNED = "pinned"
    EVICTING = "evicting"


TRANSITIONS: dict[Residency, frozenset[Residency]] = {
    Residency.ABSENT: frozenset({Residency.LOADING}),  # admitted, its read is ordered
    Residency.LOADING: frozenset(
        {
            Residency.RESIDENT,  # the bytes have landed
            Residency.ABSENT,  # the read failed
        }
    ),
    Residency.RESIDENT: frozenset(
        {
            Residency.PINNED,  # fixed region: never to be evicted
            Residency.EVICTING,  # chosen as victim
        }
    ),
    Residency.PINNED: frozenset({Residency.RESIDENT}),  # unpinned when its region shrinks
    Residency.EVICTING: frozenset({Residency.ABSENT}),  # no step uses it any more
}


@dataclass(slots=True)
class CacheState:
    """Residency of every weight of the fixed region."""

    region_bytes: int
    weight_bytes: Mapping[str, int]
    residency: dict[str, Residency] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.residency = dict.fromkeys(self.weight_bytes, Residency.ABSENT)
        assert sum(self.weight_bytes.values()) <= self.region_bytes

    def _move(self, name: str, status: Residency) -> None:
        if status not in TRANSITIONS[self.residency[name]]:
            raise ProtocolError(f"{name} cannot go from {self.residency[name]} to {status}")
        self.residency[name] = status

    def admit_fixed(self) -> list[str]:
        """Admit every absent weight; returns their names in reading order."""
        names = [name for name, now in self.residency.items() if now is Residency.ABSENT]
        for name in names:
            self._move(name, Residency.LOADING)
        return names

    def landed(self, names: list[str]) -> None:
        """Reads are complete: the weights are resident and stay."""
        for name in names:
            self._move(name, Residency.RESIDENT)
            self._move(name, Residency.PINNED)

    def read_failed(self, names: list[str]) -> None:
        """Reads failed: the weights may be admitted again."""
        for name in names:
            self._move(name, Residency.ABSENT)

    def resident_bytes(self) -> int:
        """Bytes of weights that may be computed with."""
        present = (Residency.RESIDENT, Residency.PINNED)
        return sum(
            self.weight_bytes[name] for name, now in self.residency.items() if now in present
        )
