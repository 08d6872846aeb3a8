"""Hot clusters and regions that change their sizes, by example."""

from __future__ import annotations

import numpy as np
import pytest

from polyneuron.kernels.neuron_cache import NO_SLOT, NeuronCache, NeuronState, SlotMove


def use(cache: NeuronCache, epoch: int, *neurons: int) -> None:
    """Use neurons that find room, and land what had to be read."""
    found = cache.use(epoch, np.array(neurons, np.uint32))
    assert found is not None
    for neuron in found.misses["neuron"].tolist():
        cache.landed(neuron)


def slots_of(cache: NeuronCache, *neurons: int) -> list[int]:
    return [cache.slot(neuron) for neuron in neurons]


def hot_cache(num_clusters: int, activity: tuple[int, ...]) -> NeuronCache:
    """Clusters of two neurons, all hot, each used as often as said; two cold slots."""
    slots = 2 * num_clusters
    cache = NeuronCache.allocate(100, slots + 2, hot_slots=slots, cluster_neurons=2)
    cache.pin(0, slots, 0)
    for epoch in range(1, max(activity) + 1):
        use(cache, epoch, *(2 * c for c, times in enumerate(activity) if times >= epoch))
    return cache


class TestAdmitHot:
    def test_absent_neurons_are_read_and_cold_ones_copied(self) -> None:
        cache = NeuronCache.allocate(20, 8, hot_slots=4, cluster_neurons=4)
        use(cache, 1, 5, 7, 19)
        cold = slots_of(cache, 5, 7)
        admitted = cache.admit_hot(2, 1)
        assert admitted is not None
        assert admitted.misses.tolist() == [(4, 0), (6, 2)]
        assert admitted.moves == [SlotMove(cold[0], 1, 1), SlotMove(cold[1], 3, 1)]
        assert slots_of(cache, 4, 5, 6, 7) == [0, 1, 2, 3]
        assert cache.state(4) is NeuronState.LOADING and cache.state(5) is NeuronState.PINNED
        cache.landed(4)
        assert cache.state(4) is NeuronState.PINNED
        counters = cache.counters()
        assert (counters.num_pinned, counters.num_resident) == (4, 1)

    def test_copied_slots_are_kept_for_who_reads_them(self) -> None:
        """The old slot of a neuron in use is handed out in a later epoch only."""
        cache = NeuronCache.allocate(20, 3, hot_slots=2, cluster_neurons=2)
        use(cache, 1, 0)
        assert cache.admit_hot(1, 0) is not None
        assert cache.use(1, np.array([9], np.uint32)) is None
        use(cache, 2, 9)
        assert cache.slot(9) == 2

    def test_failed_neuron_is_read_when_asked_again(self) -> None:
        cache = NeuronCache.allocate(20, 4, hot_slots=4, cluster_neurons=2)
        assert cache.admit_hot(1, 3) is not None
        cache.landed(6)
        cache.failed(7)
        again = cache.admit_hot(1, 3)
        assert again is not None and again.misses.tolist() == [(7, 1)] and again.moves == []

    def test_least_active_cluster_makes_place(self) -> None:
        cache = hot_cache(3, (3, 1, 2))
        admitted = cache.admit_hot(10, 20)
        assert admitted is not None
        assert admitted.misses["slot"].tolist() == [2, 3]
        assert slots_of(cache, 2, 3) == [NO_SLOT] * 2
        assert cache.counters().evictions == 2

    def test_clusters_in_use_stay(self) -> None:
        cache = hot_cache(2, (3, 1))
        use(cache, 10, 2)
        admitted = cache.admit_hot(10, 20)
        assert admitted is not None and admitted.misses["slot"].tolist() == [0, 1]
        assert cache.admit_hot(10, 21) is None, "one run is in use, the other loading"

    def test_loading_neuron_makes_its_cluster_wait(self) -> None:
        cache = NeuronCache.allocate(20, 6, hot_slots=2, cluster_neurons=2)
        assert cache.use(1, np.array([3], np.uint32)) is not None
        assert cache.admit_hot(2, 1) is None
        assert cache.counters().num_pinned == 0


class TestResize:
    def test_least_active_clusters_go_and_others_move(self) -> None:
        cache = hot_cache(5, (1, 0, 1, 2, 1))
        moves = cache.resize(10, 6, 12)
        assert slots_of(cache, 2, 3, 8, 9) == [NO_SLOT] * 4, "among equals the last"
        assert moves == [SlotMove(6, 2, 2)]
        assert slots_of(cache, 0, 1, 4, 5, 6, 7) == [0, 1, 4, 5, 2, 3]
        assert cache.pending() == 0

    def test_neighbours_move_as_one(self) -> None:
        cache = hot_cache(4, (1, 1, 2, 2))
        assert cache.resize(10, 4, 4) == [SlotMove(4, 0, 4)]

    def test_clusters_in_use_go_in_the_next_epoch(self) -> None:
        cache = hot_cache(3, (1, 3, 4))
        use(cache, 10, 0)
        assert cache.resize(10, 4, 4) == [], "its run is in use yet"
        assert cache.state(0) is NeuronState.EVICTING
        assert cache.pending() == 3, "one slot in use, two that should move"
        use(cache, 10, 0)
        assert cache.resize(11, 4, 4) == [SlotMove(4, 0, 2)]
        assert cache.state(0) is NeuronState.ABSENT
        assert cache.pending() == 0

    def test_moved_cluster_in_use_keeps_its_old_slots(self) -> None:
        cache = hot_cache(2, (1, 2))
        use(cache, 10, 2)
        assert cache.resize(10, 2, 4) == [SlotMove(2, 0, 2)]
        assert cache.use(10, np.array([50], np.uint32)) is None, "slots 2 and 3 are still read"
        use(cache, 11, 50, 51)
        assert sorted(slots_of(cache, 50, 51)) == [2, 3]

    def test_cold_neurons_in_use_go_in_the_next_epoch(self) -> None:
        cache = NeuronCache.allocate(20, 4)
        use(cache, 1, 0, 1, 2, 3)
        use(cache, 2, 2, 3)
        cache.resize(cache.epoch(), 0, 2)
        assert [cache.state(n) for n in (0, 1)] == [NeuronState.RESIDENT] * 2
        assert [cache.state(n) for n in (2, 3)] == [NeuronState.EVICTING] * 2
        assert cache.pending() == 2
        use(cache, 2, 2)
        assert cache.counters().hits == 3
        use(cache, 3, 0)
        assert [cache.state(n) for n in (2, 3)] == [NeuronState.ABSENT] * 2
        assert cache.pending() == 0

    def test_neurons_may_stay_when_their_slots_come_back(self) -> None:
        cache = NeuronCache.allocate(20, 4)
        use(cache, 1, 0, 1, 2, 3)
        cache.resize(1, 0, 0)
        assert cache.pending() == 4
        cache.resize(1, 0, 4)
        assert [cache.state(n) for n in range(4)] == [NeuronState.RESIDENT] * 4
        assert cache.pending() == 0 and cache.counters().evictions == 0

    def test_loading_neurons_go_after_they_have_landed(self) -> None:
        cache = NeuronCache.allocate(20, 1)
        assert cache.use(1, np.array([7], np.uint32)) is not None
        for epoch in (2, 3):
            cache.resize(epoch, 0, 0)
            assert cache.state(7) is NeuronState.LOADING and cache.pending() == 1
        cache.landed(7)
        cache.resize(4, 0, 0)
        assert cache.state(7) is NeuronState.ABSENT and cache.pending() == 0

    def test_slots_that_came_are_used(self) -> None:
        cache = NeuronCache.allocate(20, 1, max_slots=3)
        use(cache, 1, 0)
        cache.resize(1, 0, 3)
        use(cache, 1, 1, 2)
        assert cache.counters().num_resident == 3


class TestWrongArguments:
    @pytest.mark.parametrize("regions", [(3, 2), (0, 9), (-1, 2)])
    def test_regions_must_fit(self, regions: tuple[int, int]) -> None:
        with pytest.raises(ValueError, match="hot_slots"):
            NeuronCache.allocate(10, 8).resize(1, *regions)

    @pytest.mark.parametrize(("first_neuron", "first_slot"), [(1, 0), (0, 2)])
    def test_pins_begin_at_clusters(self, first_neuron: int, first_slot: int) -> None:
        cache = NeuronCache.allocate(20, 8, hot_slots=8, cluster_neurons=4)
        with pytest.raises(ValueError, match="multiples of 4"):
            cache.pin(first_neuron, 4, first_slot)
