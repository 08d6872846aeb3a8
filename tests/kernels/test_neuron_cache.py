"""The neuron cache's calls, one by one."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from polyneuron.errors import ProtocolError
from polyneuron.kernels._kernels import lib
from polyneuron.kernels.neuron_cache import (
    NO_SLOT,
    SLOT_LATE,
    TRANSITIONS,
    NeuronCache,
    NeuronState,
    NeuronUse,
)

MS = 1_000_000


def ids(*neurons: int) -> NDArray[np.uint32]:
    return np.array(neurons, np.uint32)


def use(cache: NeuronCache, epoch: int, *neurons: int) -> NeuronUse:
    """Use neurons that find room."""
    found = cache.use(epoch, ids(*neurons))
    assert found is not None
    return found


def load(cache: NeuronCache, epoch: int, *neurons: int) -> None:
    """Use neurons and land what had to be read."""
    for miss in use(cache, epoch, *neurons).misses:
        cache.landed(int(miss["neuron"]))


class TestTransitions:
    def test_table_equals_the_library(self) -> None:
        for state in NeuronState:
            allowed = {
                other for other in NeuronState if lib.neuron_cache_allowed(state) >> other & 1
            }
            assert allowed == TRANSITIONS[state]


class TestUse:
    def test_absent_neurons_are_misses(self) -> None:
        cache = NeuronCache.allocate(10, 4)
        found = use(cache, 1, 2, 5)
        assert found.misses["neuron"].tolist() == [2, 5]
        assert (found.slots == found.misses["slot"] | SLOT_LATE).all()
        assert cache.state(2) is NeuronState.LOADING
        assert cache.state(3) is NeuronState.ABSENT and cache.slot(3) == NO_SLOT

    def test_loading_neurons_are_late_then_hits(self) -> None:
        cache = NeuronCache.allocate(10, 4)
        first = use(cache, 1, 2, 5)
        cache.landed(5)
        second = use(cache, 2, 2, 5)
        assert second.misses.size == 0
        assert second.slots.tolist() == [first.slots[0], first.slots[1] & ~np.uint32(SLOT_LATE)]
        counters = cache.counters()
        assert (counters.hits, counters.misses, counters.late) == (1, 2, 1)
        assert counters.num_resident == 2

    def test_neurons_of_the_epoch_stay(self) -> None:
        cache = NeuronCache.allocate(10, 4)
        load(cache, 1, 0, 1, 2)
        assert cache.use(1, ids(3, 4)) is None
        assert [cache.state(n) for n in (3, 4)] == [NeuronState.ABSENT] * 2
        load(cache, 2, 3, 4)
        assert cache.counters().evictions == 1

    def test_refusal_evicts_nothing(self) -> None:
        cache = NeuronCache.allocate(10, 4)
        load(cache, 1, 0, 1, 2, 3)
        assert cache.use(2, ids(0, 4, 5, 6, 7)) is None
        assert cache.counters().evictions == 0

    def test_loading_neurons_are_never_victims(self) -> None:
        cache = NeuronCache.allocate(10, 2)
        use(cache, 1, 0, 1)
        assert cache.use(2, ids(2)) is None
        cache.landed(1)
        assert use(cache, 2, 2).misses["slot"].tolist() == [cache.slot(2)]
        assert cache.state(0) is NeuronState.LOADING
        assert cache.state(1) is NeuronState.ABSENT

    def test_epochs_may_come_back_to_a_stamp(self) -> None:
        """Sixteen bits of stamp: after 65,535 epochs an old use must not look like a new one."""
        cache = NeuronCache.allocate(3, 2)
        load(cache, 1, 0, 1)
        for epoch in range(2, 65_536):
            use(cache, epoch, 1)
        assert use(cache, 65_536, 2).misses.size == 1
        assert cache.state(0) is NeuronState.ABSENT


class TestLoads:
    def test_failed_load_frees_the_slot(self) -> None:
        cache = NeuronCache.allocate(10, 1)
        use(cache, 1, 2)
        cache.failed(2)
        assert cache.state(2) is NeuronState.ABSENT
        assert use(cache, 1, 3).misses.size == 1
        assert cache.counters().failures == 1 and cache.counters().num_resident == 1

    @pytest.mark.parametrize("end", ["landed", "failed"])
    def test_ends_of_other_neurons_change_nothing(self, end: str) -> None:
        cache = NeuronCache.allocate(10, 2)
        load(cache, 1, 2)
        getattr(cache, end)(2)
        getattr(cache, end)(3)
        assert cache.state(2) is NeuronState.RESIDENT
        assert cache.state(3) is NeuronState.ABSENT
        assert cache.counters().failures == 0

    def test_wait_tells_how_it_ended(self) -> None:
        cache = NeuronCache.allocate(10, 3)
        use(cache, 1, 0, 1, 2)
        assert cache.wait(0, MS) == 0
        cache.landed(0)
        cache.failed(1)
        assert [cache.wait(n, 0) for n in (0, 1, 2)] == [1, -1, 0]


class TestPinned:
    def test_pinned_neurons_are_hot_hits(self) -> None:
        cache = NeuronCache.allocate(100, 12, hot_slots=8, cluster_neurons=4)
        cache.pin(20, 8, 0)
        found = use(cache, 1, 19, 20, 27)
        assert found.slots.tolist()[1:] == [0, 7]
        assert cache.state(23) is NeuronState.PINNED
        counters = cache.counters()
        assert (counters.hot_hits, counters.hits, counters.misses) == (2, 2, 1)
        assert (counters.num_pinned, counters.num_resident) == (8, 1)

    def test_pinned_neurons_stay(self) -> None:
        cache = NeuronCache.allocate(100, 6, hot_slots=4, cluster_neurons=4)
        cache.pin(0, 4, 0)
        for epoch in range(1, 40):
            load(cache, epoch, 2 * epoch + 10, 2 * epoch + 11)
        assert [cache.slot(n) for n in range(4)] == [0, 1, 2, 3]


class TestLock:
    def test_held_lock_is_not_free_in_time(self) -> None:
        cache = NeuronCache.allocate(10, 4)
        with (
            cache.locked(MS),
            pytest.raises(ProtocolError, match="lock was not free"),
            cache.locked(MS),
        ):
            raise AssertionError("two hold the lock")
        with cache.locked(MS):
            assert cache.counters().hits == 0

    def test_format_frees_the_lock(self) -> None:
        cache = NeuronCache.allocate(10, 4)
        with cache.locked(MS):
            cache.format(10, 4, 0, 4)
            with cache.locked(MS):
                assert cache.state(0) is NeuronState.ABSENT


class TestWrongArguments:
    def test_address_must_be_aligned(self) -> None:
        with pytest.raises(ValueError, match="multiple of 64"):
            NeuronCache(8)

    @pytest.mark.parametrize("regions", [(5, 4, 4), (0, 9, 8), (-1, 4, 8)])
    def test_regions_must_fit(self, regions: tuple[int, int, int]) -> None:
        hot_slots, num_slots, max_slots = regions
        with pytest.raises(ValueError, match="hot_slots"):
            NeuronCache.allocate(10, num_slots, hot_slots=hot_slots, max_slots=max_slots)

    def test_neurons_are_32_bit(self) -> None:
        with pytest.raises(ValueError, match="neurons: dtype"):
            NeuronCache.allocate(10, 4).use(1, np.array([1]))
