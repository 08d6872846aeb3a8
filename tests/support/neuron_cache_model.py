"""The neuron cache written plainly: the oracle of the C library, and the model of a trace."""

from __future__ import annotations

from dataclasses import dataclass

from polyneuron.kernels.neuron_cache import SlotMove
from tests.support.neuron_policy_model import Held, NeuronPolicyModel, Part


@dataclass
class Run:
    """What lies in the slots of one run of the hot region."""

    activity: int
    is_empty: bool
    is_held: bool
    is_loading: bool
    is_in_use: bool


class NeuronCacheModel(NeuronPolicyModel):
    """The neuron cache over Python's containers; calls and results as `NeuronCache`'s."""

    def pin(self, first_neuron: int, n: int, first_slot: int) -> None:
        for i in range(n):
            self.owner[first_slot + i] = first_neuron + i
            self.held[first_neuron + i] = Held(first_slot + i, Part.HOT, is_hot=True)

    def _slots_of_run(self, index: int) -> range:
        return range(index * self.cluster_neurons, (index + 1) * self.cluster_neurons)

    def hot_neurons(self, index: int) -> list[int]:
        """Neurons of the cluster that stays in a run."""
        owners = [self.owner[slot] for slot in self._slots_of_run(index) if slot in self.owner]
        return [neuron for neuron in owners if self.held[neuron].part is Part.HOT]

    def _run(self, index: int) -> Run:
        slots, neurons = self._slots_of_run(index), self.hot_neurons(index)
        return Run(
            activity=sum(self.uses[neuron] for neuron in neurons),
            is_empty=not any(slot in self.owner or slot in self.vacated for slot in slots),
            is_held=bool(neurons),
            is_loading=any(self.held[neuron].is_loading for neuron in neurons),
            is_in_use=any(self.is_in_use(neuron) for neuron in neurons),
        )

    def _num_runs(self, num_slots: int) -> int:
        return num_slots // self.cluster_neurons

    def _find_run(self) -> int | None:
        runs = [self._run(index) for index in range(self._num_runs(self.hot_slots))]
        for index, run in enumerate(runs):
            if run.is_empty:
                return index
        movable = [
            (run.activity, -index)
            for index, run in enumerate(runs)
            if run.is_held and not run.is_loading and not run.is_in_use
        ]
        if not movable:
            return None
        index = -min(movable)[1]
        for neuron in self.hot_neurons(index):
            self._expel(neuron)
        return index

    def admit_hot(
        self, epoch: int, cluster: int
    ) -> tuple[list[tuple[int, int]], list[SlotMove]] | None:
        self.begin_epoch(epoch)
        first = cluster * self.cluster_neurons
        neurons = range(first, min(first + self.cluster_neurons, self.num_neurons))
        held = [self.held[neuron] for neuron in neurons if neuron in self.held]
        cold = [x for x in held if x.part is not Part.HOT]
        if any(x.part is Part.GOING or x.is_loading for x in cold):
            return None
        hot = [x.slot // self.cluster_neurons for x in held if x.part is Part.HOT]
        run = hot[0] if hot else self._find_run()
        if run is None or run >= self._num_runs(self.hot_slots):
            return None
        misses, moves = [], []
        for neuron, slot in zip(neurons, self._slots_of_run(run), strict=False):
            if neuron not in self.held:
                self.held[neuron] = Held(slot, Part.HOT, is_hot=True, is_loading=True)
                self.counters["misses"] += 1
                misses.append((neuron, slot))
            elif self.held[neuron].part is not Part.HOT:
                moves.append(SlotMove(self.held[neuron].slot, slot, 1))
                self._vacate(self.held[neuron].slot, self.is_in_use(neuron))
                self.held[neuron] = Held(slot, Part.HOT, is_hot=True)
            self.owner[slot] = neuron
        return misses, merged(moves)

    # ---- other sizes

    def resize(self, epoch: int, hot_slots: int, num_slots: int) -> list[SlotMove]:
        self.begin_epoch(epoch)
        old = {slot for slot in range(self.max_slots) if self.is_cold(slot)}
        self.hot_slots, self.num_slots = hot_slots, num_slots
        for slot in range(self.max_slots):
            neuron = self.owner.get(slot)
            if slot in old and not self.is_cold(slot):
                if slot in self.free:
                    self.free.remove(slot)
                elif neuron is not None and not self.held[neuron].is_hot:
                    self._expel(neuron)
            elif slot not in old and self.is_cold(slot):
                if neuron is None and slot not in self.vacated:
                    self.free.append(slot)
                elif neuron is not None and not self.held[neuron].is_hot:
                    self._come_back(neuron)
        self._drop_clusters()
        return self._move_clusters()

    def _come_back(self, neuron: int) -> None:
        held = self.held[neuron]
        self.going.remove(held.slot)
        held.is_evicting, held.part = False, Part.WINDOW
        (self.window_parked if self.is_in_use(neuron) else self.window).append(held.slot)

    def _drop_clusters(self) -> None:
        runs = {index: self._run(index) for index in range(self._num_runs(self.max_slots))}
        held = [(run.activity, -index) for index, run in runs.items() if run.is_held]
        num_dropped = max(0, len(held) - self._num_runs(self.hot_slots))
        dropped = [-minus for _, minus in sorted(held)[:num_dropped]]
        for index in sorted(dropped, reverse=True):
            for neuron in self.hot_neurons(index):
                self._expel(neuron)

    def _move_clusters(self) -> list[SlotMove]:
        moves = []
        last = self._num_runs(self.hot_slots)
        self.num_misplaced = 0
        for index in range(last, self._num_runs(self.max_slots)):
            run = self._run(index)
            empty = [to for to in range(last) if self._run(to).is_empty]
            if not run.is_held:
                continue
            if run.is_loading or not empty:
                self.num_misplaced += self.cluster_neurons
                continue
            for neuron in self.hot_neurons(index):
                held = self.held[neuron]
                to = empty[0] * self.cluster_neurons + held.slot % self.cluster_neurons
                moves.append(SlotMove(held.slot, to, 1))
                self._vacate(held.slot, run.is_in_use)
                self.owner[to] = neuron
                held.slot = to
        return merged(moves)


def merged(moves: list[SlotMove]) -> list[SlotMove]:
    """The same moves, neighbours as one."""
    out: list[SlotMove] = []
    for move in moves:
        if out and move == SlotMove(
            out[-1].from_slot + out[-1].num_slots, out[-1].to_slot + out[-1].num_slots, 1
        ):
            out[-1] = out[-1]._replace(num_slots=out[-1].num_slots + 1)
        else:
            out.append(move)
    return out
