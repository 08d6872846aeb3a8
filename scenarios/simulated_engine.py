"""The engine that a simulated step runs on: what is in memory, and how long each step takes.

It holds the real neuron cache; the requests and the clock are the run's (`simulation.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from polyneuron.kernels.simulation import CacheKind, StepSimulation, StepTotals
from polyneuron.scenarios.device_model import DeviceModel
from polyneuron.scenarios.engine_settings import EngineSettings
from polyneuron.scenarios.memory_plan import (
    PLANNED_BATCHES,
    MemoryPlan,
    choose_hot,
    plan_memory,
)
from polyneuron.scenarios.model_shape import ModelShape
from polyneuron.scenarios.page_cache import PageCache
from polyneuron.scenarios.step_costs import TRAITS, Conditions, StepCosts

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
    ) -> None:  # fmt: skip
        self.settings, self.device = settings, device
        self.shape = shape
        self.where = where
        self.traits = TRAITS[settings.policy]
        self.conditions = Conditions()
        self.plan = plan_memory(settings, shape, device.memory, where)
        self.cluster_neurons = _cluster_neurons(shape.neurons)
        self.hot_neurons = 0
        self.batch = 1
        self._costs: StepCosts | None = None
        self._rng = np.random.default_rng([seed, 2])
        self._place = np.arange(_padded(shape.neurons), dtype=np.uint32)
        self._most = self._most_slots(max_memory, max_share)
        self._is_warm = False
        self._steps = self._make_steps(seed) if self.traits.is_sparse else None
        self._pages = None if self.traits.is_sparse else PageCache(self.plan.page_bytes)
        self._experts = np.zeros((shape.layers, shape.experts_used), np.int64)
        self.reconfigure()

    # ---- what is in memory

    def _most_slots(self, max_memory: int, max_share: float | None) -> int:
        """The most slots that any budget of the script gives."""
        plans = [self.plan]
        if max_memory:
            most = replace(self.settings, memory_bytes=max_memory, ffn_resident=None)
            plans.append(plan_memory(most, self.shape, self.device.memory, self.where))
        if max_share is not None:
            most = replace(self.settings, ffn_resident=max_share)
            plans.append(plan_memory(most, self.shape, self.device.memory, self.where))
        return max(plan.slots for plan in plans)

    def _make_steps(self, seed: int) -> StepSimulation:
        shape = self.shape
        kind = CacheKind.ALL if self.plan.is_resident else self.traits.cache
        tables = shape.activity.tables(
            len(self._place), shape.experts, shape.experts_used, self._place
        )
        return StepSimulation(
            tables, num_layers=shape.layers, cluster_neurons=self.cluster_neurons,
            max_sequences=self.settings.max_sequences, cache_kind=kind, num_slots=self._most,
            seed=seed, max_records=MAX_RECORDS,
        )  # fmt: skip

    def change_memory(self, memory_bytes: int, ffn_resident: float | None) -> MemoryPlan:
        """Another budget from now on; ConfigError when it is too small."""
        changed = replace(self.settings, memory_bytes=memory_bytes, ffn_resident=ffn_resident)
        self.plan = plan_memory(changed, self.shape, self.device.memory, self.where)
        if self._pages is not None:
            self._pages.resize(self.plan.page_bytes)
        self.reconfigure()
        return self.plan

    @property
    def cold_slots(self) -> int:
        """Slots that hot neurons leave."""
        return self.plan.slots - self.hot_neurons * self.shape.units

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
    def is_mapped(self) -> bool:
        """Whether the file is mapped and every neuron computed."""
        return self._pages is not None

    @property
    def steps(self) -> StepSimulation:
        """What simulates steps; not of a mapped file."""
        assert self._steps is not None
        return self._steps

    # ---- what changes between steps

    def costs(self) -> StepCosts:
        """Under the present conditions."""
        if self._costs is None:
            self._costs = StepCosts(
                self.device, self.shape, self.traits, self.conditions, self.plan.is_resident,
                self.shape.layers * self.shape.layer_bundles, self.settings.queue_depth,
                self.settings.num_workers,
            )  # fmt: skip
        return self._costs

    def hot_for(self, batch: int) -> int:
        """Hot neurons of each unit with so many sequences."""
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
        )  # fmt: skip
        self._steps.resize(self._cached_slots)
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
            shape = self.shape
            self._steps.set_law(
                shape.activity.tables(
                    len(self._place), shape.experts, shape.experts_used, self._place
                )
            )

    # ---- steps

    def begin(self, slot: int) -> None:
        """A sequence begins."""
        if self._steps is not None:
            self._steps.begin(slot)

    def prefill(self, tokens: int) -> StepOutcome:
        """A chunk of a prompt: whole layers, each read while the one before it is computed."""
        costs, shape, device = self.costs(), self.shape, self.device
        weights = sum(shape.layer_weights) * shape.layers
        is_by_npu = costs.uses_npu and device.npu is not None
        rate = device.npu.prefill_macs if is_by_npu and device.npu else device.cpu.prefill_macs
        rate *= 1.0 if is_by_npu else self.conditions.cpu
        compute = round(tokens * weights * 1e9 / rate) + costs.outside_ns()
        read = 0 if self.plan.is_resident else shape.layers * shape.layer_bundles
        stream = device.storage.map_rate if self.is_mapped else device.storage.stream_rate
        reading = round(read * 1e9 / stream * self.conditions.flash)
        if self._steps is not None and not self._is_warm:
            self._steps.warm(self._cached_slots // shape.units + self.hot_neurons)
            self._is_warm = True
        if self._pages is not None:
            self._touch_file(range(shape.experts))
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
        if self._pages is not None:
            return self._decode_mapped(len(slots), kv_tokens, costs)
        attention = costs.attention_ns(kv_tokens)
        self.steps.set_attention(attention)
        levels = self.shape.activity.draw_levels(self._rng, self.shape.neurons, len(slots))
        totals = self.steps.step(slots, levels, is_detailed)
        outside = costs.outside_ns()
        return StepOutcome(outside + totals.layers_ns, outside, totals, is_detailed, attention)

    def _decode_mapped(self, tokens: int, kv_tokens: int, costs: StepCosts) -> StepOutcome:
        shape, ffn_missed, others, used = self.shape, 0, 0, 0
        for layer in range(shape.layers):
            experts = self._next_experts(layer, tokens)
            missed = self._touch_layer(layer, experts)
            ffn_missed, others = ffn_missed + missed[0], others + missed[1]
            used += len(experts) * shape.neurons * shape.neuron_bytes
        others += self._touch_head()
        attention = costs.attention_ns(kv_tokens)
        compute = costs.dense_ns(used) + shape.layers * attention + costs.outside_ns()
        read = ffn_missed + others
        reading = round(read * 1e9 / self.device.storage.map_rate * self.conditions.flash)
        needed, misses = used // shape.neuron_bytes, ffn_missed // shape.neuron_bytes
        totals = replace(
            NOTHING, needed=needed, hits=needed - misses, misses=misses, active=needed,
            reads=read >> 17, bytes=read, layers_ns=compute + reading, compute_ns=compute,
            exposed_ns=reading, stall_ns=reading,
        )  # fmt: skip
        return StepOutcome(compute + reading, 0, totals)

    def _touch_file(self, experts: Sequence[int]) -> None:
        """A prompt touches every page, layer by layer."""
        for layer in range(self.shape.layers):
            self._touch_layer(layer, experts)
        self._touch_head()

    def _touch_layer(self, layer: int, experts: Sequence[int]) -> tuple[int, int]:
        """Bytes of feed forward and of attention that were not in memory."""
        assert self._pages is not None
        shape, missed = self.shape, 0
        matrix_bytes = shape.neurons * (shape.row + shape.scales)
        others = self._pages.touch(self._head_number + 1 + layer, shape.attention)
        for expert in experts:
            first = (layer * shape.experts + expert) * shape.matrices
            for matrix in range(first, first + shape.matrices):
                missed += self._pages.touch(matrix, matrix_bytes)
        return missed, others

    def _touch_head(self) -> int:
        assert self._pages is not None
        return self._pages.touch(self._head_number, self.shape.head)

    @property
    def _head_number(self) -> int:
        """Behind the matrices of all experts; attention's follow it."""
        return self.shape.units * self.shape.matrices

    def _next_experts(self, layer: int, tokens: int) -> list[int]:
        """The experts that a step uses in a layer."""
        shape, law = self.shape, self.shape.activity
        if shape.experts == 1:
            return [0]
        weights = np.exp(-law.expert_skew * np.arange(shape.experts))
        union: set[int] = set()
        for _ in range(tokens):
            kept = [int(e) for e in self._experts[layer] if self._rng.random() < law.expert_overlap]
            kept = list(dict.fromkeys(kept))
            while len(kept) < shape.experts_used:
                drawn = int(self._rng.choice(shape.experts, p=weights / weights.sum()))
                if (expert := (drawn + layer) % shape.experts) not in kept:
                    kept.append(expert)
            self._experts[layer] = kept
            union.update(kept)
        return sorted(union)


def _padded(neurons: int) -> int:
    return -(-neurons // WORD) * WORD


def _cluster_neurons(neurons: int) -> int:
    """Of the size that the paper names, smaller where that would be too few clusters."""
    size = min(CLUSTER_NEURONS, neurons // MIN_CLUSTERS // WORD * WORD)
    return max(WORD, size)
