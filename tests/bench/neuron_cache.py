"""The neuron cache's cost, and its hit rates beside other policies'.

Run by `python -m tests.bench.neuron_cache`.
Hit rates are of synthetic power laws, or of the activations of a real model where they have been
recorded (`--activations FILE.npy`: booleans of tokens, layers, neurons). Costs are of a cache of a
7B model's size, used as executors use it: a call a cluster.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from polyneuron.kernels._kernels import ffi, lib
from polyneuron.kernels.neuron_cache import NEURON_MISS, NeuronCache
from tests.support.neuron_traces import (
    SparseModel,
    Trace,
    best_fixed_hit_rate,
    lru_hit_rate,
    run_trace,
    total_uses,
)

NUM_LAYERS, LAYER_NEURONS = 32, 14336
CALL_NEURONS = (8, 64, 1434)
WARM_UP = 0.25


def nanoseconds_a_use(cache: NeuronCache, trace: Trace, num_runs: int) -> float:
    """Of the library's work alone: a loop of empty calls is taken off. The fastest runs count."""
    most = max(neurons.size for _, neurons in trace)
    slots, misses = np.empty(most, np.uint32), np.empty(most, NEURON_MISS)
    base = ffi.cast("void *", cache.address)
    outputs = (
        ffi.from_buffer("uint32_t[]", slots),
        ffi.from_buffer("struct neuron_miss[]", misses),
    )
    calls = [
        (epoch, ffi.from_buffer("uint32_t[]", ids), ids.size) for epoch, ids in trace if ids.size
    ]

    def run(is_empty: bool) -> int:
        start_ns = time.perf_counter_ns()
        for epoch, pointer, n in calls:
            lib.neuron_cache_use(base, epoch, pointer, 0 if is_empty else n, *outputs)
        return time.perf_counter_ns() - start_ns

    runs = [(run(is_empty=False), run(is_empty=True)) for _ in range(num_runs)]
    used_ns, empty_ns = map(min, zip(*runs, strict=True))
    return (used_ns - empty_ns) / total_uses(trace)


def cost_trace(rng: np.random.Generator, call_neurons: int, num_tokens: int) -> Trace:
    """A tenth of all neurons a token, in calls of so many."""
    uses: Trace = []
    for token in range(num_tokens):
        for layer in range(NUM_LAYERS):
            active = np.flatnonzero(rng.random(LAYER_NEURONS) < 0.1) + layer * LAYER_NEURONS
            ids = active.astype(np.uint32)
            cuts = range(call_neurons, ids.size, call_neurons)
            uses += [(1 + token * NUM_LAYERS + layer, part) for part in np.split(ids, cuts)]
    return uses


def print_costs() -> None:
    print("| neurons a call | ns a hit | ns a miss that evicts |\n| --- | --- | --- |")
    num_neurons, rng = NUM_LAYERS * LAYER_NEURONS, np.random.default_rng(1)
    for call_neurons in CALL_NEURONS:
        cache = NeuronCache.allocate(num_neurons, num_neurons)
        run_trace(cache, [(1, np.arange(num_neurons, dtype=np.uint32))])
        hit_ns = nanoseconds_a_use(cache, cost_trace(rng, call_neurons, 2), 7)
        cache = NeuronCache.allocate(num_neurons, num_neurons // 2)
        run_trace(cache, cost_trace(rng, LAYER_NEURONS, 20))
        misses: Trace = []
        for epoch, neurons in cost_trace(rng, call_neurons, 2):
            absent = [neuron for neuron in neurons.tolist() if not cache.state(neuron)]
            misses.append((1000 + epoch, np.array(absent, np.uint32)))
        miss_ns = nanoseconds_a_use(cache, misses, 1)
        print(f"| {call_neurons} | {hit_ns:.1f} | {miss_ns:.0f} |")


def print_hit_rates(name: str, num_neurons: int, trace: Trace) -> None:
    split = int(len(trace) * WARM_UP)
    for percent in (20, 30, 50, 70):
        num_slots = num_neurons * percent // 100
        if num_slots <= max(neurons.size for _, neurons in trace):
            continue
        cache = NeuronCache.allocate(num_neurons, num_slots)
        run_trace(cache, trace[:split])
        rates = (
            run_trace(cache, trace[split:]),
            lru_hit_rate(num_slots, trace[:split], trace[split:]),
            best_fixed_hit_rate(num_slots, trace[split:]),
        )
        print(f"| {name} | {percent} % |", " | ".join(f"{100 * r:.1f} %" for r in rates), "|")


def recorded_trace(path: str) -> tuple[int, Trace]:
    active = np.load(path)
    num_tokens, num_layers, num_neurons = active.shape
    layers = active.reshape(num_tokens * num_layers, num_neurons)
    trace = [
        (epoch, (np.flatnonzero(layer) + epoch % num_layers * num_neurons).astype(np.uint32))
        for epoch, layer in enumerate(layers)
    ]
    return num_layers * num_neurons, trace


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--activations", metavar="FILE.npy")
    arguments = parser.parse_args()
    print_costs()
    print("\n| trace | cached | neuron cache | LRU | best fixed set |")
    print("| --- | --- | --- | --- | --- |")
    for persistence in (0.0, 0.3, 0.6, 0.8):
        sparse = SparseModel(16, 1000, persistence=persistence)
        trace = sparse.trace(np.random.default_rng(1), 240)
        print_hit_rates(f"persistence {persistence}", sparse.num_neurons, trace)
    if arguments.activations:
        print_hit_rates("recorded", *recorded_trace(arguments.activations))


if __name__ == "__main__":
    main()
