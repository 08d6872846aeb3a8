"""What a memory budget buys a simulated engine: slots for neurons, and how many of them are hot."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from polyneuron.errors import ConfigError
from polyneuron.scenarios.engine_settings import EngineSettings, Policy
from polyneuron.scenarios.model_shape import ModelShape
from polyneuron.scenarios.step_costs import StepCosts
from polyneuron.sizes import show_size

MAX_HOT_SHARE = 0.5
"""Of the slots, those that may be hot: the rest must follow what tokens ask for."""
PAGE_SHARE = 0.76
"""Of the memory a mapped file's pages could have, what they get beside the system's reserve and
pages read in vain. Fitted: with all of it llama.cpp would gain more than the paper's does."""
BUFFER_BYTES = 300 << 20
"""Of an engine that maps its file."""
PLANNED_BATCHES = 4
"""Batches beyond this one have its hot clusters (PAPER 1.5 plans for 1 to 4)."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Regions of one budget."""

    slots: int
    """Neurons in memory, hot ones too."""
    is_resident: bool
    """All of them."""
    used_bytes: int
    """Of the budget."""
    page_bytes: int = 0
    """What a mapped file's pages get."""


def plan_memory(
    settings: EngineSettings, shape: ModelShape, device_bytes: int, where: str
) -> MemoryPlan:
    """The regions; ConfigError when the budget is below what must stay."""
    kv = shape.kv_token * settings.num_ctx * settings.max_sequences
    if settings.policy in (Policy.MMAP, Policy.BASELINE):
        return _plan_mapped(settings, shape, device_bytes, kv)
    fixed = shape.other_bytes + kv + shape.predictors
    budget = settings.memory_bytes or device_bytes
    if settings.ffn_resident is not None:
        slots = int(settings.ffn_resident * shape.total_neurons)
        budget = fixed + slots * shape.slot
    else:
        slots = min(shape.total_neurons, (budget - fixed) // shape.slot)
    if slots < 0:
        raise ConfigError(
            f"{where}: memory is {show_size(budget)}: {shape.name} needs {show_size(fixed)} "
            "before any neuron; give more, a shorter context or fewer max_sequences"
        )
    used = fixed + slots * shape.slot
    return MemoryPlan(slots, slots == shape.total_neurons, used)


def _plan_mapped(
    settings: EngineSettings, shape: ModelShape, device_bytes: int, kv: int
) -> MemoryPlan:
    """Pages come and go as they are touched: any budget will do."""
    file_bytes, ffn = shape.mapped_bytes, shape.total_neurons * shape.neuron_bytes
    if settings.ffn_resident is not None:
        room = file_bytes - round((1.0 - settings.ffn_resident) * ffn)
    else:
        room = max(0, (settings.memory_bytes or device_bytes) - kv - BUFFER_BYTES)
    is_resident = room >= file_bytes
    pages = file_bytes if is_resident else int(room * PAGE_SHARE)
    slots = min(shape.total_neurons, pages // shape.neuron_bytes)
    return MemoryPlan(slots, is_resident, pages + kv + BUFFER_BYTES, pages)


def choose_hot(costs: StepCosts, slots: int, tokens: int, cluster_neurons: int) -> int:
    """Hot neurons of each unit for so many tokens a step: those that make a layer fastest.

    Reads are left out: they run beside the computing (PAPER 1.10).
    """
    shape, num = costs.shape, costs.shape.neurons
    if not costs.uses_npu:
        return 0
    most = min(num, int(MAX_HOT_SHARE * slots / shape.units))
    most = num if costs.is_resident else most
    needed = np.concatenate([[0.0], np.cumsum(shape.activity.needed(num, tokens))])
    single = np.concatenate([[0.0], np.cumsum(shape.activity.needed(num))])
    options = range(0, most + 1, cluster_neurons)
    layer_ns = [
        _layer_ns(costs, hot, num, float(needed[-1] - needed[hot]),
                  float(single[-1] - single[hot]) * tokens, tokens)
        for hot in options
    ]  # fmt: skip
    return options[int(np.argmin(layer_ns))]


def _layer_ns(
    costs: StepCosts, hot: int, num: int, rows: float, pairs: float, tokens: int
) -> float:
    """One expert's share of a layer: CPU and NPU side by side on one memory."""
    each = costs.cluster_costs(hot)
    cpu = float(each["predict"] * (num - hot) * tokens)
    cpu += rows * (each["gate_row"] + each["up_down_row"] + each["neuron"])
    cpu += pairs * (each["gate_token"] + each["up_down_token"])
    cpu_ns, npu_ns = cpu / 1000 / costs.num_cores, float(each["npu_ns"])
    slower = each["joint"] / 65536
    both = min(cpu_ns, npu_ns)
    return max(cpu_ns, npu_ns) + both * (slower - 1.0)
