"""Simulated steps that play a recording: its very neurons, token by token, round and round."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from polyneuron.io.activation_trace import needed_words
from polyneuron.kernels.neuron_cache import NeuronCache
from polyneuron.kernels.simulation import CacheKind, StepSimulation
from tests.kernels.test_simulation import LAYERS, NEURONS, simulation
from tests.support.neuron_traces import Trace, run_trace
from tests.support.recordings import made_up

TOKENS = 7
MASKS = made_up(LAYERS, TOKENS, NEURONS)


def bits_of(masks: NDArray[np.bool_]) -> NDArray[np.uint64]:
    """(layers, tokens, words) of (tokens, layers, neurons)."""
    return np.stack([needed_words(masks[:, layer]) for layer in range(masks.shape[1])])


def playing(
    kind: CacheKind = CacheKind.ALL, slots: int = 0, sequences: int = 1, task: int = 0
) -> StepSimulation:
    made = simulation(kind, slots, sequences=sequences)
    made.play_recorded(bits_of(MASKS), task)
    for sequence in range(sequences):
        made.begin(sequence)
    return made


def step(made: StepSimulation, *sequences: int) -> int:
    """Neurons that were needed."""
    return made.step(sequences, [0] * len(sequences)).needed


def active(made: StepSimulation, sequence: int) -> NDArray[np.bool_]:
    """(layers, neurons) of its last token."""
    bits = np.unpackbits(made.active_bits(sequence).view(np.uint8), bitorder="little")
    return bits.reshape(LAYERS, NEURONS).astype(bool)


class TestPlaying:
    def test_tokens_come_in_turn_and_again(self) -> None:
        made = playing()
        for number in range(3 * TOKENS):
            assert made.next_recorded(0) == number % TOKENS
            assert step(made, 0) == MASKS[number % TOKENS].sum()
            assert (active(made, 0) == MASKS[number % TOKENS]).all()

    def test_sequences_have_places_of_their_own(self) -> None:
        made = playing(sequences=3)
        for sequence, token in ((0, 5), (1, 2 + TOKENS), (2, 2)):
            made.go_to_recorded(sequence, token)
        assert step(made, 0, 1) == (MASKS[5] | MASKS[2]).sum()
        assert step(made, 1) == MASKS[3].sum()
        assert [made.next_recorded(sequence) for sequence in range(3)] == [6, 4, 2]
        made.begin(0)  # a new sequence in its place goes on
        assert step(made, 0) == MASKS[6].sum()

    def test_nothing_is_drawn(self) -> None:
        first, second = playing(), playing()
        for made, levels in ((first, 0), (second, 1)):
            for _ in range(5):
                made.step([0], [levels])
        assert (first.active_bits(0) == second.active_bits(0)).all()

    @pytest.mark.parametrize("shape", [(LAYERS, 0, 4), (LAYERS - 1, 3, 4), (LAYERS, 3, 5)])
    def test_other_shapes_are_refused(self, shape: tuple[int, ...]) -> None:
        with pytest.raises(ValueError, match="layers and words must be"):
            simulation().play_recorded(np.zeros(shape, np.uint64))


class TestTasks:
    @pytest.mark.parametrize("slots", [260, 400, 600])
    @pytest.mark.parametrize("task", [0, 32, 64, 96, NEURONS])
    def test_cache_is_asked_task_by_task(self, slots: int, task: int) -> None:
        """A later task's neurons may go for an earlier one's, as they do in the engine."""
        made = playing(CacheKind.NEURON, slots, task=task)
        misses = [made.step([0], [0]).misses for _ in range(4 * TOKENS)]
        cache = NeuronCache.allocate(LAYERS * NEURONS, slots)
        trace: Trace = []
        for number in range(4 * TOKENS):
            for layer in range(LAYERS):
                mask, epoch = MASKS[number % TOKENS, layer], number * LAYERS + layer + 1
                for begin in range(0, NEURONS, task or NEURONS):
                    ids = np.flatnonzero(mask[begin : begin + (task or NEURONS)]) + begin
                    trace.append((epoch, (ids + layer * NEURONS).astype(np.uint32)))
        run_trace(cache, [part for part in trace if len(part[1])])
        assert sum(misses) == cache.counters().misses

    def test_order_matters_to_a_small_cache(self) -> None:
        made = {task: playing(CacheKind.NEURON, 130, task=task) for task in (0, 32)}
        counts = {
            task: [one.step([0], [0]).misses for _ in range(8 * TOKENS)]
            for task, one in made.items()
        }
        assert counts[0] != counts[32]

    def test_engine_fills_its_cache_in_one_epoch(self) -> None:
        made = playing(CacheKind.NEURON, 300)
        made.warm(100)
        cache = made.cache
        assert cache is not None and cache.counters().num_resident == 300
        assert cache.epoch() == 1
