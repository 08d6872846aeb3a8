"""What the neuron cache's policy makes of scans, of power laws, and of a hot set that moves."""

from __future__ import annotations

import numpy as np
import pytest

from polyneuron.kernels.neuron_cache import NeuronCache
from tests.support.neuron_cache_model import NeuronCacheModel
from tests.support.neuron_traces import (
    SparseModel,
    Trace,
    best_fixed_hit_rate,
    cyclic_scan,
    lru_hit_rate,
    run_trace,
)

WARM_UP_TOKENS = 60
TOKENS = 100


def run_both(num_neurons: int, num_slots: int, trace: Trace) -> list[bool]:
    """Which uses of the trace hit, by the library and the model at once."""
    cache = NeuronCache.allocate(num_neurons, num_slots)
    model = NeuronCacheModel(num_neurons, num_slots, 0, num_slots)
    hits: list[bool] = []
    for epoch, neurons in trace:
        found, expected = cache.use(epoch, neurons), model.use(epoch, neurons.tolist())
        assert found is not None and expected is not None
        assert list(map(tuple, found.misses.tolist())) == expected[1]
        missed = {neuron for neuron, _ in expected[1]}
        for neuron in missed:
            cache.landed(neuron)
            model.landed(neuron)
        hits += [neuron not in missed for neuron in neurons.tolist()]
    counters = cache.counters()
    assert (counters.hits, counters.misses) == (sum(hits), len(hits) - sum(hits))
    assert counters.evictions == model.counters["evictions"]
    return hits


class TestCyclicScan:
    @pytest.mark.parametrize("percent", [10, 20, 30, 40, 50, 60, 70, 80, 90, 95, 99, 100, 120])
    def test_hits_are_what_fits(self, percent: int) -> None:
        """Plain LRU never hits below 100 %."""
        num_neurons, num_scans, num_warm = 500, 12, 4
        num_slots = num_neurons * percent // 100
        trace = cyclic_scan(num_neurons, 5, num_scans)
        hits = run_both(num_neurons, num_slots, trace)[num_warm * num_neurons :]
        expected = min(1.0, num_slots / num_neurons)
        assert expected - 0.02 <= sum(hits) / len(hits) <= expected
        split = num_warm * num_neurons // 5
        lru = lru_hit_rate(num_slots, trace[:split], trace[split:])
        assert lru == (0.0 if percent < 100 else 1.0)

    @pytest.mark.parametrize("percent", [50, 90])
    def test_scan_after_bursts(self, percent: int) -> None:
        """A window that bursts have made large gives its slots back to the main part."""
        sparse = SparseModel(num_layers=5, layer_neurons=100, persistence=0.9)
        bursts = sparse.trace(np.random.default_rng(1), TOKENS)
        scan = cyclic_scan(sparse.num_neurons, 5, 12)
        trace = bursts + [(len(bursts) + epoch, neurons) for epoch, neurons in scan]
        hits = run_both(sparse.num_neurons, sparse.num_neurons * percent // 100, trace)
        last = hits[-4 * sparse.num_neurons :]
        assert sum(last) / len(last) >= percent / 100 - 0.02

    def test_scan_leaves_the_hot_set_alone(self) -> None:
        """A scan of cold neurons between tokens costs the hot ones nothing."""
        num_neurons, hot = 1000, np.arange(100, dtype=np.uint32)
        cache = NeuronCache.allocate(num_neurons, 140)
        trace = [(epoch, hot) for epoch in range(1, 11)]
        run_trace(cache, trace)
        for epoch in range(11, 191):
            start = 100 + epoch * 5 % 900
            cold = np.arange(start, start + 5, dtype=np.uint32)
            run_trace(cache, [(2 * epoch, cold), (2 * epoch + 1, hot)])
        counters = cache.counters()
        assert counters.hits == 9 * 100 + 180 * 100


class TestPowerLaw:
    @pytest.mark.parametrize("persistence", [0.0, 0.3, 0.6])
    @pytest.mark.parametrize("percent", [30, 50, 70])
    def test_beats_lru_and_nears_the_best_set(self, percent: int, persistence: float) -> None:
        sparse = SparseModel(persistence=persistence)
        trace = sparse.trace(np.random.default_rng(percent), WARM_UP_TOKENS + TOKENS)
        split = WARM_UP_TOKENS * sparse.num_layers
        num_slots = sparse.num_neurons * percent // 100
        cache = NeuronCache.allocate(sparse.num_neurons, num_slots)
        run_trace(cache, trace[:split])
        hit_rate = run_trace(cache, trace[split:])
        assert hit_rate >= lru_hit_rate(num_slots, trace[:split], trace[split:])
        assert hit_rate >= 0.9 * best_fixed_hit_rate(num_slots, trace[split:])

    @pytest.mark.parametrize(("percent", "persistence"), [(20, 0.3), (30, 0.8), (60, 0.0)])
    def test_equals_the_model(self, percent: int, persistence: float) -> None:
        sparse = SparseModel(num_layers=4, layer_neurons=200, persistence=persistence)
        trace = sparse.trace(np.random.default_rng(7), 120)
        hits = run_both(sparse.num_neurons, sparse.num_neurons * percent // 100, trace)
        assert any(hits)

    @pytest.mark.parametrize("percent", [30, 50])
    def test_moved_hot_set_is_followed(self, percent: int) -> None:
        sparse, rng = SparseModel(), np.random.default_rng(3)
        before = sparse.trace(rng, WARM_UP_TOKENS + TOKENS)
        after = sparse.trace(rng, 2 * TOKENS, first_epoch=len(before) + 1)
        num_slots, split = sparse.num_neurons * percent // 100, WARM_UP_TOKENS * sparse.num_layers
        cache = NeuronCache.allocate(sparse.num_neurons, num_slots)
        run_trace(cache, before[:split])
        settled = run_trace(cache, before[split:])
        moved = run_trace(cache, after[: 5 * sparse.num_layers])
        middle = len(after) // 2
        run_trace(cache, after[5 * sparse.num_layers : middle])
        recovered = run_trace(cache, after[middle:])
        assert moved < settled - 0.05, "the hot set has moved"
        assert recovered > settled - 0.02
        assert recovered >= lru_hit_rate(num_slots, after[:middle], after[middle:])


class TestUseCounts:
    def test_counts_stop_at_their_most(self) -> None:
        """A neuron used a thousand times is not taken for a cold one."""
        trace = [(epoch, np.array([0], np.uint32)) for epoch in range(1, 1001)]
        trace += [(1001 + n, np.array([n], np.uint32)) for n in range(1, 60)]
        hits = run_both(60, 20, [*trace, (2000, np.array([0], np.uint32))])
        assert hits[-1]
