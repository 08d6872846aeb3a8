"""How long a decode step takes, from a model's bytes and a device's figures (PAPER §1.10).

Pure functions. Times are nanoseconds of wall time unless told otherwise. A step is attention, feed
forward and head; processor time of reads comes on top of the kernels' where workers and reader
share cores, and reading overlaps with what does not wait for it:

- streamed layers are read ahead all the time, so only their total can be longer than the rest;
- a missed neuron is ordered when its cluster is decided, so a layer's reads overlap with that
  layer's feed forward, and with its attention too where a predictor has looked ahead.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from polyneuron.io.ncf_format import PAGE_BYTES
from polyneuron.planning.device import DeviceProfile, Kernel, ReadSpeed
from polyneuron.planning.hotness import Hotness
from polyneuron.planning.work import Matrix, ModelWork, RowWork

DENSE, EXACT, PREDICTED, THRESHOLD = "dense", "exact", "predicted", "threshold"

OPS_A_LAYER = {DENSE: 8, EXACT: 9, PREDICTED: 11, THRESHOLD: 9}
"""Of the decode program: norm, q/k/v, rotation, attention, output, norm, and the feed forward's."""
OPS_OUTSIDE = 3
"""Beyond its layers: embedding, norm, head."""
CLAIMS = 8
"""In so many claims an executor takes its share of an op; who is first waits for half of one."""
OUTSIDE_NS = 100_000.0
"""Of a step, what the coordinator does between two of them: sampling, plan, mailbox."""
LAND_NS = 4_000.0
"""Processor time of a missed neuron beyond the probe's: order, wait, wake. On a 7B: 5 µs."""
LONG_READ_BYTES = 1 << 18
IN_ORDER = 1.2
"""Rows that follow each other are walked so much faster than rows at random. Measured on a 7B."""


@dataclass(frozen=True, slots=True)
class PredictorWork:
    """The predictors of a model, layers as their mean."""

    hidden: Matrix | None
    """fc1 of one layer."""
    scores: Matrix
    """fc2 of one layer."""
    asked: Hotness
    """How often each neuron is named."""
    found: Hotness
    """How often its gate is above zero, too."""
    is_early: bool
    """Whether it reads the attention's input, so that reads can begin before attention."""


@dataclass(frozen=True, slots=True)
class Knobs:
    """What a plan chooses for one batch size."""

    mode: str
    workers: int
    queue_depth: int = 32
    num_resident: int = 0
    """Layers in memory: whole, or with their deciding rows when there are cold slots."""
    cold_slots: int = 0
    hot_neurons: int = 0
    """Predicted mode: of each layer, from the hottest on, those that are not predicted."""
    pinned_neurons: int = 0
    """Predicted mode: of each layer, hottest first, those that stay; at least the hot ones."""
    is_looking_ahead: bool = False
    """Whether reads begin before attention. Predicted mode with an early predictor only."""


@dataclass(frozen=True, slots=True)
class StepCost:
    """One decode step of `batch` sequences."""

    batch: int
    total_ns: float
    compute_ns: float
    """If nothing had to be read."""
    bytes_read: float
    reads: float
    """Of single neurons."""
    hit_rate: float | None
    """Of needed neurons; None without a neuron cache."""

    @property
    def tokens_per_s(self) -> float:
        """All sequences together."""
        return self.batch * 1e9 / self.total_ns

    @property
    def bytes_per_token(self) -> float:
        """Read from the file."""
        return self.bytes_read / self.batch

    @property
    def waiting_share(self) -> float:
        """Of the step, what reading adds."""
        return 1.0 - self.compute_ns / self.total_ns


@dataclass(frozen=True, slots=True)
class Prices:
    """What the parts of a decode step cost so many workers together: ns of wall time, without the
    wait for whoever has claimed last. Rows are single ones, for one token, among rows at random."""

    outside_ns: float
    """Of a step, between two of them and around its layers; without the head."""
    handoffs_ns: float
    """Of a layer's ops."""
    head_ns: float
    attention_ns: float
    """One layer's weights."""
    position_ns: float
    """One layer's keys and values, of each position that some sequence looks back on."""
    feed_forward_ns: float
    """One layer in tiles; 0 in bundles."""
    decide_ns: float
    """One layer's deciding rows as tiles."""
    gate_ns: float
    up_ns: float
    """0 where the deciding row is the up row."""
    down_ns: float
    hidden_ns: float = 0.0
    """One layer's predictor: fc1,"""
    scores_ns: float = 0.0
    """and fc2."""


@dataclass(frozen=True, slots=True)
class CostModel:
    """A model on a device."""

    work: ModelWork
    device: DeviceProfile
    hotness: Hotness | None
    """None of models whose neurons are never zero."""
    predictor: PredictorWork | None = None
    positions: int = 256
    """Of the context that attention looks back on."""

    def step(self, knobs: Knobs, batch: int = 1) -> StepCost:
        """What a decode step costs with these knobs."""
        return _Step(self, knobs, batch, self.prices(knobs, batch)).cost()

    def prices(self, knobs: Knobs, batch: int = 1) -> Prices:
        """What the parts of such a step cost; whoever plays a step part by part adds them up."""
        return _priced(self, knobs, batch)

    def missed_ns(self, read_cpu_ns: float) -> float:
        """Processor time of a missed neuron, its read's included."""
        return read_cpu_ns + self.device.cache.miss_ns + LAND_NS

    def reads_of(self, num_bytes: float, depth: float) -> ReadSpeed:
        """Reads at random; long ones, as of clusters of experts, are as fast as layers' reads."""
        if num_bytes < LONG_READ_BYTES:
            return self.device.random_reads(num_bytes, depth)
        speed = self.device.layer_reads()
        share = num_bytes / speed.read_bytes
        return replace(
            speed, reads_per_s=speed.reads_per_s / share, cpu_ns=speed.cpu_ns * share,
            latency_ns=round(1e9 * share / speed.reads_per_s), read_bytes=round(num_bytes),
        )  # fmt: skip


def _priced(model: CostModel, knobs: Knobs, batch: int) -> Prices:
    device, work, predictor = model.device, model.work, model.predictor
    workers, board = knobs.workers, model.device.step(knobs.workers)

    def rate(kernel: Kernel, storage: str, cols: int, tokens: int = 1) -> float:
        return device.kernel_bytes_per_s(kernel, storage, cols, workers, tokens)

    def tiles(matrices: Iterable[Matrix]) -> float:
        return sum(m.num_bytes * 1e9 / rate(Kernel.TILES, m.storage, m.cols, batch)
                   for m in matrices)  # fmt: skip

    def row(kernel: Kernel, storage: str, row_bytes: int) -> float:
        """For one token, among rows at random."""
        assert rows is not None
        return row_bytes * 1e9 / rate(kernel, storage, rows.cols)

    rows = work.rows
    is_predicted = knobs.mode == PREDICTED and predictor is not None
    hidden = [predictor.hidden] if is_predicted and predictor and predictor.hidden else []
    scores = [predictor.scores] if is_predicted and predictor else []
    return Prices(
        outside_ns=OUTSIDE_NS + board.step_ns + OPS_OUTSIDE * board.op_ns,
        handoffs_ns=OPS_A_LAYER[knobs.mode] * board.op_ns,
        head_ns=tiles([work.head]),
        attention_ns=tiles(work.attention),
        position_ns=work.kv_bytes * 1e9 / rate(Kernel.ATTENTION, "f16", 128),
        feed_forward_ns=tiles(work.feed_forward),
        decide_ns=tiles([rows.decide]) if rows else 0.0,
        gate_ns=row(Kernel.DOT, rows.decide_type, rows.decide_row) if rows else 0.0,
        up_ns=row(Kernel.DOT, rows.up_type, rows.up_row) if rows and rows.up_row else 0.0,
        down_ns=row(Kernel.AXPY, rows.down_type, rows.down_row) if rows else 0.0,
        hidden_ns=tiles(hidden),
        scores_ns=tiles(scores),
    )


def balanced(ns: float, workers: int) -> float:
    """What so many share, with the wait for whoever has claimed last."""
    return ns * (1.0 + (workers - 1) / workers / (2 * CLAIMS))


def moved_bytes(read_bytes: int) -> int:
    """What a device moves for one of reads that lie end to end, as bundles do: whole pages.

    A read of whole pages begins with one; others begin anywhere in theirs and reach into one more.
    """
    return read_bytes + PAGE_BYTES - math.gcd(read_bytes, PAGE_BYTES)


def shared(compute_ns: float, cpu_ns: float, workers: int, cores: int) -> float:
    """Kernels of all workers, and a reader that needs a core for `cpu_ns` meanwhile."""
    return max(compute_ns, cpu_ns, (workers * compute_ns + cpu_ns) / max(workers, cores))


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer's feed forward."""

    early_ns: float
    """Kernels before anything can be ordered."""
    compute_ns: float
    """All kernels."""
    reads: float = 0.0
    hit_rate: float = 1.0


@dataclass(frozen=True, slots=True)
class _Step:
    model: CostModel
    knobs: Knobs
    batch: int
    prices: Prices

    # ---- kernels

    def _balanced(self, ns: float) -> float:
        return balanced(ns, self.knobs.workers)

    @property
    def _rows(self) -> RowWork:
        rows = self.model.work.rows
        assert rows is not None
        return rows

    @property
    def _hotness(self) -> Hotness:
        hotness = self.model.hotness
        assert hotness is not None
        return hotness

    def _up_and_down(self, union: float, gated: float) -> float:
        """`union` neurons get their up row by every token, `gated` ones of each token their down
        row if the product is not zero."""
        active, prices = gated * self._hotness.active_share, self.prices
        return self._balanced(self.batch * (union * prices.up_ns + active * prices.down_ns))

    # ---- a layer's feed forward by mode

    def _every_neuron(self) -> _Layer:
        rows, prices = self.model.work.rows, self.prices
        if rows is None:
            return _Layer(0.0, self._balanced(prices.feed_forward_ns))
        each = (prices.up_ns + prices.down_ns) / IN_ORDER
        others = self.batch * rows.num_neurons * each
        return _Layer(0.0, self._balanced(prices.decide_ns + others))

    def _gates_first(self) -> _Layer:
        rows, hotness = self._rows, self._hotness
        union = hotness.needed(self.batch) * rows.num_neurons
        gated = hotness.needed() * rows.num_neurons
        decide = self._balanced(self.prices.decide_ns)
        compute = decide + self._up_and_down(union, gated)
        if not self.knobs.cold_slots:
            return _Layer(decide, compute)
        cached = self.knobs.cold_slots / (self.knobs.num_resident * rows.num_neurons)
        hits = hotness.hit_rate(cached, self.batch)
        return _Layer(decide / rows.num_clusters, compute, union * (1.0 - hits), hits)

    def _predicted(self) -> _Layer:
        rows, hotness, predictor = self._rows, self._hotness, self.model.predictor
        assert predictor is not None
        num = rows.num_neurons
        hot, pinned = self.knobs.hot_neurons / num, self.knobs.pinned_neurons / num
        hidden = self._balanced(self.prices.hidden_ns)
        chosen = rows.num_used / rows.num_experts  # a token is scored for its experts alone
        scores = self._balanced(self.prices.scores_ns * (1.0 - hot) * chosen)
        asked, found = predictor.asked, predictor.found
        gate = self.prices.gate_ns
        gates = self._balanced(self.batch * num * (hot / IN_ORDER + asked.needed(1, hot)) * gate)
        cold = num * found.needed(1, hot)
        compute = hidden + scores + gates + self._up_and_down(cold, cold)
        compute += self._up_and_down(
            num * hotness.needed(self.batch, 0.0, hot), num * hotness.needed(1, 0.0, hot)
        )
        others = self.model.work.num_layers * (num - self.knobs.pinned_neurons)
        slots = self.knobs.cold_slots or others  # no cache: everything is in memory
        hits = asked.hit_rate(slots / others if others else 1.0, self.batch, pinned)
        misses = num * asked.needed(self.batch, pinned) * (1.0 - hits)
        return _Layer(hidden + scores / rows.num_clusters, compute, misses, hits)

    def _experts(self) -> _Layer:
        """Chosen experts, whole clusters of them in the cache or not; all are as often chosen."""
        rows, hotness = self._rows, self.model.hotness
        is_sparse = self.knobs.mode == EXACT and hotness is not None
        chosen = rows.num_used / rows.num_experts
        open_share = min(1.0, hotness.needed() / chosen) if is_sparse and hotness else 1.0
        prices = self.prices
        used = self.batch * rows.num_neurons * chosen
        each = prices.gate_ns + open_share * (prices.up_ns + prices.down_ns)
        compute = self._balanced(used * each / IN_ORDER)
        if not self.knobs.cold_slots:
            return _Layer(0.0, compute)
        kept = rows.num_neurons / rows.slot_neurons
        hits = min(1.0, self.knobs.cold_slots / (self.model.work.num_layers * kept))
        misses = kept * rows.chosen_share(self.batch) * (1.0 - hits)
        return _Layer(0.0, compute, misses, hits)

    def _feed_forward(self) -> _Layer:
        work, mode = self.model.work, self.knobs.mode
        has_experts = work.rows is not None and work.rows.num_experts > 1
        if has_experts and mode != PREDICTED:
            return self._experts()
        if work.rows is None or mode == DENSE or self.model.hotness is None:
            return self._every_neuron()
        return self._predicted() if mode == PREDICTED else self._gates_first()

    # ---- reads

    def _shared(self, compute_ns: float, cpu_ns: float) -> float:
        return shared(compute_ns, cpu_ns, self.knobs.workers, self.model.device.num_cores)

    def _with_reads(self, layer: _Layer, attention_ns: float, read_bytes: int) -> float:
        """Attention and feed forward of a layer that misses neurons."""
        knobs, work = self.knobs, self.model.work
        if layer.reads <= 0:
            return attention_ns + layer.compute_ns
        moved = moved_bytes(read_bytes)
        speed = self.model.reads_of(moved, min(knobs.queue_depth, max(1.0, layer.reads)))
        cpu_ns = layer.reads * self.model.missed_ns(speed.cpu_ns)
        # The last neuron to land still has to be computed: a cluster's part of the layer.
        last = (layer.compute_ns - layer.early_ns) / (work.rows.num_clusters if work.rows else 1)
        first_ns = self.model.reads_of(moved, 1).latency_ns
        reading = layer.early_ns + first_ns + layer.reads * 1e9 / speed.reads_per_s + last
        if knobs.is_looking_ahead:
            return max(self._shared(attention_ns + layer.compute_ns, cpu_ns), reading)
        return attention_ns + max(self._shared(layer.compute_ns, cpu_ns), reading)

    def cost(self) -> StepCost:
        """Add everything up."""
        work, device, knobs = self.model.work, self.model.device, self.knobs
        prices = self.prices
        attention = self._balanced(prices.attention_ns)
        attention += prices.position_ns * self.model.positions * self.batch
        outside = prices.outside_ns + work.num_layers * prices.handoffs_ns
        outside += self._balanced(prices.head_ns)
        layer = self._feed_forward()
        predicted = knobs.mode == PREDICTED
        resident = work.num_layers if predicted else knobs.num_resident
        streamed = work.num_layers - resident
        read_bytes = self._read_bytes(predicted)
        plain = outside + work.num_layers * (attention + layer.compute_ns)
        cached = resident * self._with_reads(layer, attention, read_bytes)
        total = outside + cached + streamed * (attention + layer.compute_ns)
        stream_bytes = streamed * work.layer_bytes
        if stream_bytes:
            reads = device.layer_reads()
            each = stream_bytes / reads.read_bytes
            total = max(self._shared(total, each * reads.cpu_ns), each * 1e9 / reads.reads_per_s)
        reads_of_neurons = resident * layer.reads
        has_cache = bool(knobs.cold_slots) and work.rows is not None
        return StepCost(
            self.batch, total, plain, stream_bytes + reads_of_neurons * read_bytes,
            reads_of_neurons, layer.hit_rate if has_cache else None,
        )  # fmt: skip

    def _read_bytes(self, predicted: bool) -> int:
        rows = self.model.work.rows
        if rows is None:
            return 0
        if rows.num_experts > 1 and not predicted:
            return rows.whole_bytes * rows.slot_neurons
        return rows.whole_bytes if predicted else rows.slot_bytes
