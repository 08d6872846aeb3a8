"""Chooses how a model is run: a plain search over the cost model (DESIGN §10, PAPER §1.10).

The memory limit fixes what stays; the search tries every mode, number of workers, queue depth, size
of the hot part and look-ahead. Of ways that are alike within a hundredth the plainest is taken.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from polyneuron.config import EngineConfig, FeedForwardMode
from polyneuron.errors import ConfigError
from polyneuron.io.ncf_format import Layout
from polyneuron.kernels.arena import MAX_EXECUTORS
from polyneuron.planning.budget import Budget, fit, private_estimate
from polyneuron.planning.cost_model import (
    DENSE,
    EXACT,
    PREDICTED,
    THRESHOLD,
    CostModel,
    Knobs,
    StepCost,
)
from polyneuron.planning.prompt_cost import PromptCost
from polyneuron.planning.source import ModelSource

BATCHES = (1, 2, 4, 8)
QUEUE_DEPTHS = (32, 16, 64, 8)
"""The usual one first."""
CLEARLY = 1.01


@dataclass(frozen=True, slots=True)
class Choice:
    """One way to run, and what it is expected to give for one sequence."""

    knobs: Knobs
    hot_clusters: int
    """Of each layer, not predicted."""
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
        lossy = " (lossy)" if mode in (PREDICTED, THRESHOLD) else ""
        return f"{mode}{lossy}: {rate:.1f} tok/s{against}"


@dataclass(frozen=True, slots=True)
class Planner:
    """What is to be planned: a model in a limit on a device; `config` is resolved."""

    source: ModelSource
    config: EngineConfig
    limit_bytes: int
    model: CostModel
    private: Callable[[EngineConfig], int] = private_estimate
    core_counts: tuple[int, ...] = ()
    """Workers at which other kinds of cores join in; the most of them is the most to try."""
    _budgets: dict[tuple[str, int, int], Budget | None] = field(default_factory=dict, repr=False)
    """Laid out so far, by mode, workers and hot clusters."""

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
        chosen, by_batch = self._with_short_prompts(chosen)
        hotness = self.model.hotness
        return Plan(by_batch[1], by_batch, best, hotness is not None and hotness.is_measured)

    def _with_short_prompts(self, chosen: Choice) -> tuple[Choice, Mapping[int, Choice]]:
        """The same with the longest prompt that is worth reading neuron by neuron, and room for
        its sums; then for more sequences."""
        tokens = self.sparse_prompt_tokens(chosen)
        if tokens is None:
            return chosen, self._by_batch(chosen)
        config = replace(self.config, sparse_prompt_tokens=tokens)
        planner = replace(self, config=config, _budgets={})
        knobs, hot = chosen.knobs, chosen.hot_clusters
        budget = planner.budget(knobs.mode, knobs.workers, hot)
        if budget is None:
            return chosen, self._by_batch(chosen)
        again = planner.choice(budget, hot, knobs.queue_depth, knobs.is_looking_ahead)
        return again, planner._by_batch(again)

    def sparse_prompt_tokens(self, choice: Choice) -> int | None:
        """Tokens up to which a prompt is cheaper neuron by neuron; None where there is no choice:
        in tiles, with experts, whose slots are counted by sequences, and in predicted mode."""
        rows, wanted = self.model.work.rows, self.config.sparse_prompt_tokens
        if rows is None or rows.num_experts > 1 or choice.knobs.mode == PREDICTED:
            return None
        if wanted is not None:
            return wanted
        return PromptCost(self.model, choice.knobs, choice.budget.prompt_bytes).sparse_tokens()

    def modes(self) -> list[str]:
        """Those that this file allows and the user has not ruled out; the exact ones first."""
        is_sparse = self.source.is_sparse and self.source.manifest.layout is Layout.BUNDLES
        possible = [EXACT, DENSE] if is_sparse else [DENSE]
        if is_sparse and self.model.predictor is not None:
            possible.append(PREDICTED)
        wanted = str(self.config.mode)
        if wanted == FeedForwardMode.AUTO:
            return possible
        if wanted in possible:
            return [wanted]
        return [str(self.source.resolve_mode(self.config.mode))]

    def worker_counts(self) -> list[int]:
        """The usual number first: others have to be clearly better.

        Fewer leave cores to the reader and memory to weights, more bring in slower cores.
        """
        usual = self.config.num_workers
        most = min(max(usual, *self.core_counts, 0), MAX_EXECUTORS)
        few = {most, most - 1, most // 2, usual - 1, *self.core_counts}
        counts = range(1, most + 1) if most <= 8 else {n for n in few if 1 <= n <= most}
        return [usual, *sorted(set(counts) - {usual}, reverse=True)]

    def _ways(self, mode: str, workers: int) -> Iterator[Choice]:
        """All that stays is hot; `_for_batch` may still predict some of it."""
        can_look_ahead = self._can_look_ahead(mode)
        for hot in self.hot_sizes() if mode == PREDICTED else [0]:
            budget = self.budget(mode, workers, hot)
            if budget is None or budget.residency.pinned_clusters < hot:  # no room for so many
                return
            depths = QUEUE_DEPTHS if budget.layout.has_neuron_cache else QUEUE_DEPTHS[:1]
            aheads = (True, False) if can_look_ahead else (False,)
            for depth, ahead in itertools.product(depths, aheads):
                yield self.choice(budget, hot, depth, ahead)

    def _can_look_ahead(self, mode: str) -> bool:
        predictor = self.model.predictor
        return mode == PREDICTED and predictor is not None and predictor.is_early

    def budget(self, mode: str, workers: int, hot_clusters: int = 0) -> Budget | None:
        """What fits; None when nothing does."""
        key = (mode, workers, hot_clusters)
        if key not in self._budgets:
            self._budgets[key] = self._fit(*key)
        return self._budgets[key]

    def _fit(self, mode: str, workers: int, hot_clusters: int) -> Budget | None:
        config = replace(
            self.config, mode=FeedForwardMode(mode), num_workers=workers,
            hot_clusters=(hot_clusters,),
            num_npu_threads=min(self.config.num_npu_threads, MAX_EXECUTORS - workers),
        )  # fmt: skip
        try:
            return fit(self.source, config, self.limit_bytes, self.private(config))
        except ConfigError:
            return None

    def hot_sizes(self) -> list[int]:
        """Clusters of a layer that may be its hot part: every number, later every second.

        None in a file whose bundles are not in the order of hotness, and none of experts.
        """
        rows, sections = self.model.work.rows, self.source.manifest.sections[1:]
        if self.source.spec.experts:
            return [0]
        if rows is None or any(section.neuron_ids is None for section in sections):
            return [0]
        return [*range(9), *range(10, rows.num_clusters + 1, 2)]

    def choice(
        self,
        budget: Budget,
        hot_clusters: int,
        queue_depth: int,
        is_looking_ahead: bool,
        batch: int = 1,
    ) -> Choice:
        """A way to run in that memory, and its cost."""
        bundles = budget.layout.bundles
        hot = bundles.rows.neurons_in(hot_clusters) if bundles else 0
        is_looking_ahead = is_looking_ahead and self._can_look_ahead(str(budget.mode))
        knobs = Knobs(
            str(budget.mode), budget.layout.config.num_workers, queue_depth, budget.num_resident,
            budget.cold_slots, hot, bundles.pinned_neurons if bundles else 0, is_looking_ahead,
        )  # fmt: skip
        return Choice(knobs, hot_clusters, budget, self.model.step(knobs, batch))

    def _by_batch(self, chosen: Choice) -> dict[int, Choice]:
        """The hot part for each number of sequences; what none of them wants is not kept."""
        by_batch = {batch: self._for_batch(chosen, batch) for batch in BATCHES}
        knobs, most = chosen.knobs, max(choice.hot_clusters for choice in by_batch.values())
        budget = self.budget(knobs.mode, knobs.workers, most)
        if budget is None or not budget.cold_slots:
            return by_batch
        depth, ahead = knobs.queue_depth, knobs.is_looking_ahead
        return {
            batch: self.choice(budget, choice.hot_clusters, depth, ahead, batch)
            for batch, choice in by_batch.items()
        }

    def _for_batch(self, chosen: Choice, batch: int) -> Choice:
        """The best hot part of what stays when so many sequences run at once."""
        knobs, most = chosen.knobs, chosen.budget.residency.pinned_clusters
        choices = [
            self.choice(chosen.budget, hot, knobs.queue_depth, knobs.is_looking_ahead, batch)
            for hot in [chosen.hot_clusters, *(h for h in self.hot_sizes() if h <= most)]
        ]
        best = choices[0]
        for choice in choices if knobs.mode == PREDICTED else []:
            best = choice if _is_better(choice, best) else best
        return best


def _is_better(one: Choice, other: Choice) -> bool:
    return one.cost.tokens_per_s > other.cost.tokens_per_s * CLEARLY
