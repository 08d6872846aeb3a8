"""Chooses how a model is run: a plain search over the cost model (DESIGN §10, PAPER §1.10).

The memory limit fixes what stays; the search tries every mode, number of workers, queue depth, size
of the hot part and look-ahead. Of ways that are alike within a hundredth the plainest is taken.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from polyneuron.config import EngineConfig, FeedForwardMode
from polyneuron.errors import ConfigError
from polyneuron.io.ncf_format import Layout
from polyneuron.kernels.arena import MAX_EXECUTORS
from polyneuron.planning.budget import HEADROOM_SHARE, Budget, fit, private_estimate
from polyneuron.planning.cost_model import DENSE, EXACT, PREDICTED, CostModel, Knobs, StepCost
from polyneuron.planning.source import ModelSource

BATCHES = (1, 2, 4, 8)
QUEUE_DEPTHS = (32, 16, 64, 8)
"""The usual one first."""
CLEARLY = 1.01
SLOT_LIST_BYTES = 40
"""Of the neuron cache and the ring of reads, for each slot: lists and an order."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One way to run, and what it is expected to give for one sequence."""

    knobs: Knobs
    budget: Budget
    cost: StepCost


@dataclass(frozen=True, slots=True)
class Plan:
    """The way chosen, and what was left aside."""

    chosen: Choice
    by_batch: Mapping[int, Choice]
    """The same for more sequences at once: only the hot part may differ."""
    best_of_mode: Mapping[str, Choice]
    is_measured: bool
    """Whether the model's neurons were counted in a text; else a supposed law stands in."""

    def reason(self) -> str:
        """Why this mode, in a line."""
        mode, rate = self.chosen.knobs.mode, self.chosen.cost.tokens_per_s
        others = [
            f"{name} {choice.cost.tokens_per_s:.1f}"
            for name, choice in sorted(self.best_of_mode.items())
            if name != mode
        ]
        against = f" against {', '.join(others)}" if others else ""
        return f"{mode}: {rate:.1f} tok/s{against}"


@dataclass(frozen=True, slots=True)
class Planner:
    """What is to be planned: a model in a limit on a device; `config` is resolved."""

    source: ModelSource
    config: EngineConfig
    limit_bytes: int
    model: CostModel
    private: Callable[[EngineConfig], int] = private_estimate

    def plan(self) -> Plan:
        """The fastest way for one sequence, and the hot part for more of them.

        Raises ConfigError that names the least memory when nothing fits.
        """
        best: dict[str, Choice] = {}
        for mode, workers in itertools.product(self.modes(), self.worker_counts()):
            for choice in self._ways(mode, workers):
                if mode not in best or _is_better(choice, best[mode]):
                    best[mode] = choice
        if not best:
            fit(self.source, self.config, self.limit_bytes, self.private(self.config))
            raise ConfigError(f"--mode {self.config.mode}: no way to run it was found")
        chosen = next(iter(best.values()))
        for choice in best.values():
            chosen = choice if _is_better(choice, chosen) else chosen
        by_batch = {batch: self._for_batch(chosen, batch) for batch in BATCHES}
        hotness = self.model.hotness
        return Plan(chosen, by_batch, best, hotness is not None and hotness.is_measured)

    def modes(self) -> list[str]:
        """Those that this file allows and the user has not ruled out; the exact ones first."""
        is_sparse = self.source.manifest.layout is Layout.BUNDLES
        possible = [EXACT, DENSE] if is_sparse else [DENSE]
        can_predict = PREDICTED in set(FeedForwardMode) and self.model.predictor is not None
        if is_sparse and can_predict:
            possible.append(PREDICTED)
        wanted = str(self.config.mode)
        if wanted == FeedForwardMode.AUTO:
            return possible
        if wanted == PREDICTED and PREDICTED not in possible:
            raise ConfigError(
                f"--mode predicted: {self.source.path} has no predictors beside it; run "
                f"polyneuron profile -m {self.source.path} --text TEXT first"
            )
        return [wanted] if wanted in possible else [str(self.source.resolve_mode(self.config.mode))]

    def worker_counts(self) -> list[int]:
        """All cores first, then fewer, which leaves some to the reader and memory to weights."""
        most = self.config.num_workers
        return list(range(most, 0, -1)) if most <= 8 else sorted({most, most - 1, most // 2})[::-1]

    def _ways(self, mode: str, workers: int) -> Iterator[Choice]:
        budget = self.budget(mode, workers)
        if budget is None:
            return
        hots = self.hot_sizes() if mode == PREDICTED else [0]
        is_early = self.model.predictor is not None and self.model.predictor.is_early
        aheads = (False, True) if mode == PREDICTED and is_early else (False,)
        reads = mode == PREDICTED or budget.layout.has_neuron_cache
        depths = QUEUE_DEPTHS if reads else QUEUE_DEPTHS[:1]
        for hot, depth, ahead in itertools.product(hots, depths, aheads):
            choice = self.choice(budget, Knobs(mode, workers, depth, 0, 0, hot, ahead))
            if choice is not None:
                yield choice

    def budget(self, mode: str, workers: int) -> Budget | None:
        """What fits; None when nothing does. Predicted mode is given exact mode's room."""
        lossless = FeedForwardMode(EXACT if mode == PREDICTED else mode)
        config = replace(
            self.config, mode=lossless, num_workers=workers,
            num_npu_threads=min(self.config.num_workers, MAX_EXECUTORS - workers),
        )  # fmt: skip
        try:
            return fit(self.source, config, self.limit_bytes, self.private(config))
        except ConfigError:
            return None

    def hot_sizes(self) -> list[int]:
        """Neurons of a layer that may be its hot part: whole clusters."""
        rows = self.model.work.rows
        if rows is None:
            return [0]
        steps = range(0, rows.num_neurons, rows.cluster_neurons)
        return [*steps, rows.num_neurons]

    def choice(self, budget: Budget, knobs: Knobs, batch: int = 1) -> Choice | None:
        """The knobs with the memory they leave; None when that is not enough."""
        if knobs.mode == PREDICTED:
            slots = self.predicted_slots(budget, knobs.hot_neurons)
            if slots is None:
                return None
            knobs = replace(knobs, num_resident=self.model.work.num_layers, cold_slots=slots)
        else:
            knobs = replace(knobs, num_resident=budget.num_resident, cold_slots=budget.cold_slots)
        return Choice(knobs, budget, self.model.step(knobs, batch))

    def predicted_slots(self, budget: Budget, hot_neurons: int) -> int | None:
        """Slots of whole bundles beside predictors and a hot part; None when too few.

        The cache holds at least the cold neurons of one layer, so a step always finds slots.
        """
        work, predictor, spans = self.model.work, self.model.predictor, budget.layout.spans
        rows = work.rows
        assert rows is not None and predictor is not None
        others = budget.layout.num_bytes - spans["hot"].num_bytes - spans["cold"].num_bytes
        others -= budget.cold_slots * SLOT_LIST_BYTES
        room = int(self.limit_bytes * (1 - HEADROOM_SHARE)) - budget.private_bytes - others
        hot_row = rows.decide_row + rows.slot_bytes
        room -= work.num_layers * (predictor.num_bytes + hot_neurons * hot_row)
        cold = rows.num_neurons - hot_neurons
        slots = min(room // (rows.whole_bytes + SLOT_LIST_BYTES), work.num_layers * cold)
        return slots if slots >= cold and room >= 0 else None

    def _for_batch(self, chosen: Choice, batch: int) -> Choice:
        """The best hot part when so many sequences run at once."""
        hots = self.hot_sizes() if chosen.knobs.mode == PREDICTED else [0]
        best: Choice | None = None
        for hot in hots:
            choice = self.choice(chosen.budget, replace(chosen.knobs, hot_neurons=hot), batch)
            if choice is not None and (best is None or _is_better(choice, best)):
                best = choice
        assert best is not None
        return best


def _is_better(one: Choice, other: Choice) -> bool:
    return one.cost.tokens_per_s > other.cost.tokens_per_s * CLEARLY
