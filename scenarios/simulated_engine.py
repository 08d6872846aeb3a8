"""The engine that a simulated step runs on: what is in memory, and how long each step takes.

It holds the real neuron cache; the requests and the clock are the run's (`simulation.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from polyneuron.kernels.simulation import CacheKind, LawTables, StepSimulation, StepTotals
from polyneuron.scenarios.device_model import DeviceModel
from polyneuron.scenarios.engine_plan import EnginePlan
from polyneuron.scenarios.engine_settings import EngineSettings
from polyneuron.scenarios.mapped_file import MappedFile
from polyneuron.scenarios.measured_costs import (
    MeasuredCosts,
    engine_traits,
    measured_costs,
    shape_knobs,
)
from polyneuron.scenarios.memory_plan import (
    PLANNED_BATCHES,
    MemoryPlan,
    choose_hot,
    plan_memory,
)
from polyneuron.scenarios.model_shape import ModelShape
from polyneuron.scenarios.recorded_activity import RecordedActivity, RecordedReading
from polyneuron.scenarios.step_costs import TRAITS, Conditions, PolicyTraits, StepCosts

CLUSTER_NEURONS = 512
"""PAPER 1.2: the CPU's share is cut in chunks of 512 rows."""
MIN_CLUSTERS = 8
"""A layer of a small model has at least so many."""
WORD = 64
WINDOW_SHARE = 0.44
"""Of its slots, those a window fills on average: its length is fixed, so that the tokens that need
the most find room. Fitted: the paper's LLMFlash misses twice what the neuron cache does."""
MAX_RECORDS = 1 << 17
NOTHING = StepTotals(*([0] * len(StepTotals.__slots__)))


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """One step of the simulated engine; times in ns."""

    ns: int
    layers_at: int
    """When its layers begin, after the step's begin."""
    totals: StepTotals
    is_detailed: bool = False
    attention_ns: int = 0

    @property
    def used(self) -> int:
        """Neurons that some token needed."""
        return self.totals.needed + self.totals.hot


class SimulatedEngine:
    """One policy on one device with one model."""

    def __init__(
        self, settings: EngineSettings, device: DeviceModel, shape: ModelShape, seed: int,
        where: str, max_memory: int = 0, max_share: float | None = None,
        own: EnginePlan | None = None,
    ) -> None:  # fmt: skip
        self.settings, self.device = settings, device
        self.shape = shape
        self.where = where
        self.own = own
        """The plan of the real engine, where it could run this."""
        self.traits = self._traits()
        self.conditions = Conditions()
        self.plan = self._first_plan()
        self.cluster_neurons = _cluster_neurons(shape.neurons, own)
        self.hot_neurons = 0
        self.batch = 1
        self._costs: StepCosts | None = None
        self._rng = np.random.default_rng([seed, 2])
        self._place = np.arange(_padded(shape.neurons), dtype=np.uint32)
        self._most = self._most_slots(max_memory, max_share)
        self._is_warm = False
        self._reading: RecordedReading | None = None
        self._steps = self._make_steps(seed) if self.traits.is_sparse else None
        is_mapped = not (self.traits.is_sparse or own)
        self._mapped = MappedFile(shape, self.plan.page_bytes, self._rng) if is_mapped else None
        self.reconfigure()

    def _traits(self) -> PolicyTraits:
        policy, own = self.settings.policy, self.own
        if self.device.profile is None:
            return TRAITS[policy]
        knobs = own.knobs(1, 0) if own else shape_knobs(self.settings, self.device.profile)
        return engine_traits(policy, knobs.mode, is_looking_ahead=knobs.is_looking_ahead)

    # ---- what is in memory

    def _first_plan(self) -> MemoryPlan:
        if self.own:
            return self.own.memory_plan()
        return plan_memory(self.settings, self.shape, self.device.memory, self.where)

    def _most_slots(self, max_memory: int, max_share: float | None) -> int:
        """The most slots that any budget of the script gives."""
        plans = [self.plan]
        if self.own:  # which never takes more than it began with
            return self.plan.slots
        if max_memory:
            most = replace(self.settings, memory_bytes=max_memory, ffn_resident=None)
            plans.append(plan_memory(most, self.shape, self.device.memory, self.where))
        if max_share is not None:
            most = replace(self.settings, ffn_resident=max_share)
            plans.append(plan_memory(most, self.shape, self.device.memory, self.where))
        return max(plan.slots for plan in plans)

    def _make_steps(self, seed: int) -> StepSimulation:
        kind = CacheKind.ALL if self.plan.is_resident else self.traits.cache
        steps = StepSimulation(
            self._laws(), num_layers=self._num_layers, cluster_neurons=self.cluster_neurons,
            max_sequences=self.settings.max_sequences, cache_kind=kind, num_slots=self._most,
            seed=seed, max_records=MAX_RECORDS,
        )  # fmt: skip
        activity = self.shape.activity
        if isinstance(activity, RecordedActivity):
            layers = self.own.cached_layers if self.own else None
            self._reading = activity.played_by(steps, self.settings.max_sequences, layers)
        return steps

    def change_memory(self, memory_bytes: int, ffn_resident: float | None) -> MemoryPlan:
        """Another budget from now on; ConfigError when it is too small."""
        if self.own:
            self.plan = self.own.resized(memory_bytes, ffn_resident, self.where)
        else:
            changed = replace(self.settings, memory_bytes=memory_bytes, ffn_resident=ffn_resident)
            self.plan = plan_memory(changed, self.shape, self.device.memory, self.where)
        if self._mapped is not None:
            self._mapped.pages.resize(self.plan.page_bytes)
        self.reconfigure()
        return self.plan

    @property
    def pinned_neurons(self) -> int:
        """Of each unit, those that stay without the neuron cache."""
        return max(self.hot_neurons, self.own.pinned_neurons if self.own else 0)

    @property
    def _num_layers(self) -> int:
        """Layers that are played; others pass through, whole."""
        return len(self.own.cached_layers) if self.own else self.shape.layers

    @property
    def _units(self) -> int:
        """Experts of the layers that are played."""
        return self._num_layers * self.shape.experts

    @property
    def cold_slots(self) -> int:
        """Slots that pinned neurons leave."""
        return self.plan.slots - self.pinned_neurons * self._units

    @property
    def _cached_slots(self) -> int:
        """Slots that what is kept may fill."""
        slots = max(0, self.cold_slots)
        return int(slots * WINDOW_SHARE) if self.traits.cache is CacheKind.WINDOW else slots

    @property
    def clusters(self) -> int:
        """Of a layer."""
        return -(-self.shape.neurons // self.cluster_neurons) * self.shape.experts

    @property
    def is_dense(self) -> bool:
        """Whether every neuron is computed: nothing is predicted, looked up or missed."""
        return self._steps is None

    @property
    def mode(self) -> str:
        """What feed-forward blocks compute."""
        if self.own:
            return str(self.own.mode)
        return "dense" if self.is_dense else "predicted"

    @property
    def steps(self) -> StepSimulation:
        """What simulates steps; not of a dense engine."""
        assert self._steps is not None
        return self._steps

    # ---- what changes between steps

    def costs(self) -> StepCosts:
        """Under the present conditions."""
        if self._costs is None:
            self._costs = self._measured_costs() if self.device.profile else self._stated_costs()
        return self._costs

    def _stated_costs(self) -> StepCosts:
        return StepCosts(
            self.device, self.shape, self.traits, self.conditions, self.plan.is_resident,
            self.shape.layers * self.shape.layer_bundles, self.settings.queue_depth,
            self.settings.num_workers,
        )  # fmt: skip

    def _measured_costs(self) -> MeasuredCosts:
        return measured_costs(
            self._stated_costs(), self.settings, self.batch, self.cold_slots, self.own
        )

    def hot_for(self, batch: int) -> int:
        """Hot neurons of each unit with so many sequences."""
        if self.own:
            return _padded(self.own.hot_neurons(batch))
        shares, size = self.settings.hot_shares, self.cluster_neurons
        costs = self.costs()
        if shares and costs.uses_npu:
            share = shares[min(batch, len(shares)) - 1]
            return round(share * self.shape.neurons / size) * size
        return choose_hot(costs, self.plan.slots, min(batch, PLANNED_BATCHES), size)

    def reconfigure(self) -> int:
        """Take the present batch, budget and conditions: neurons that become hot and were not."""
        before, self.hot_neurons = self.hot_neurons, 0
        self._costs = None
        if self._steps is None:
            return 0
        self.hot_neurons = self.hot_for(self.batch)
        costs = self.costs()
        first, second = costs.reads
        self._steps.configure(
            costs.cluster_costs(self.hot_neurons), num_cores=costs.num_cores,
            flags=costs.flags, hot_neurons=self.hot_neurons, first_bytes=first,
            second_bytes=second, bundle_bytes=self.shape.bundle,
            merge_gap=costs.merge_gap, queue_depth=self.settings.queue_depth,
            pinned_neurons=self.pinned_neurons,
        )  # fmt: skip
        self._steps.resize(self._cached_slots)
        if self.own:  # what becomes hot is pinned already
            return 0
        return max(0, self.hot_neurons - before) * self.shape.units

    def set_conditions(self, conditions: Conditions) -> None:
        """What events have changed."""
        if conditions != self.conditions:
            self.conditions = conditions
            self.reconfigure()

    def set_batch(self, batch: int) -> int:
        """So many sequences decode from now on: ns that another graph and new hot neurons take."""
        self.batch = batch
        before, fresh = self.hot_neurons, self.reconfigure()
        npu, ns = self.device.npu, 0.0
        if npu is not None and self.hot_neurons != before:
            ns += npu.swap_ns
        if not self.plan.is_resident:
            ns += fresh * self.shape.bundle * 1e9 / self.device.storage.stream_rate
        return round(ns)

    def shift_hot_set(self, share: float) -> None:
        """So large a share of each unit's neurons trade places in hotness."""
        num = self.shape.neurons
        chosen = self._rng.choice(num, int(share * num), replace=False)
        self._place[chosen] = self._place[np.roll(chosen, 1)]
        if self._steps is not None:
            self._steps.set_law(self._laws())

    def _laws(self) -> list[LawTables]:
        """How neurons behave: one law, or one for each layer that is played."""
        shape, place = self.shape, self._place
        laws = shape.activity.laws(len(place), shape.experts, shape.experts_used, place)
        if self.own is None or len(laws) == 1:
            return laws
        return [laws[layer] for layer in self.own.cached_layers]

    # ---- steps

    def begin(self, slot: int, prompt_tokens: int) -> None:
        """A sequence begins; its prompt is computed in other steps."""
        if self._steps is not None:
            self._steps.begin(slot)
        if self._reading is not None:
            self._reading.pass_over(slot, prompt_tokens)

    @property
    def recording_rounds(self) -> float | None:
        """Of a recording: how often the slot that has read most of it has been through."""
        return self._reading.rounds if self._reading is not None else None

    def prefill(self, tokens: int) -> StepOutcome:
        """A chunk of a prompt: whole layers, each read while the one before it is computed."""
        costs, shape, storage = self.costs(), self.shape, self.device.storage
        compute = costs.prefill_ns(tokens)
        read = 0 if self.plan.is_resident else shape.layers * shape.layer_bundles
        read = self.own.budget.prompt_bytes if self.own else read
        stream = storage.map_rate if self._mapped is not None else storage.stream_rate
        reading = round(read * 1e9 / stream * self.conditions.flash)
        if self._steps is not None and not self._is_warm:
            self._steps.warm(self._cached_slots // self._units + self.pinned_neurons)
            self._is_warm = True
        if self._mapped is not None:
            self._mapped.touch_all()
        # The first layer's reads and the last one's products have nothing beside them.
        ns = max(compute, reading) + min(compute, reading) // shape.layers
        exposed = max(0, ns - compute)
        totals = replace(
            NOTHING, bytes=read, reads=read >> 20, layers_ns=ns, compute_ns=compute,
            exposed_ns=exposed, stall_ns=exposed,
        )  # fmt: skip
        return StepOutcome(ns, 0, totals)

    def decode(
        self, slots: Sequence[int], kv_tokens: int, is_detailed: bool = False
    ) -> StepOutcome:
        """A token of each sequence, over so many tokens of keys and values together."""
        costs = self.costs()
        if self._mapped is not None:
            return self._decode_mapped(self._mapped, len(slots), kv_tokens)
        if isinstance(costs, MeasuredCosts) and self.is_dense:
            return _dense_step(costs, kv_tokens)
        attention = costs.attention_ns(kv_tokens)
        self.steps.set_attention(attention)
        levels = self.shape.activity.draw_levels(self._rng, self.shape.neurons, len(slots))
        totals = self.steps.step(slots, levels, is_detailed)
        if self._reading is not None:
            self._reading.stepped(slots)
        outside = costs.outside_ns()
        ns = outside + totals.layers_ns
        if isinstance(costs, MeasuredCosts) and self.own:
            ns = costs.with_streamed(ns, kv_tokens)
            streamed = self.own.budget.streamed_bytes
            if streamed:
                totals = replace(
                    totals, bytes=totals.bytes + streamed, reads=totals.reads + (streamed >> 20)
                )
        return StepOutcome(ns, outside, totals, is_detailed, attention)

    def _decode_mapped(self, mapped: MappedFile, tokens: int, kv_tokens: int) -> StepOutcome:
        costs, shape, touched = self.costs(), self.shape, mapped.touch(tokens)
        attention = costs.attention_ns(kv_tokens)
        compute = costs.dense_ns(touched.used) + shape.layers * attention + costs.outside_ns()
        read = touched.ffn_missed + touched.others_missed
        reading = round(read * 1e9 / self.device.storage.map_rate * self.conditions.flash)
        needed = touched.used // shape.neuron_bytes
        misses = touched.ffn_missed // shape.neuron_bytes
        totals = replace(
            NOTHING, needed=needed, hits=needed - misses, misses=misses, active=needed,
            reads=read >> 17, bytes=read, layers_ns=compute + reading, compute_ns=compute,
            exposed_ns=reading, stall_ns=reading,
        )  # fmt: skip
        return StepOutcome(compute + reading, 0, totals)


def _dense_step(costs: MeasuredCosts, kv_tokens: int) -> StepOutcome:
    """A step of the real engine that computes every neuron; layers may pass through."""
    cost = costs.dense_step(kv_tokens)
    ns, compute = round(cost.total_ns), round(cost.compute_ns)
    waited = max(0, ns - compute)
    read = round(cost.bytes_read)
    totals = replace(
        NOTHING, bytes=read, reads=read >> 20, layers_ns=ns, compute_ns=compute,
        exposed_ns=waited, stall_ns=waited,
    )  # fmt: skip
    return StepOutcome(ns, 0, totals)


def _padded(neurons: int) -> int:
    return -(-neurons // WORD) * WORD


def _cluster_neurons(neurons: int, own: EnginePlan | None) -> int:
    """The engine's own, or of the size that the paper names, smaller where that would be too few
    clusters."""
    if own and own.cluster_neurons:
        return _padded(own.cluster_neurons)
    size = min(CLUSTER_NEURONS, neurons // MIN_CLUSTERS // WORD * WORD)
    return max(WORD, size)
