"""What the engine would do with a model file on this machine: the very plan that a replay runs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from polyneuron.config import EngineConfig, FeedForwardMode
from polyneuron.errors import ConfigError
from polyneuron.host_memory import HostMemory
from polyneuron.io.ncf_format import Layout
from polyneuron.model.model_cache import converted
from polyneuron.planning.budget import Budget, fit_runnable, private_estimate, resolve_config
from polyneuron.planning.cost_model import DENSE, PREDICTED, CostModel, Knobs
from polyneuron.planning.device import DeviceProfile
from polyneuron.planning.known_model import known_model
from polyneuron.planning.source import ModelSource, open_source
from polyneuron.scenarios.memory_plan import MemoryPlan
from polyneuron.scenarios.replay_model import check_replayable, engine_config
from polyneuron.scenarios.script import Script


@dataclass(frozen=True, slots=True, eq=False)
class EnginePlan:
    """An engine that has not been opened."""

    source: ModelSource
    config: EngineConfig
    """Resolved."""
    budget: Budget
    cost_model: CostModel

    @classmethod
    def of_script(cls, script: Script, path: Path, device: DeviceProfile) -> EnginePlan:
        """As `replay` would open a file; ConfigError when it does not fit or cannot be run."""
        check_replayable(script)
        source = open_source(path)
        config = resolve_config(engine_config(script, path), source.spec)
        source, budget = fit_runnable(
            source, config, config.memory_bytes or HostMemory().default_budget(),
            private_estimate(config), lambda layout: _as_run(path, layout),
        )  # fmt: skip
        return cls(source, config, budget, known_model(source, device, config.num_ctx))

    @property
    def mode(self) -> FeedForwardMode:
        """What feed-forward blocks compute."""
        return self.budget.mode

    @property
    def is_sparse(self) -> bool:
        """Whether neurons are left out; else every one is computed."""
        return self.mode is not FeedForwardMode.DENSE and self.budget.num_resident > 0

    @property
    def pinned_neurons(self) -> int:
        """Of each layer, from the first on, those that stay without the neuron cache."""
        bundles = self.budget.layout.bundles
        return bundles.pinned_neurons if bundles else 0

    @property
    def cluster_neurons(self) -> int:
        """Of a task; 0 in tiles."""
        bundles = self.budget.layout.bundles
        return bundles.rows.cluster_neurons if bundles else 0

    @property
    def read_bytes(self) -> int:
        """Of a missed neuron's read."""
        bundles = self.budget.layout.bundles
        return bundles.slot_rows.slot_bytes if bundles else 0

    @property
    def cached_layers(self) -> list[int]:
        """Layers that do not pass through the stage for every token."""
        bundles, num = self.budget.layout.bundles, self.source.spec.num_layers
        if bundles is None:
            return list(range(num))
        return [i for i, layer in enumerate(bundles.layers) if not layer.rows_are.passes_through]

    def hot_neurons(self, batch: int) -> int:
        """Of each layer, those that are not predicted in a step of so many tokens."""
        bundles = self.budget.layout.bundles
        if bundles is None or self.mode is not FeedForwardMode.PREDICTED:
            return 0
        hot = bundles.rows.neurons_in(self.config.hot_for(batch))
        return min(hot, self.pinned_neurons)

    def knobs(self, batch: int, cold_slots: int) -> Knobs:
        """The cost model's view of it."""
        predictor, config = self.cost_model.predictor, self.config
        is_early = predictor is not None and predictor.is_early
        mode = str(self.mode) if self.is_sparse else DENSE
        return Knobs(
            mode, config.num_workers, config.queue_depth, self.budget.num_resident, cold_slots,
            self.hot_neurons(batch), self.pinned_neurons,
            config.lookahead and is_early and mode == PREDICTED,
        )  # fmt: skip

    def memory_plan(self) -> MemoryPlan:
        """Its regions."""
        layers, budget = len(self.cached_layers), self.budget
        slots = budget.cold_slots + self.pinned_neurons * layers
        is_resident = not budget.layout.has_neuron_cache
        if is_resident:
            slots = self.source.spec.d_ff * layers
        return MemoryPlan(slots, is_resident, budget.total_bytes)

    def resized(self, limit: int, ffn_resident: float | None, where: str) -> MemoryPlan:
        """Its regions in another budget, or with another share, as `Injector` has the engine do it.

        ConfigError when that is too small.
        """
        budget, plan = self.budget, self.memory_plan()
        if ffn_resident is not None:
            less = (budget.resident_ffn_fraction - ffn_resident) * budget.ffn_bytes
            limit = budget.limit_bytes - max(0, round(less))
        try:
            slots = min(budget.cold_slots, budget.slots_within(limit))
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
        fewer = budget.cold_slots - slots
        return replace(
            plan, slots=plan.slots - fewer, used_bytes=plan.used_bytes - fewer * self.read_bytes
        )


def _as_run(path: Path, layout: Layout) -> ModelSource:
    """A GGUF as what it becomes: the file in the cache, if it is there, with all beside it."""
    entry = converted(path, layout)
    return open_source(path, layout) if entry is None else open_source(entry)
