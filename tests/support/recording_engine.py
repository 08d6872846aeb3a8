"""An engine in one process that gives the logits of a text, teacher-forced."""

import numpy as np
from numpy.typing import NDArray

from polyneuron.actors.coordinator import StepPlan
from tests.support.local_engine import LocalEngine

F32 = NDArray[np.float32]


class RecordingEngine(LocalEngine):
    """Keeps the logits of every position that is scored."""

    def _perform(self, plan: StepPlan) -> F32:
        logits = super()._perform(plan)
        self.recorded.extend(logits.copy())
        return logits

    def logits_from(self, tokens: list[int], first: int) -> F32:
        """Logits (len(tokens) - first, vocabulary) after tokens 0..first, 0..first+1, …"""
        self.recorded: list[F32] = []
        self.score(tokens, first)
        return np.stack(self.recorded)
