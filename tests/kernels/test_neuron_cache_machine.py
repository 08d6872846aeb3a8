"""Random lives of a neuron cache, call by call beside the plain model."""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from polyneuron.kernels.neuron_cache import (
    NO_SLOT,
    SLOT_LATE,
    NeuronCache,
    NeuronState,
)
from tests.support.neuron_cache_model import NeuronCacheModel


def pairs(misses: np.ndarray) -> list[tuple[int, int]]:
    return [(int(miss["neuron"]), int(miss["slot"])) for miss in misses]


class NeuronCacheMachine(RuleBasedStateMachine):
    """Drives the library and the model; slots hold bytes, so that what is read can be checked."""

    @initialize(
        num_neurons=st.integers(1, 40),
        max_slots=st.integers(1, 40),
        cluster_neurons=st.integers(1, 5),
        data=st.data(),
    )
    def start(
        self, num_neurons: int, max_slots: int, cluster_neurons: int, data: st.DataObject
    ) -> None:
        num_slots = data.draw(st.integers(0, max_slots))
        hot_slots = data.draw(st.integers(0, num_slots))
        sizes = (num_neurons, max_slots, hot_slots, num_slots, cluster_neurons)
        self.model = NeuronCacheModel(*sizes)
        self.cache = NeuronCache.allocate(
            num_neurons,
            num_slots,
            max_slots=max_slots,
            hot_slots=hot_slots,
            cluster_neurons=cluster_neurons,
        )
        self.epoch = 1
        self.bytes: dict[int, int] = {}  # slot -> the neuron whose bytes are in it
        self.read_in_epoch: dict[int, int] = {}  # neuron -> slot an executor was given
        self._pin(data)

    def _pin(self, data: st.DataObject) -> None:
        model = self.model
        whole = model.hot_slots - model.hot_slots % model.cluster_neurons
        n = data.draw(st.integers(0, min(whole, model.num_neurons)))
        model.pin(0, n, 0)
        self.cache.pin(0, n, 0)
        self.bytes.update({slot: slot for slot in range(n)})

    @rule()
    def next_epoch(self) -> None:
        self.epoch += 1
        self.read_in_epoch = {}

    @rule(data=st.data(), most=st.integers(1, 40))
    def use(self, data: st.DataObject, most: int) -> None:
        chosen = data.draw(
            st.sets(st.integers(0, self.model.num_neurons - 1), min_size=1, max_size=most)
        )
        neurons = sorted(chosen)
        before = [self.cache.slot(neuron) for neuron in neurons]
        found = self.cache.use(self.epoch, np.array(neurons, np.uint32))
        expected = self.model.use(self.epoch, neurons)
        assert (found is None) == (expected is None)
        if found is None or expected is None:
            absent = [n for n, slot in zip(neurons, before, strict=True) if slot == NO_SLOT]
            assert all(self.cache.state(n) is NeuronState.ABSENT for n in absent)
            return
        slots = [(int(s) & ~SLOT_LATE, bool(s & SLOT_LATE)) for s in found.slots]
        assert slots == expected[0]
        assert pairs(found.misses) == expected[1]
        for neuron, (slot, is_late) in zip(neurons, slots, strict=True):
            assert is_late or self.bytes[slot] == neuron
            self.read_in_epoch[neuron] = slot

    @precondition(lambda self: self._loading())
    @rule(data=st.data(), is_failed=st.integers(0, 3).map(lambda n: n == 0))
    def end_read(self, data: st.DataObject, is_failed: bool) -> None:
        neuron = data.draw(st.sampled_from(self._loading()))
        assert self.cache.wait(neuron, 0) == 0
        if is_failed:
            self.cache.failed(neuron)
            self.model.failed(neuron)
            self.read_in_epoch.pop(neuron, None)
            assert self.cache.wait(neuron, 0) == -1
        else:
            self.bytes[self.cache.slot(neuron)] = neuron
            self.cache.landed(neuron)
            self.model.landed(neuron)
            assert self.cache.wait(neuron, 0) == 1

    def _loading(self) -> list[int]:
        return [neuron for neuron, held in self.model.held.items() if held.is_loading]

    @rule(data=st.data())
    def end_of_no_read(self, data: st.DataObject) -> None:
        """Late news of a read that was given up changes nothing."""
        neuron = data.draw(st.integers(0, self.model.num_neurons - 1))
        if self.model.state(neuron) is not NeuronState.LOADING:
            self.cache.landed(neuron)
            self.cache.failed(neuron)

    @rule(data=st.data())
    def admit_hot(self, data: st.DataObject) -> None:
        model = self.model
        last = (model.num_neurons - 1) // model.cluster_neurons
        cluster = data.draw(st.integers(0, last))
        found = self.cache.admit_hot(self.epoch, cluster)
        expected = model.admit_hot(self.epoch, cluster)
        assert (found is None) == (expected is None)
        if found is not None and expected is not None:
            assert pairs(found.misses) == expected[0]
            assert found.moves == expected[1]
            self._copy(found.moves)

    @rule(data=st.data())
    def resize(self, data: st.DataObject) -> None:
        num_slots = data.draw(st.integers(0, self.model.max_slots))
        hot_slots = data.draw(st.integers(0, num_slots))
        self._resize(hot_slots, num_slots)

    @precondition(lambda self: self.model.pending() > 0)
    @rule()
    def resize_again(self) -> None:
        self._resize(self.model.hot_slots, self.model.num_slots)

    def _resize(self, hot_slots: int, num_slots: int) -> None:
        moves = self.cache.resize(self.epoch, hot_slots, num_slots)
        assert moves == self.model.resize(self.epoch, hot_slots, num_slots)
        self._copy(moves)

    def _copy(self, moves: list) -> None:
        for move in moves:
            for i in range(move.num_slots):
                assert move.to_slot + i not in self.read_in_epoch.values()
                self.bytes[move.to_slot + i] = self.bytes[move.from_slot + i]

    @rule()
    def resize_ends(self) -> None:
        """With every read ended, two epochs are enough for any resize."""
        for neuron in self._loading():
            self.bytes[self.cache.slot(neuron)] = neuron
            self.cache.landed(neuron)
            self.model.landed(neuron)
        for _ in range(2):
            self.next_epoch()
            self._resize(self.model.hot_slots, self.model.num_slots)
        assert self.cache.pending() == 0
        slots = {held.slot for held in self.model.held.values()}
        assert all(slot < self.model.num_slots for slot in slots)

    @invariant()
    def states_and_slots_are_the_models(self) -> None:
        if not hasattr(self, "model"):
            return
        for neuron in range(self.model.num_neurons):
            held = self.model.held.get(neuron)
            assert self.cache.state(neuron) is self.model.state(neuron)
            assert self.cache.slot(neuron) == (NO_SLOT if held is None else held.slot)
        assert self.cache.pending() == self.model.pending()

    @invariant()
    def what_executors_read_is_intact(self) -> None:
        """Nothing used in this epoch is evicted or overwritten, wherever it has moved since."""
        for neuron, slot in getattr(self, "read_in_epoch", {}).items():
            state = self.cache.state(neuron)
            assert state is not NeuronState.ABSENT
            assert state is NeuronState.LOADING or self.bytes[slot] == neuron

    @invariant()
    def no_slot_is_held_twice(self) -> None:
        if not hasattr(self, "model"):
            return
        slots = [self.cache.slot(neuron) for neuron in range(self.model.num_neurons)]
        held = [slot for slot in slots if slot != NO_SLOT]
        assert len(held) == len(set(held))
        assert all(slot < self.model.max_slots for slot in held)

    @invariant()
    def counters_add_up(self) -> None:
        if not hasattr(self, "model"):
            return
        counters = self.cache.counters()
        for name, value in self.model.counters.items():
            assert getattr(counters, name) == value, name
        assert counters.num_pinned == self.model.num_held(is_hot=True)
        assert counters.num_resident == self.model.num_held(is_hot=False)


TestNeuronCacheMachine = NeuronCacheMachine.TestCase
TestNeuronCacheMachine.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
