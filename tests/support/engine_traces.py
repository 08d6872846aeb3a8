"""What an engine's neuron cache meets, computed apart from it: a trace of the neurons needed."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from polyneuron.io.ncf_reader import read_ncf
from polyneuron.kernels.neuron_cache import NeuronCache
from polyneuron.model.ncf_spec import spec_of
from polyneuron.planning.bundles import BundlePlan
from polyneuron.profiling.calibration import Calibration
from tests.support.neuron_traces import Trace

Masks = NDArray[np.bool_]


def gated_masks(path: Path, tokens: list[int]) -> Masks:
    """Which neurons have an open gate: (tokens, layers, d_ff), in exact arithmetic."""
    ncf = read_ncf(path)
    calibration = Calibration.begin(ncf, spec_of(ncf), [tokens])
    return np.stack([sample.gate > 0 for sample in calibration.layers()], axis=1)


def warm_trace(bundles: BundlePlan) -> Trace:
    """What fills the cache before the first step: each layer's first neurons."""
    num_warm = bundles.cold_slots // len(bundles.layers)
    width, first = bundles.rows.num_neurons, bundles.pinned_neurons
    ids = np.arange(first, min(first + num_warm, width), dtype=np.uint32)
    return [(0, ids + np.uint32(layer * width)) for layer in range(len(bundles.layers))]


def needed_trace(bundles: BundlePlan, masks: Masks) -> Trace:
    """Token by token, layer by layer, cluster by cluster, as one worker asks for them."""
    width, step = bundles.rows.num_neurons, bundles.rows.cluster_neurons
    num_layers, first = len(bundles.layers), bundles.pinned_neurons
    trace: Trace = []
    for token, layers in enumerate(masks):
        for layer, mask in enumerate(layers):
            epoch = (token + 1) * num_layers + layer
            for begin in range(first, width, step):
                ids = np.flatnonzero(mask[begin : begin + step]) + begin + layer * width
                trace.append((epoch, ids.astype(np.uint32)))
    return trace


def model_cache(bundles: BundlePlan) -> NeuronCache:
    """A cache of the engine's size, warmed as the engine warms its own."""
    num_neurons = len(bundles.layers) * bundles.rows.num_neurons
    return NeuronCache.allocate(num_neurons, bundles.cold_slots)
