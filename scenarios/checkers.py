"""What must hold after every step of a simulation, whatever the scenario.

Tests hand a `Checker` to each run; it looks at the step's records and at the neuron cache itself.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from polyneuron.errors import ProtocolError
from polyneuron.kernels.neuron_cache import NO_SLOT, NeuronState
from polyneuron.kernels.simulation import Stage
from polyneuron.scenarios.simulated_engine import SimulatedEngine, StepOutcome

Records = NDArray[np.void]

STAGES = (Stage.PRED, Stage.GC, Stage.UDC)
"""Each is done exactly once by every cluster."""
ROUNDING_NS = 1
"""Times are kept in ps and told in ns."""
HELD = (NeuronState.LOADING, NeuronState.RESIDENT, NeuronState.PINNED, NeuronState.EVICTING)


class Checker:
    """Raises ProtocolError, naming the rule, as soon as one is broken."""

    def __init__(self, is_thorough: bool = False) -> None:
        self.is_thorough = is_thorough
        """Look at every neuron of the cache after each step, too: for small models."""
        self.num_steps = 0
        """How many steps were looked at."""

    def step_done(self, engine: SimulatedEngine, outcome: StepOutcome) -> None:
        """Look at a decode step that kept its records."""
        self.num_steps += 1
        for complaint in self._complaints(engine, outcome):
            raise ProtocolError(f"step {self.num_steps}: {complaint}")

    def _complaints(self, engine: SimulatedEngine, outcome: StepOutcome) -> Iterable[str]:
        yield from budget_complaints(engine)
        totals = outcome.totals
        if totals.hits + totals.misses != totals.needed:
            yield "hits and misses are not what was needed"
        if outcome.is_detailed:
            records = engine.steps.records
            yield from task_complaints(records)
            yield from order_complaints(records)
            yield from core_complaints(records)
            yield from queue_complaints(engine, records)
        if self.is_thorough and not engine.is_dense:
            yield from cache_complaints(engine)


def budget_complaints(engine: SimulatedEngine) -> Iterable[str]:
    """Bytes of slots, hot ones too, are within the plan; the cache holds no more than its slots."""
    if engine.is_dense:
        return
    if engine.cold_slots < 0:
        yield f"hot neurons take {-engine.cold_slots} slots more than there are"
    cache = engine.steps.cache
    if cache is not None and cache.pending() == 0:
        held, slots = cache.counters().num_resident, max(0, engine.cold_slots)
        if held > slots:
            yield f"the cache holds {held} neurons in {slots} slots"


def task_complaints(records: Records) -> Iterable[str]:
    """Every cluster does every stage once."""
    clusters = [_clusters(records, stage) for stage in STAGES]
    for stage, found in zip(STAGES, clusters, strict=True):
        if len(np.unique(found)) != len(found):
            yield f"a cluster did {stage.name} twice"
        if not np.array_equal(np.sort(found), np.sort(clusters[0])):
            yield f"{stage.name} was not done by every cluster that was predicted"
    for stage in (Stage.GIO, Stage.UDIO):
        found = _clusters(records, stage)
        if len(np.unique(found)) != len(found):
            yield f"a cluster ordered its reads of {stage.name} twice"


def order_complaints(records: Records) -> Iterable[str]:
    """No stage begins before the one it needs has ended: nothing is computed that is not there."""
    needs = (
        (Stage.GIO, Stage.PRED), (Stage.GC, Stage.PRED), (Stage.GC, Stage.GIO),
        (Stage.UDIO, Stage.GC), (Stage.UDC, Stage.GC), (Stage.UDC, Stage.UDIO),
    )  # fmt: skip
    ends = {stage: _times(records, stage, is_end=True) for stage in Stage}
    for later, earlier in needs:
        begins = _times(records, later, is_end=False)
        for cluster, begin in begins.items():
            if ends[earlier].get(cluster, begin) > begin + ROUNDING_NS:
                yield f"{later.name} of cluster {cluster} began before its {earlier.name} had ended"


def core_complaints(records: Records) -> Iterable[str]:
    """A core does one thing at a time."""
    computing = records[np.isin(records["stage"], [int(stage) for stage in STAGES])]
    for core in np.unique(computing["core"]):
        own = computing[computing["core"] == core]
        order = np.argsort(own["t_ns"], kind="stable")
        begins, ends = own["t_ns"][order], (own["t_ns"] + own["ns"])[order]
        if np.any(begins[1:] + ROUNDING_NS < ends[:-1]):
            yield f"core {core} did two things at once"


def queue_complaints(engine: SimulatedEngine, records: Records) -> Iterable[str]:
    """No more reads are under way than the queue is deep, and it serves one after another."""
    reads = records[np.isin(records["stage"], [int(Stage.GIO), int(Stage.UDIO)])]
    if not len(reads):
        return
    costs = engine.costs()
    turn_ns = costs.read_ps(engine.shape.first_read) / 1000
    depth = min(costs.queue_depth, costs.device.storage.depth)
    if depth > 1 and (turn_ns + costs.latency_ns) / turn_ns > depth + 1e-2:
        yield f"more than {depth} reads are under way"
    bundles = reads["bytes"].sum() / engine.shape.bundle
    least_ns = bundles * costs.moving_ns(engine.shape.bundle) * costs.now.flash
    took_ns = int((reads["t_ns"] + reads["ns"]).max() - reads["t_ns"].min())
    if took_ns + len(reads) < least_ns:
        yield "the queue moved bytes faster than it can"


def cache_complaints(engine: SimulatedEngine) -> Iterable[str]:
    """No neuron lies in two slots and no slot has two neurons."""
    cache = engine.steps.cache
    if cache is None:
        return
    held = [n for n in range(engine.steps.num_neurons) if cache.state(n) in HELD]
    slots = [cache.slot(neuron) for neuron in held]
    if NO_SLOT in slots:
        yield "a neuron is held without a slot"
    if len(set(slots)) != len(slots):
        yield "two neurons lie in one slot"
    if len(held) != cache.counters().num_resident:
        yield f"{len(held)} neurons are held, the cache counts {cache.counters().num_resident}"


def _of(records: Records, stage: Stage) -> Records:
    found: Records = records[records["stage"] == int(stage)]
    return found


def _keys(found: Records) -> NDArray[np.int64]:
    """Layer and cluster as one number."""
    keys: NDArray[np.int64] = found["layer"].astype(np.int64) << 32 | found["cluster"]
    return keys


def _clusters(records: Records, stage: Stage) -> NDArray[np.int64]:
    return _keys(_of(records, stage))


def _times(records: Records, stage: Stage, is_end: bool) -> dict[int, int]:
    found = _of(records, stage)
    times = found["t_ns"] + found["ns"] if is_end else found["t_ns"]
    return dict(zip(_keys(found).tolist(), times.tolist(), strict=True))
