"""Recordings of activations for tests, and a scenario that is an engine in exact mode."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from polyneuron.io.activation_trace import TraceHead, needed_words, write_trace
from polyneuron.planning.bundles import BundlePlan
from tests.support.engine_traces import Masks

NO_COSTS = """
[model.bytes]
row = {row}
scales = 0
slot = {slot}
bundle = {bundle}
first_read = {slot}
second_read = 0
attention = 100000
embedding = 100000
head = 100000
predictors = 0
resident = 0
kv_token = 1000
"""


def made_up(layers: int, tokens: int, neurons: int, active: float = 0.2, seed: int = 1) -> Masks:
    """Which neurons are needed, by chance: (tokens, layers, neurons)."""
    rng = np.random.default_rng(seed)
    return rng.random((tokens, layers, neurons)) < active


def write_masks(path: Path, masks: Masks, task_neurons: int = 0) -> Path:
    """A recording's file of (tokens, layers, neurons)."""
    tokens, layers, neurons = masks.shape
    head = TraceHead("a" * 64, "b" * 64, layers, neurons, tokens, task_neurons)
    write_trace(path, head, (needed_words(masks[:, n]).tobytes() for n in range(layers)))
    return path


def engine_scenario(path: Path, bundles: BundlePlan, requests: str, trace: str) -> Path:
    """A scenario of the cache that an engine in exact mode has, its reads one by one."""
    rows, layers = bundles.rows, len(bundles.layers)
    share = (bundles.cold_slots + 0.5) / (layers * rows.num_neurons)
    sizes = NO_COSTS.format(row=rows.slot_bytes, slot=rows.slot_bytes, bundle=rows.bundle_bytes)
    path.write_text(
        f'name = "{path.stem}"\nplayers = ["simulate"]\n'
        '[device]\nprofile = "oneplus12"\n[device.storage]\nmerges = false\n'
        f'[model]\nname = "run"\nlayers = {layers}\nhidden = {rows.cols}\n'
        f"neurons = {rows.num_neurons}\n{sizes}"
        f'[activity]\ntrace = "{trace}"\n'
        f'[engine]\npolicy = "pipeline"\nffn_resident = {share!r}\ncontext = 512\n'
        f"[[requests]]\n{requests}\n"
    )
    return path
