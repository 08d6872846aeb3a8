"""The neuron cache's use, epochs and cold region written plainly: dicts, lists, one rule a method.

Half of the oracle of the C library; `neuron_cache_model.py` adds the hot region and resizing.
Nothing here is fast, and nothing is shared with the library but its rules and its constants.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from polyneuron.kernels.neuron_cache import NeuronState

MAX_USES = 127
USES_MARGIN = 2
AGEING_USES = 20  # a cold slot, between two halvings
MAX_CARRIED = 64


class Part(Enum):
    """What a cold or hot slot's neuron belongs to."""

    WINDOW = auto()
    MAIN = auto()
    HOT = auto()
    GOING = auto()


@dataclass
class Held:
    """A neuron that has a slot."""

    slot: int
    part: Part
    is_hot: bool = False
    is_loading: bool = False
    is_evicting: bool = False


@dataclass
class Period:
    """What has happened since the window's share was last looked at."""

    uses: int = 0
    epochs: int = 0
    window_hits: int = 0
    main_hits: int = 0
    misses: int = 0
    early_misses: int = 0
    early_epochs: int = 0
    most_misses: int = 0


class NeuronPolicyModel:
    """Who has which slot, and who must go."""

    def __init__(
        self,
        num_neurons: int,
        max_slots: int,
        hot_slots: int,
        num_slots: int,
        cluster_neurons: int = 1,
    ) -> None:
        self.num_neurons, self.max_slots = num_neurons, max_slots
        self.hot_slots, self.num_slots = hot_slots, num_slots
        self.cluster_neurons = cluster_neurons
        self.held: dict[int, Held] = {}
        self.owner: dict[int, int] = {}
        self.vacated: list[int] = []  # slots without an owner, still read in this epoch
        self.free = list(range(hot_slots, num_slots))
        self.window: list[int] = []
        self.window_parked: list[int] = []
        self.main: list[list[int]] = [[] for _ in range(MAX_USES + 1)]
        self.main_parked: list[int] = []
        self.going: list[int] = []
        self.uses = [0] * num_neurons
        self.aged = 0
        self.ageing_credit = 0
        self.epoch: int | None = None
        self.ordinal = 0  # of the epoch
        self.last_use: dict[int, int] = {}
        self.window_share = self.num_cold // 64 + 1
        self.period = Period()
        self.epoch_misses = 0
        self.most_misses = 0
        self.num_misplaced = 0
        self.counters = dict.fromkeys(
            ("hits", "hot_hits", "misses", "late", "evictions", "failures"), 0
        )

    # ---- what can be asked

    @property
    def num_cold(self) -> int:
        return self.num_slots - self.hot_slots

    def state(self, neuron: int) -> NeuronState:
        held = self.held.get(neuron)
        if held is None:
            return NeuronState.ABSENT
        if held.is_loading:
            return NeuronState.LOADING
        if held.is_evicting:
            return NeuronState.EVICTING
        return NeuronState.PINNED if held.is_hot else NeuronState.RESIDENT

    def is_in_use(self, neuron: int) -> bool:
        return self.last_use.get(neuron) == self.ordinal

    def pending(self) -> int:
        return len(self.going) + self.num_misplaced

    def num_held(self, is_hot: bool) -> int:
        return sum(held.is_hot == is_hot for held in self.held.values())

    def is_cold(self, slot: int) -> bool:
        return self.hot_slots <= slot < self.num_slots

    # ---- use

    def use(
        self, epoch: int, neurons: list[int]
    ) -> tuple[list[tuple[int, bool]], list[tuple[int, int]]] | None:
        """Slots with whether they are late, and misses with their slots."""
        self.begin_epoch(epoch)
        absent = [n for n in neurons if n not in self.held]
        present = [n for n in neurons if n in self.held]
        for neuron in present:
            self._touch(neuron)
        if not self._make_room(len(absent)):
            return None
        late = [n for n in present if self.held[n].is_loading]
        hot = [n for n in present if self.held[n].is_hot and n not in late]
        for neuron in absent:
            self._admit(neuron)
        num_cold_uses = sum(not self.held[n].is_hot for n in neurons)
        self.period.uses += num_cold_uses
        self._age(num_cold_uses)
        self.counters["hits"] += len(present) - len(late)
        self.counters["hot_hits"] += len(hot)
        self.counters["late"] += len(late)
        self.counters["misses"] += len(absent)
        slots = [(self.held[n].slot, self.held[n].is_loading) for n in neurons]
        return slots, [(n, self.held[n].slot) for n in absent]

    def _touch(self, neuron: int) -> None:
        self._count_use(neuron)
        if self.is_in_use(neuron):
            return
        self.last_use[neuron] = self.ordinal
        self.period.window_hits += self.held[neuron].part is Part.WINDOW
        self.period.main_hits += self.held[neuron].part is Part.MAIN

    def _admit(self, neuron: int) -> None:
        self.epoch_misses += 1
        self.period.misses += 1
        if neuron in self.last_use:
            age = self.ordinal - self.last_use[neuron]
            self.period.early_misses += age <= self.period.early_epochs
        self.last_use[neuron] = self.ordinal
        self._count_use(neuron)
        slot = self.free.pop(0)
        self.owner[slot] = neuron
        self.held[neuron] = Held(slot, Part.WINDOW, is_loading=True)
        self.window_parked.append(slot)
        # While slots are free, the window's oldest need not compete.
        while self.free and self._num_window() > self.window_share and self._promote_oldest():
            pass

    def _count_use(self, neuron: int) -> None:
        self.uses[neuron] = min(MAX_USES, self.uses[neuron] + 1)

    def _age(self, num_uses: int) -> None:
        round_uses = AGEING_USES * max(1, self.num_cold)
        self.ageing_credit += num_uses * self.num_neurons
        for _ in range(self.ageing_credit // round_uses):
            if self.aged == self.num_neurons:
                self.aged = 0
                self.uses = [uses // 2 for uses in self.uses]
                main = self.main
                self.main = [main[2 * i] + main[2 * i + 1] for i in range(64)]
                self.main += [[] for _ in range(64)]
            self.aged += 1
        self.ageing_credit %= round_uses

    # ---- epochs

    def begin_epoch(self, epoch: int) -> None:
        if epoch == self.epoch:
            return
        self.epoch = epoch
        self.ordinal += 1
        for slot in list(self.going):
            if slot in self.vacated:
                self.going.remove(slot)
                self.vacated.remove(slot)
                self._release(slot)
            elif not self.held[self.owner[slot]].is_loading:
                self._evict(self.owner[slot])
        self._unpark()
        self._adapt_window()

    def _unpark(self) -> None:
        self.window += self.window_parked
        self.window_parked = []
        for slot in self.main_parked:
            self.main[self.uses[self.owner[slot]]].append(slot)
        self.main_parked = []

    def _adapt_window(self) -> None:
        period = self.period
        period.epochs += 1
        period.most_misses = max(period.most_misses, self.epoch_misses)
        self.epoch_misses = 0
        if period.uses < self.num_cold // 4:
            return
        if period.misses:
            window, main = self._num_window(), self._num_main()
            is_dense = period.window_hits * main > period.main_hits * window
            is_early = period.early_misses * 6 > period.misses
            step = self.num_cold // 64 + 1
            self.window_share += step if is_dense or is_early else -min(step, self.window_share)
            decayed = self.most_misses - self.most_misses // 4
            self.most_misses = max(decayed, period.most_misses)
        self.window_share = max(self.window_share, self.num_cold // 64 + 1)
        self.window_share = min(self.window_share, self.num_cold // 2 + 1)
        early_uses = self.num_cold * 3 // 4
        early = early_uses * period.epochs // period.uses if period.uses else 0
        self.period = Period(early_epochs=early)

    # ---- victims

    def _num_window(self) -> int:
        return len(self.window) + len(self.window_parked)

    def _num_main(self) -> int:
        return sum(map(len, self.main)) + len(self.main_parked)

    def _may_go(self, slot: int) -> bool:
        neuron = self.owner[slot]
        return not self.is_in_use(neuron) and not self.held[neuron].is_loading

    def _window_front(self) -> int | None:
        while self.window and not self._may_go(self.window[0]):
            self.window_parked.append(self.window.pop(0))
        return self.window[0] if self.window else None

    def _main_victim(self) -> int | None:
        seen: list[int] = []
        for uses in range(MAX_USES + 1):
            while self.main[uses] and len(seen) < MAX_CARRIED:
                slot = self.main[uses][0]
                now = self.uses[self.owner[slot]]
                if not self._may_go(slot):
                    self.main_parked.append(self.main[uses].pop(0))
                elif now == uses:
                    return slot
                else:
                    self.main[now].append(self.main[uses].pop(0))
                    seen.append(slot)
        return min(seen, key=lambda slot: self.uses[self.owner[slot]], default=None)

    def _promote_oldest(self) -> bool:
        slot = self._window_front()
        if slot is None:
            return False
        neuron = self.owner[slot]
        self.window.remove(slot)
        self.main[self.uses[neuron]].append(slot)
        self.held[neuron].part = Part.MAIN
        return True

    def _make_room(self, n: int) -> bool:
        in_parts = [x for x, held in self.held.items() if held.part in (Part.WINDOW, Part.MAIN)]
        if n > len(self.free) + sum(not self.is_in_use(neuron) for neuron in in_parts):
            return False
        is_last_look = False
        while len(self.free) < n:
            if self._evict_one():
                continue
            if is_last_look:
                return False
            is_last_look = True
            self._unpark()
        return True

    def _window_slots(self) -> int:
        return self._num_window() + len(self.free)

    def _should_return(self, newcomer: int, victim: int | None) -> bool:
        if self._window_slots() <= max(self.window_share, self.most_misses):
            return False
        if victim is None:
            return self._num_main() == 0
        return self._uses_in(newcomer) >= self._uses_in(victim)

    def _evict_one(self) -> bool:
        while True:
            newcomer, victim = self._window_front(), self._main_victim()
            if newcomer is None and victim is None:
                return False
            is_full = self._window_slots() >= self.window_share
            if newcomer is None or (victim is not None and not is_full):
                assert victim is not None
                self._evict(self.owner[victim])
                return True
            if self._should_return(newcomer, victim):
                self._promote_oldest()
                continue
            if victim is None or self._uses_in(newcomer) <= self._uses_in(victim) + USES_MARGIN:
                self._evict(self.owner[newcomer])
                return True
            self._promote_oldest()
            if self._window_slots() < self.window_share:
                self._evict(self.owner[victim])
                return True

    def _uses_in(self, slot: int) -> int:
        return self.uses[self.owner[slot]]

    # ---- slots

    def _release(self, slot: int) -> None:
        if self.is_cold(slot):
            self.free.append(slot)

    def _leave_lists(self, slot: int) -> None:
        for slots in (self.window, self.window_parked, *self.main, self.main_parked, self.going):
            if slot in slots:
                slots.remove(slot)

    def _lose(self, neuron: int) -> None:
        slot = self.held.pop(neuron).slot
        del self.owner[slot]
        self._leave_lists(slot)
        self._release(slot)

    def _evict(self, neuron: int) -> None:
        self._lose(neuron)
        self.counters["evictions"] += 1

    def landed(self, neuron: int) -> None:
        if neuron in self.held:
            self.held[neuron].is_loading = False

    def failed(self, neuron: int) -> None:
        if self.state(neuron) is NeuronState.LOADING:
            self._lose(neuron)
            self.counters["failures"] += 1

    def _expel(self, neuron: int) -> None:
        held = self.held[neuron]
        if not self.is_in_use(neuron) and not held.is_loading:
            self._evict(neuron)
            return
        self._leave_lists(held.slot)
        self.going.append(held.slot)
        held.part = Part.GOING
        held.is_evicting = not held.is_loading

    def _vacate(self, slot: int, is_in_use: bool) -> None:
        del self.owner[slot]
        self._leave_lists(slot)
        if is_in_use:
            self.vacated.append(slot)
            self.going.append(slot)
        else:
            self._release(slot)
