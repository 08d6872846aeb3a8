"""Python's face of the neuron cache (`kernels/src/neuron_cache_api.h` has the rules).

A `NeuronCache` is an address: in the arena, where executors use the same cache from C, or in memory
of its own, for the simulation and for tests. It decides nothing and takes no lock by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from polyneuron.errors import ProtocolError
from polyneuron.kernels._kernels import ffi, lib
from polyneuron.kernels.buffers import read_pointer

if TYPE_CHECKING:
    from polyneuron.kernels._kernels import CData

BLOCK_ALIGNMENT = 64  # of the cache's address, bytes
NO_SLOT: int = lib.NO_SLOT
SLOT_LATE: int = lib.SLOT_LATE

NEURON_MISS = np.dtype([("neuron", np.uint32), ("slot", np.uint32)])
assert NEURON_MISS.itemsize == ffi.sizeof("struct neuron_miss")


class NeuronState(IntEnum):
    """Where a neuron's rows are, as `enum neuron_state`."""

    ABSENT = 0
    LOADING = 1
    RESIDENT = 2
    PINNED = 3
    EVICTING = 4


TRANSITIONS: dict[NeuronState, frozenset[NeuronState]] = {
    NeuronState.ABSENT: frozenset(
        {
            NeuronState.LOADING,  # admitted
            NeuronState.PINNED,  # read at start-up
        }
    ),
    NeuronState.LOADING: frozenset(
        {
            NeuronState.RESIDENT,  # landed in the cold region
            NeuronState.PINNED,  # landed in the hot region
            NeuronState.ABSENT,  # its read failed
        }
    ),
    NeuronState.RESIDENT: frozenset(
        {
            NeuronState.ABSENT,  # evicted
            NeuronState.EVICTING,  # its slot leaves the region and is in use
            NeuronState.PINNED,  # its cluster became hot
        }
    ),
    NeuronState.PINNED: frozenset(
        {
            NeuronState.ABSENT,  # its cluster was dropped
            NeuronState.EVICTING,  # the same, and is in use
            NeuronState.PINNED,  # its cluster moved
        }
    ),
    NeuronState.EVICTING: frozenset(
        {
            NeuronState.ABSENT,  # the epoch is over
            NeuronState.RESIDENT,  # its slot came back before that
            NeuronState.PINNED,  # its cluster became hot before that
        }
    ),
}


class NeuronUse(NamedTuple):
    """What `NeuronCache.use` found."""

    slots: NDArray[np.uint32]  # (n,), SLOT_LATE set where the bytes have not landed
    misses: NDArray[np.void]  # (num_misses,) of NEURON_MISS: what must be read, and where to


class SlotMove(NamedTuple):
    """Bytes of slots that the caller copies before it unlocks."""

    from_slot: int
    to_slot: int
    num_slots: int


class HotAdmission(NamedTuple):
    """What `NeuronCache.admit_hot` asks for: reads into misses' slots, then copies."""

    misses: NDArray[np.void]  # (num_misses,) of NEURON_MISS
    moves: list[SlotMove]


@dataclass(frozen=True, slots=True)
class NeuronCacheCounters:
    """`struct neuron_cache_counters`; bytes of a region are its slots times the slot's bytes."""

    hits: int
    hot_hits: int
    misses: int
    late: int
    evictions: int
    failures: int
    num_resident: int
    num_pinned: int


@dataclass(frozen=True, slots=True)
class NeuronCacheSizes:
    """`struct neuron_cache_sizes`: what the cache was formatted for, and its regions now."""

    num_neurons: int
    max_slots: int
    hot_slots: int
    num_slots: int
    cluster_neurons: int

    def check(self, hot_slots: int, num_slots: int) -> None:
        """Raise `ValueError` unless the regions could have these sizes."""
        if not 0 <= hot_slots <= num_slots <= self.max_slots:
            raise ValueError(
                f"hot_slots {hot_slots}, num_slots {num_slots}, max_slots {self.max_slots}: "
                "need 0 <= hot_slots <= num_slots <= max_slots"
            )


def neuron_cache_bytes(num_neurons: int, max_slots: int) -> int:
    """Bytes of a cache of so many neurons and at most so many slots."""
    return int(lib.neuron_cache_bytes(num_neurons, max_slots))


class NeuronCache:
    """The neuron cache at an address; `keep` is whatever must live as long as the mapping."""

    def __init__(self, address: int, keep: object = None) -> None:
        if address % BLOCK_ALIGNMENT:
            raise ValueError(f"neuron cache at {address:#x}: needs a multiple of {BLOCK_ALIGNMENT}")
        self.address = address
        self._keep = keep
        self._base = ffi.cast("void *", address)

    @classmethod
    def allocate(
        cls,
        num_neurons: int,
        num_slots: int,
        *,
        hot_slots: int = 0,
        max_slots: int | None = None,
        cluster_neurons: int = 1,
    ) -> NeuronCache:
        """A formatted cache in memory of its own."""
        most = num_slots if max_slots is None else max_slots
        memory = np.empty(neuron_cache_bytes(num_neurons, most) + BLOCK_ALIGNMENT, np.uint8)
        cache = cls(memory.ctypes.data + -memory.ctypes.data % BLOCK_ALIGNMENT, memory)
        cache.format(num_neurons, most, hot_slots, num_slots, cluster_neurons)
        return cache

    def format(
        self,
        num_neurons: int,
        max_slots: int,
        hot_slots: int,
        num_slots: int,
        cluster_neurons: int = 1,
    ) -> None:
        """Every neuron absent, every slot free, the lock free, counters zero.

        Nobody else may be at work in the cache, and no read it ordered may be under way.
        """
        sizes = NeuronCacheSizes(num_neurons, max_slots, hot_slots, num_slots, cluster_neurons)
        sizes.check(hot_slots, num_slots)
        if num_neurons < 1 or cluster_neurons < 1:
            raise ValueError("num_neurons and cluster_neurons: need at least 1")
        lib.neuron_cache_format(
            self._base, num_neurons, max_slots, hot_slots, num_slots, cluster_neurons
        )

    @contextmanager
    def locked(self, timeout_ns: int) -> Iterator[None]:
        """Hold the cache's lock; `ProtocolError` when it is not free in time."""
        if lib.neuron_cache_lock(self._base, timeout_ns) != 0:
            raise ProtocolError(f"the neuron cache's lock was not free within {timeout_ns} ns")
        try:
            yield
        finally:
            lib.neuron_cache_unlock(self._base)

    def use(self, epoch: int, neurons: NDArray[np.uint32]) -> NeuronUse | None:
        """Use neurons (ascending, no doubles) in `epoch`; None when some found no slot."""
        slots = np.empty(neurons.size, np.uint32)
        misses = np.empty(neurons.size, NEURON_MISS)
        num_misses = lib.neuron_cache_use(
            self._base,
            epoch,
            read_pointer("neurons", neurons, np.uint32, (neurons.size,)),
            neurons.size,
            ffi.from_buffer("uint32_t[]", slots),
            ffi.from_buffer("struct neuron_miss[]", misses),
        )
        return None if num_misses < 0 else NeuronUse(slots, misses[:num_misses])

    def landed(self, neuron: int) -> None:
        """A loading neuron's bytes are in its slot."""
        lib.neuron_cache_landed(self._base, neuron)

    def failed(self, neuron: int) -> None:
        """A loading neuron could not be read: it is absent again."""
        lib.neuron_cache_failed(self._base, neuron)

    def wait(self, neuron: int, timeout_ns: int) -> int:
        """Wait while the neuron loads: 1 it may be used, 0 the time is over, -1 it is absent."""
        return int(lib.neuron_cache_wait(self._base, neuron, timeout_ns))

    def pin(self, first_neuron: int, n: int, first_slot: int) -> None:
        """Pin n consecutive absent neurons, already read, in consecutive free hot slots."""
        sizes = self.sizes()
        if first_neuron % sizes.cluster_neurons or first_slot % sizes.cluster_neurons:
            raise ValueError(
                f"first_neuron {first_neuron}, first_slot {first_slot}: "
                f"need multiples of {sizes.cluster_neurons}"
            )
        lib.neuron_cache_pin(self._base, first_neuron, n, first_slot)

    def admit_hot(self, epoch: int, cluster: int) -> HotAdmission | None:
        """Make a cluster hot; None when it, or every run it could have, is busy."""
        room = self.sizes().cluster_neurons
        misses = np.empty(room, NEURON_MISS)
        moves = ffi.new("struct slot_move[]", room)
        num_moves = ffi.new("uint32_t *")
        num_misses = lib.neuron_cache_admit_hot(
            self._base,
            epoch,
            cluster,
            ffi.from_buffer("struct neuron_miss[]", misses),
            moves,
            num_moves,
        )
        if num_misses < 0:
            return None
        return HotAdmission(misses[:num_misses], _slot_moves(moves, num_moves[0]))

    def resize(self, epoch: int, hot_slots: int, num_slots: int) -> list[SlotMove]:
        """Give both regions new sizes; call again in later epochs while slots are pending."""
        self.sizes().check(hot_slots, num_slots)
        moves = ffi.new("struct slot_move[]", max(1, hot_slots))
        num_moves = lib.neuron_cache_resize(self._base, epoch, hot_slots, num_slots, moves)
        return _slot_moves(moves, num_moves)

    def epoch(self) -> int:
        """The epoch that the last call named; 0 before the first."""
        return int(lib.neuron_cache_epoch(self._base))

    def pending(self) -> int:
        """Slots that the last resize could not free yet."""
        return int(lib.neuron_cache_pending(self._base))

    def state(self, neuron: int) -> NeuronState:
        """The neuron's state now."""
        return NeuronState(lib.neuron_cache_state(self._base, neuron))

    def slot(self, neuron: int) -> int:
        """The neuron's slot now, NO_SLOT if it has none."""
        return int(lib.neuron_cache_slot(self._base, neuron))

    def counters(self) -> NeuronCacheCounters:
        """All counters."""
        counters = ffi.new("struct neuron_cache_counters *")
        lib.neuron_cache_get_counters(self._base, counters)
        return NeuronCacheCounters(
            **{name: int(getattr(counters, name)) for name in NeuronCacheCounters.__slots__}
        )

    def sizes(self) -> NeuronCacheSizes:
        """What the cache was formatted for, and its regions now."""
        sizes = ffi.new("struct neuron_cache_sizes *")
        lib.neuron_cache_get_sizes(self._base, sizes)
        return NeuronCacheSizes(
            **{name: int(getattr(sizes, name)) for name in NeuronCacheSizes.__slots__}
        )


def _slot_moves(moves: CData, num_moves: int) -> list[SlotMove]:
    found = (moves[i] for i in range(num_moves))
    return [SlotMove(move.from_slot, move.to_slot, move.num_slots) for move in found]
