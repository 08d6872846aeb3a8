"""The simulated step against plain models: times that can be added up by hand, what is missed."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from polyneuron.errors import ProtocolError
from polyneuron.kernels.neuron_cache import NeuronCache
from polyneuron.kernels.simulation import (
    CacheKind,
    LawTables,
    Stage,
    StepFlag,
    StepSimulation,
    StepTotals,
)

NEURONS, CLUSTER, LAYERS = 256, 64, 3
CLUSTERS = NEURONS // CLUSTER
PS = 1000
COSTS = {
    "predict": 2 * PS, "gate_row": 30 * PS, "up_down_row": 50 * PS, "gate_token": 3 * PS,
    "up_down_token": 7 * PS, "neuron": 11 * PS, "miss": 13 * PS, "first_read": 400 * PS,
    "second_read": 300 * PS, "run_read": 350 * PS, "run_neuron": 90 * PS, "latency_ns": 5000,
    "tail_ns": 0, "tail_share": 0, "barrier_ns": 700, "attention_ns": 9000, "npu_ns": 0,
    "hot_ns": 0, "joint": 65536,
}  # fmt: skip
NO_FLAG = StepFlag(0)
Needed = NDArray[np.uint32]


def law(novelty: int = 1) -> LawTables:
    """A fifth of the neurons, alike; at level 1 all anew."""
    chance = np.full((2, NEURONS), (1 << 32) - 1, np.uint32)
    chance[0] //= 4
    everyone = np.arange(NEURONS, dtype=np.uint32)
    keep = np.full(NEURONS, (1 << 32) - 1, np.uint32)
    draws = np.array([15 * 256, 55 * 256], np.uint32)
    return LawTables(NEURONS, everyone, keep, everyone, chance, draws, 65536 * 3 // 4)


def simulation(
    kind: CacheKind = CacheKind.ALL, slots: int = 0, cores: int = 1, hot: int = 0, gap: int = 0,
    flags: StepFlag = NO_FLAG, sequences: int = 1, pinned: int = 0,
    laws: list[LawTables] | None = None, **costs: int,
) -> StepSimulation:  # fmt: skip
    made = StepSimulation(
        laws or law(), num_layers=LAYERS, cluster_neurons=CLUSTER, max_sequences=sequences,
        cache_kind=kind, num_slots=slots, seed=1, max_records=4096,
    )  # fmt: skip
    made.configure(
        {**COSTS, **costs}, num_cores=cores, flags=flags, hot_neurons=hot, first_bytes=256,
        second_bytes=512, bundle_bytes=768, merge_gap=gap, queue_depth=32, pinned_neurons=pinned,
    )  # fmt: skip
    for sequence in range(sequences):
        made.begin(sequence)
    return made


def needed(made: StepSimulation, layer: int, sequences: int = 1, hot: int = 0) -> Needed:
    """Numbers of the neurons that the last step needed in a layer, through all layers."""
    words = NEURONS // 64
    bits = np.bitwise_or.reduce([made.active_bits(s) for s in range(sequences)])
    own = bits[layer * words : (layer + 1) * words]
    found = np.flatnonzero(np.unpackbits(own.view(np.uint8), bitorder="little"))
    return (found[found >= hot] + layer * NEURONS).astype(np.uint32)


def rows_ns(rows: int, misses: int = 0, tokens: int = -1) -> int:
    """Gates, ups and downs of so many neurons by one core."""
    pairs = rows if tokens < 0 else tokens
    return rows * (30 + 50 + 11) + pairs * (3 + 7) + misses * 13


def step(made: StepSimulation, sequences: int = 1, is_detailed: bool = False) -> StepTotals:
    return made.step(list(range(sequences)), [0] * sequences, is_detailed)


class TestTimes:
    def test_resident_layer_is_what_it_computes(self) -> None:
        made = simulation()
        totals = step(made)
        rows = sum(len(needed(made, layer)) for layer in range(LAYERS))
        predicted = LAYERS * NEURONS * 2
        assert totals.compute_ns == predicted + rows_ns(rows)
        assert totals.layers_ns == LAYERS * 9000 + totals.compute_ns
        assert (totals.needed, totals.misses, totals.exposed_ns) == (rows, 0, 0)

    def test_tokens_of_a_batch_share_rows(self) -> None:
        made = simulation(sequences=3)
        totals = step(made, 3)
        rows = sum(len(needed(made, layer, 3)) for layer in range(LAYERS))
        assert totals.needed == rows < totals.active
        assert totals.compute_ns == 3 * LAYERS * NEURONS * 2 + rows_ns(rows, 0, totals.active)

    def test_cores_share_the_clusters(self) -> None:
        one, four = step(simulation(cores=1)), step(simulation(cores=4))
        attention = LAYERS * 9000
        assert four.compute_ns == one.compute_ns
        assert four.layers_ns - attention >= (one.layers_ns - attention) / 4
        assert four.layers_ns < one.layers_ns

    def test_barriers_add_every_stage_up(self) -> None:
        made = simulation(CacheKind.NONE, flags=StepFlag.BARRIER | StepFlag.TWO_PHASE)
        totals = step(made)
        rows = [len(needed(made, layer)) for layer in range(LAYERS)]
        opened = totals.reads - sum(rows)
        reading = sum(rows) * 400 + opened * 300 + LAYERS * 2 * 5000
        fixed = LAYERS * (9000 + NEURONS * 2 + 3 * 700)
        assert totals.layers_ns == fixed + reading + rows_ns(sum(rows), sum(rows))
        assert 0.7 * sum(rows) < opened < 0.8 * sum(rows)
        assert totals.bytes == sum(rows) * 256 + opened * 512

    def test_pipeline_hides_reads_behind_computing(self) -> None:
        both = {"kind": CacheKind.NONE, "cores": 2}
        barrier = step(simulation(**both, flags=StepFlag.BARRIER, barrier_ns=0))
        pipeline = step(simulation(**both))
        assert pipeline.bytes == barrier.bytes and pipeline.compute_ns == barrier.compute_ns
        assert pipeline.layers_ns < barrier.layers_ns

    def test_lookahead_hides_reads_behind_attention(self) -> None:
        usual = step(simulation(CacheKind.NONE))
        ahead = step(simulation(CacheKind.NONE, flags=StepFlag.LOOKAHEAD))
        assert ahead.bytes == usual.bytes
        assert ahead.layers_ns < usual.layers_ns

    def test_barrier_waits_for_what_attention_does_not_hide(self) -> None:
        flags = StepFlag.BARRIER | StepFlag.LOOKAHEAD
        usual = step(simulation(CacheKind.NONE, flags=StepFlag.BARRIER))
        ahead = step(simulation(CacheKind.NONE, flags=flags))
        assert ahead.bytes == usual.bytes and ahead.compute_ns == usual.compute_ns
        # A layer's reads take longer than its attention, which they now lie beside.
        assert usual.layers_ns - ahead.layers_ns == LAYERS * 9000
        long = step(simulation(CacheKind.NONE, flags=flags, attention_ns=1_000_000))
        assert long.layers_ns == LAYERS * (1_000_000 + 3 * 700) + long.compute_ns

    def test_hot_neurons_of_the_cores_take_their_time(self) -> None:
        plain, hot = step(simulation()), step(simulation(hot_ns=4321))
        assert hot.layers_ns == plain.layers_ns + LAYERS * 4321
        assert hot.compute_ns == plain.compute_ns

    def test_reads_wait_for_the_one_queue(self) -> None:
        made = simulation(CacheKind.NONE, cores=4, first_read=100_000 * PS)
        totals = step(made)
        # Nothing is faster than the queue, and little is slower when the queue decides.
        least = totals.reads * 100_000
        assert least < totals.layers_ns < least * 1.05 + LAYERS * 20_000

    def test_npu_decides_where_it_is_slower(self) -> None:
        made = simulation(hot=128, npu_ns=1_000_000)
        totals = step(made)
        assert totals.layers_ns == LAYERS * (9000 + 1_000_000)
        assert totals.hot > 0

    def test_memory_is_shared_with_the_npu(self) -> None:
        alone = step(simulation(hot=128, npu_ns=50_000))
        joint = step(simulation(hot=128, npu_ns=50_000, joint=65536 * 3 // 2))
        # Half as much again for as long as both are at work: the shorter one's time.
        grown = (joint.layers_ns - alone.layers_ns) / (alone.compute_ns / 2)
        assert grown == pytest.approx(1.0, rel=0.01)

    def test_slow_reads_come_as_often_as_stated(self) -> None:
        slow = {"tail_ns": 77_000, "tail_share": 1 << 29, "first_read": 1000 * PS}
        made = simulation(CacheKind.NONE, **slow)
        late = sum(
            int((reads["ns"] > 77_000).sum())
            for _ in range(40)
            if step(made, is_detailed=True)
            for reads in [made.records[made.records["stage"] == Stage.GIO]]
        )
        batches = 40 * LAYERS * CLUSTERS
        # A batch of 13 reads, one in eight of them slow, has a slow one nearly always.
        assert late > 0.85 * batches


def missed_by(
    use: Callable[[int, Needed], int], kind: CacheKind, slots: int
) -> tuple[list[int], list[int]]:
    """Misses of 30 steps as simulated, and as a model has them that is given the same neurons."""
    made = simulation(kind, slots)
    seen, wanted = [], []
    for number in range(30):
        seen.append(step(made).misses)
        wanted.append(
            sum(use(number * LAYERS + layer + 1, needed(made, layer)) for layer in range(LAYERS))
        )
    return seen, wanted


class TestMisses:
    @pytest.mark.parametrize("slots", [100, 250, 600])
    def test_neuron_cache_is_the_engines(self, slots: int) -> None:
        cache = NeuronCache.allocate(LAYERS * NEURONS, slots)

        def use(epoch: int, neurons: Needed) -> int:
            found = cache.use(epoch, neurons)
            assert found is not None
            for neuron, _ in found.misses.tolist():
                cache.landed(neuron)
            return len(found.misses)

        seen, wanted = missed_by(use, CacheKind.NEURON, slots)
        assert seen == wanted and sum(seen) > 0

    @pytest.mark.parametrize("slots", [30, 100, 250, 600])
    def test_window_holds_the_last_layers(self, slots: int) -> None:
        last: dict[int, int] = {}

        def use(epoch: int, neurons: Needed) -> int:
            missed = 0
            for neuron in neurons.tolist():
                if neuron not in last:
                    missed += 1
                    while len(last) >= slots and min(last.values()) < epoch:
                        oldest = min(last.values())
                        for gone in [n for n, use in last.items() if use == oldest]:
                            del last[gone]
                    if len(last) >= slots:
                        continue
                last[neuron] = epoch
            return missed

        seen, wanted = missed_by(use, CacheKind.WINDOW, slots)
        assert seen == wanted and sum(seen) > 0

    @pytest.mark.parametrize("gap", [0, 1, 3])
    def test_neighbours_are_one_read(self, gap: int) -> None:
        made = simulation(CacheKind.NONE, gap=gap)
        totals = step(made)
        reads = bytes_read = 0
        for layer in range(LAYERS):
            for first in range(0, NEURONS, CLUSTER):
                own = needed(made, layer) - layer * NEURONS
                own = own[(own >= first) & (own < first + CLUSTER)].astype(np.int64)
                ends = np.flatnonzero(np.diff(own) > gap) if gap else np.arange(len(own) - 1)
                for run in np.split(own, ends + 1):
                    if len(run):
                        reads += 1
                        span = int(run[-1] - run[0]) + 1
                        bytes_read += 256 if len(run) == 1 else span * 768
        assert (totals.reads, totals.bytes) == (reads, bytes_read)

    def test_pinned_neurons_are_predicted_and_not_looked_up(self) -> None:
        made = simulation(CacheKind.NONE, hot=64, pinned=128)
        totals = step(made)
        cold = sum(
            int((needed(made, layer) - layer * NEURONS >= 128).sum()) for layer in range(LAYERS)
        )
        predicted = sum(len(needed(made, layer, 1, 64)) for layer in range(LAYERS))
        assert totals.misses == cold < predicted == totals.needed == totals.active

    def test_warm_cache_has_the_hottest(self) -> None:
        cold, warm = simulation(CacheKind.NEURON, 400), simulation(CacheKind.NEURON, 400)
        warm.warm(400 // LAYERS)
        assert step(warm).misses < step(cold).misses
        cache = warm.cache
        assert cache is not None and cache.counters().num_resident <= 400


def test_layers_may_have_laws_of_their_own() -> None:
    busy, calm = law(), law()
    calm = replace(calm, num_draws=np.array([256, 256], np.uint32))
    made = simulation(laws=[busy, calm, busy])
    step(made)
    counts = [len(needed(made, layer)) for layer in range(LAYERS)]
    assert counts[1] <= 2
    assert min(counts[0], counts[2]) > 20
    with pytest.raises(ValueError, match="2 laws for 3 layers"):
        simulation(laws=[busy, calm])


class TestRecords:
    def test_every_stage_is_there_in_order(self) -> None:
        made = simulation(CacheKind.NONE, cores=2, flags=StepFlag.TWO_PHASE)
        step(made, is_detailed=True)
        counts = np.bincount(made.records["stage"], minlength=len(Stage)).tolist()
        assert counts[Stage.PRED] == counts[Stage.GC] == counts[Stage.UDC] == LAYERS * CLUSTERS
        assert counts[Stage.GIO] == LAYERS * CLUSTERS and counts[Stage.ATTENTION] == LAYERS
        assert set(made.records["core"].tolist()) == {-1, 0, 1}

    def test_too_many_records_are_refused(self) -> None:
        made = StepSimulation(
            law(), num_layers=LAYERS, cluster_neurons=CLUSTER, max_sequences=1,
            cache_kind=CacheKind.ALL, num_slots=0, seed=1, max_records=5,
        )  # fmt: skip
        usual: dict[str, Any] = {
            "num_cores": 1, "flags": StepFlag(0), "hot_neurons": 0, "first_bytes": 1,
            "second_bytes": 1, "bundle_bytes": 1, "merge_gap": 0, "queue_depth": 1,
        }  # fmt: skip
        made.configure(COSTS, **usual)
        made.begin(0)
        assert step(made).needed > 0
        with pytest.raises(ProtocolError, match="records"):
            step(made, is_detailed=True)
