"""Which neurons tokens need, as `polyneuron profile --record` wrote it down (docs/SIMULATOR.md).

It stands in the place of `Activity`: the same questions, answered from a text that was run.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from polyneuron.io.activation_trace import ActivationTrace
from polyneuron.kernels.simulation import LawTables, StepSimulation

F64 = NDArray[np.float64]
U32 = NDArray[np.uint32]
WHOLE = 65536
KEY = "trace"
"""Of `[activity]`: the file of a recording, from the scenario's folder."""


class RecordedActivity:
    """One recording; every neuron in it has an open gate, so `gate` is 1."""

    gate = 1.0
    expert_overlap = 0.0
    expert_skew = 0.0

    def __init__(self, trace: ActivationTrace) -> None:
        self.trace = trace
        self._rates: F64 | None = None

    def played_by(
        self, steps: StepSimulation, num_slots: int, layers: list[int] | None
    ) -> RecordedReading:
        """The recording in the place of laws; of sequences in so many slots, and of these layers
        only, None: all."""
        head, bits = self.trace.head, self.trace.bits
        steps.play_recorded(bits if layers is None else bits[layers], head.task_neurons)
        return RecordedReading(steps, head.num_tokens, num_slots)

    def needed(self, num_neurons: int, tokens: int = 1) -> F64:
        """(num_neurons) in the file's order: chances that some of so many tokens needs it.

        Mean over layers; tokens are taken for independent, as those of several clients nearly are.
        """
        chances: F64 = (1.0 - (1.0 - self._layer_rates()) ** tokens).mean(axis=0)
        return chances[:num_neurons]

    def _layer_rates(self) -> F64:
        """(layers, neurons) shares of tokens."""
        if self._rates is None:
            head = self.trace.head
            counts = [
                np.unpackbits(block.view(np.uint8), axis=1, bitorder="little").sum(axis=0)
                for block in self.trace.bits
            ]
            self._rates = np.stack(counts)[:, : head.num_neurons] / head.num_tokens
        return self._rates

    def draw_levels(self, rng: np.random.Generator, num_neurons: int, n: int) -> list[int]:
        """Nothing is drawn: how much is new stands in the recording."""
        return [0] * n

    def laws(
        self, num_neurons: int, num_experts: int, num_used: int, place: U32
    ) -> list[LawTables]:
        """A law of which no token is drawn; `place` (num_neurons) is the order of a warm cache."""
        nothing = np.zeros(num_neurons, np.uint32)
        law = LawTables(
            num_neurons, place, nothing, nothing, np.zeros((1, num_neurons), np.uint32),
            np.zeros(1, np.uint32), WHOLE, num_experts, num_used,
        )  # fmt: skip
        return [law]


class RecordedReading:
    """How far each slot of the engine has read in the recorded text.

    Slots begin evenly spread over it; a sequence goes on where the one before it in its slot ended,
    prompts are read too, and behind the end is the beginning.
    """

    def __init__(self, steps: StepSimulation, num_tokens: int, num_slots: int) -> None:
        self._steps = steps
        self._num_tokens = num_tokens
        self._num_read = [0] * num_slots
        for slot in range(num_slots):
            steps.go_to_recorded(slot, slot * num_tokens // num_slots)

    def pass_over(self, slot: int, tokens: int) -> None:
        """Tokens that other steps than decode steps compute."""
        self._steps.go_to_recorded(slot, self._steps.next_recorded(slot) + tokens)
        self._num_read[slot] += tokens

    def stepped(self, slots: Sequence[int]) -> None:
        """A decode step has read a token in each of these slots."""
        for slot in slots:
            self._num_read[slot] += 1

    @property
    def rounds(self) -> float:
        """Of the slot that has read most; over 1 some tokens have come again."""
        return max(self._num_read) / self._num_tokens
