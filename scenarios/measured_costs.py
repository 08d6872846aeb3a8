"""What steps cost on a device that was measured: the planner's own cost model, part by part.

`planning/cost_model.py` adds a mean step up from these prices; the simulator plays each step's
clusters and reads with them. There is no second model, and nothing of it is fitted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from polyneuron.kernels.simulation import StepFlag
from polyneuron.planning.cost_model import (
    DENSE,
    EXACT,
    IN_ORDER,
    PREDICTED,
    THRESHOLD,
    CostModel,
    Knobs,
    PredictorWork,
    Prices,
    StepCost,
    balanced,
    moved_bytes,
    shared,
)
from polyneuron.planning.device import DeviceProfile, Kernel
from polyneuron.planning.hotness import Hotness
from polyneuron.planning.work import Matrix, ModelWork, RowWork
from polyneuron.scenarios.engine_plan import EnginePlan
from polyneuron.scenarios.engine_settings import EngineSettings, Policy
from polyneuron.scenarios.model_shape import ModelShape
from polyneuron.scenarios.step_costs import BARRIER, TRAITS, PolicyTraits, StepCosts

PS = 1000
"""Of a nanosecond."""
Q4 = "q4"
"""What the weights of a shape that names no file are supposed to be stored in."""
ENGINE_FLAGS = {
    Policy.POWERINFER2: StepFlag(0),
    Policy.PIPELINE: StepFlag(0),
    Policy.CACHE: BARRIER,
    Policy.BUNDLES: BARRIER,
}
"""Policies that are the engine's own: all reads are its reader's, of whole bundles at once."""


def engine_traits(policy: Policy, mode: str, *, is_looking_ahead: bool) -> PolicyTraits:
    """How the engine itself does what a policy does, in a mode; other policies are as elsewhere."""
    if policy not in ENGINE_FLAGS:
        return TRAITS[policy]
    flags = ENGINE_FLAGS[policy]
    flags |= StepFlag.LOOKAHEAD if is_looking_ahead else StepFlag(0)
    return PolicyTraits(TRAITS[policy].cache, flags, False, is_sparse=mode != DENSE)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCosts(StepCosts):
    """Costs of one model on a measured device under some conditions; times as in `StepCosts`."""

    model: CostModel
    knobs: Knobs
    batch: int
    prices: Prices
    read_bytes: int
    """Of a missed neuron's read."""
    missed: float
    """Reads of a layer to expect; with fewer than the queue is deep it is not full."""

    @property
    def num_cores(self) -> int:
        """Workers: the engine's reader has no core of its own, it shares theirs."""
        return self.knobs.workers

    @property
    def has_spare_core(self) -> bool:
        """Whether there is a core that no worker is on."""
        return self.model.device.num_cores > self.knobs.workers

    @property
    def reads(self) -> tuple[int, int]:
        """A neuron is read at once."""
        return self.read_bytes, 0

    @property
    def merge_gap(self) -> int:
        """Every missed neuron is a read of its own."""
        return 0

    def attention_ns(self, kv_tokens: int) -> int:
        """One layer, over so many tokens of all sequences, and what its ops cost beside."""
        ns = self._balanced(self.prices.attention_ns) + self.prices.position_ns * kv_tokens
        return round((ns + self.prices.handoffs_ns) / self.now.cpu)

    def outside_ns(self) -> int:
        """A step beyond its layers."""
        ns = self.prices.outside_ns + self._balanced(self.prices.head_ns)
        return round(ns / self.now.cpu)

    def dense_ns(self, num_bytes: float) -> int:
        """Dense weights, at the rate of the head's."""
        head = self.model.work.head.num_bytes
        return round(num_bytes * self.prices.head_ns / head / self.now.cpu)

    def prefill_ns(self, tokens: int) -> int:
        """A chunk of a prompt, of weights that are there."""
        prices = self.model.prices(self.knobs, tokens)
        layer = prices.attention_ns + prices.feed_forward_ns + self._rows_as_tiles(tokens)
        ns = self.model.work.num_layers * (layer + prices.handoffs_ns) + self.prices.head_ns
        return round((ns + prices.outside_ns) / self.now.cpu)

    def _rows_as_tiles(self, tokens: int) -> float:
        """One layer's bundles, which become tiles on the way."""
        rows, device = self.model.work.rows, self.model.device
        if rows is None:
            return 0.0
        kinds = (
            (rows.decide_type, rows.decide_row), (rows.up_type, rows.up_row),
            (rows.down_type, rows.down_row),
        )  # fmt: skip
        return sum(
            rows.num_neurons * row * 1e9 /
            device.kernel_bytes_per_s(Kernel.TILES, kind, rows.cols, self.knobs.workers, tokens)
            for kind, row in kinds
        )  # fmt: skip

    # ---- reads

    @property
    def _depth(self) -> float:
        return min(self.queue_depth, max(1.0, self.missed))

    def read_ps(self, read_bytes: int) -> int:
        """One of many reads under way; no more than the reader can order where it has a core."""
        speed = self.model.reads_of(moved_bytes(read_bytes), self._depth)
        ns = 1e9 / speed.reads_per_s
        if self.has_spare_core:
            ns = max(ns, self.model.missed_ns(speed.cpu_ns))
        return round(ns * PS * self.now.flash)

    @property
    def latency_ns(self) -> float:
        """Of a read alone, beyond that."""
        alone = self.model.reads_of(moved_bytes(self.read_bytes), 1).latency_ns * self.now.flash
        turn = self.read_ps(self.read_bytes) / PS
        return max(0.0, min(alone, turn * self._depth) - turn)

    def _miss_ps(self) -> float:
        """What workers lose of a core to a missed neuron."""
        if self.has_spare_core:
            return 0.0
        speed = self.model.reads_of(moved_bytes(self.read_bytes), self._depth)
        return self.model.missed_ns(speed.cpu_ns) * PS / self.now.cpu

    # ---- a layer

    def _balanced(self, ns: float) -> float:
        return balanced(ns, self.knobs.workers)

    def _core_ps(self, ns: float) -> float:
        """Work that all workers together do in `ns`, as one core's."""
        return ns * self.knobs.workers * PS / self.now.cpu

    def cluster_costs(self, hot_neurons: int) -> dict[str, int]:
        """All fields of `struct cluster_costs` but attention's."""
        work, prices, hotness = self.model.work, self.prices, self.model.hotness
        is_predicted = self.knobs.mode == PREDICTED
        neurons = self.shape.experts * self.shape.neurons
        hot = hot_neurons / self.shape.neurons
        decide = prices.hidden_ns + prices.scores_ns * (1 - hot)
        decide = decide if is_predicted else prices.decide_ns
        down = prices.down_ns * (hotness.active_share if hotness else 1.0)
        is_open = self._open_share(hot) if is_predicted else 1.0
        cold = max(1.0, neurons * (1 - hot))
        return {
            "predict": round(self._core_ps(decide) / cold / self.batch),
            "gate_row": 0,
            "up_down_row": 0,
            "gate_token": round(self._core_ps(prices.gate_ns)) if is_predicted else 0,
            "up_down_token": round(self._core_ps(is_open * (prices.up_ns + down))),
            "neuron": 0,
            "miss": round(self._miss_ps()),
            "first_read": self.read_ps(self.read_bytes),
            "second_read": 0,
            "run_read": 0,
            "run_neuron": 0,
            "latency_ns": round(self.latency_ns),
            "tail_ns": self.tail[0],
            "tail_share": self.slow_share,
            "barrier_ns": round(self.model.device.step(self.knobs.workers).op_ns / self.now.cpu),
            "attention_ns": 0,
            "npu_ns": 0,
            "hot_ns": round(self._hot_ns(hot) / self.now.cpu) if work.rows else 0,
            "joint": self.joint(),
        }  # fmt: skip

    def _open_share(self, hot: float) -> float:
        """Of named neurons, those whose gate is open."""
        predictor = self.model.predictor
        if predictor is None:
            return self.shape.activity.gate
        return min(1.0, predictor.found.needed(1, hot) / max(1e-9, predictor.asked.needed(1, hot)))

    def _hot_ns(self, hot: float) -> float:
        """Hot neurons, gates first, by all workers."""
        hotness, prices = self.model.hotness, self.prices
        if hotness is None or not hot:
            return 0.0
        gates = hot / IN_ORDER * prices.gate_ns
        up = hotness.needed(self.batch, 0.0, hot) * prices.up_ns
        down = hotness.needed(1, 0.0, hot) * hotness.active_share * prices.down_ns
        return self._balanced(self.shape.neurons * self.batch * (gates + up + down))

    # ---- what no cluster is played of

    def with_streamed(self, ns: int, kv_tokens: int) -> int:
        """A step whose layers took `ns`, with those that pass through, gates first."""
        knobs, work = self.knobs, self.model.work
        streamed = work.num_layers - knobs.num_resident
        if knobs.mode not in (EXACT, THRESHOLD) or not streamed:
            return ns
        hotness, prices = self.model.hotness, self.prices
        assert hotness is not None and work.rows is not None
        up = hotness.needed(self.batch) * prices.up_ns
        down = hotness.needed() * hotness.active_share * prices.down_ns
        layer = prices.decide_ns + work.rows.num_neurons * self.batch * (up + down)
        ns += streamed * (
            self.attention_ns(kv_tokens) + round(self._balanced(layer) / self.now.cpu)
        )
        reads = self.model.device.layer_reads()
        each = streamed * work.layer_bytes / reads.read_bytes
        cores = self.model.device.num_cores
        computed = shared(ns, each * reads.cpu_ns, knobs.workers, cores)
        return round(max(computed, each * 1e9 / reads.reads_per_s * self.now.flash))

    def dense_step(self, kv_tokens: int) -> StepCost:
        """A step that computes every neuron."""
        positions = round(kv_tokens / self.batch)
        cost = replace(self.model, positions=positions).step(self.knobs, self.batch)
        return replace(cost, total_ns=cost.total_ns / self.now.cpu)


# ---- models that are no file


@lru_cache(maxsize=16)
def shape_model(shape: ModelShape, device: DeviceProfile) -> CostModel:
    """The cost model of a shape's sizes; weights are supposed to be stored in 4 bits."""
    row, width = shape.row + shape.scales, shape.hidden
    neurons = shape.experts * shape.neurons
    rows = RowWork(
        num_neurons=neurons, cluster_neurons=1, cols=width, decide_type=Q4, up_type=Q4,
        down_type=Q4, decide_row=row, up_row=row if shape.matrices > 2 else 0, down_row=row,
        slot_bytes=shape.slot, whole_bytes=shape.slot,
    )  # fmt: skip
    work = ModelWork(
        num_layers=shape.layers, attention=(Matrix(Q4, width, shape.attention),), feed_forward=(),
        head=Matrix(Q4, width, shape.head), kv_bytes=shape.kv_token // shape.layers,
        layer_bytes=shape.layer_bundles, rows=rows,
    )  # fmt: skip
    hotness = Hotness.supposed(neurons)
    scores = Matrix(Q4, width, shape.predictors // shape.layers)
    predictor = PredictorWork(None, scores, hotness, hotness, is_early=True)
    return CostModel(work, device, hotness, predictor)


def measured_costs(
    stated: StepCosts, settings: EngineSettings, batch: int, cold_slots: int,
    own: EnginePlan | None,
) -> MeasuredCosts:  # fmt: skip
    """Costs with so many sequences, of the plan of the real engine or of a shape; `stated` has what
    does not depend on the cost model."""
    shape, profile = stated.shape, stated.device.profile
    assert profile is not None
    if own is not None:
        model, knobs, read_bytes = own.cost_model, own.knobs(batch, cold_slots), own.read_bytes
        missed = model.step(knobs, batch).reads / max(1, len(own.cached_layers))
    else:
        model, knobs = shape_model(shape, profile), shape_knobs(settings, profile)
        read_bytes, missed = shape.first_read + shape.second_read, float(settings.queue_depth)
    return MeasuredCosts(
        stated.device, shape, stated.traits, stated.now, stated.is_resident, stated.file_bytes,
        stated.queue_depth, stated.workers, model=model, knobs=knobs, batch=batch,
        prices=model.prices(knobs, batch), read_bytes=read_bytes, missed=missed,
    )  # fmt: skip


def shape_knobs(settings: EngineSettings, device: DeviceProfile, mode: str = PREDICTED) -> Knobs:
    """How the engine would run a shape."""
    workers = settings.num_workers or device.num_cores
    ahead = mode == PREDICTED and settings.policy in ENGINE_FLAGS
    return Knobs(mode, workers, settings.queue_depth, is_looking_ahead=ahead)
