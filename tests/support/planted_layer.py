"""A layer whose inputs vary in few directions, as a profile would have sampled it."""

from types import SimpleNamespace
from typing import Any

import numpy as np

from polyneuron.profiling.sample import LayerSample

D_MODEL, D_FF, NUM_TOKENS = 128, 256, 480


def planted(seed: int = 0, noise: float = 0.05, rank: int = 24) -> LayerSample:
    """A dReLU layer whose inputs vary in `rank` directions around a mean that is not zero."""
    rng = np.random.default_rng(seed)
    latent = rng.standard_normal((NUM_TOKENS, rank))
    mixing = rng.standard_normal((rank, D_MODEL)) / np.sqrt(rank)
    mean = 0.5 * rng.standard_normal(D_MODEL)
    ffn = latent @ mixing + mean + noise * rng.standard_normal((NUM_TOKENS, D_MODEL))
    stretch = rng.uniform(0.5, 2.0, D_MODEL)
    attention = ffn / stretch + noise * rng.standard_normal(ffn.shape)
    gate_rows, up_rows = rng.standard_normal((2, D_FF, D_MODEL)) / np.sqrt(D_MODEL)
    gate_rows -= np.outer(np.linspace(0.0, 1.2, D_FF), mean) / (mean @ mean)
    up_rows += 0.5 * np.outer(np.ones(D_FF), mean) / (mean @ mean)
    gate, up = ffn @ gate_rows.T, ffn @ up_rows.T
    weights: Any = SimpleNamespace(
        deciding=SimpleNamespace(values=lambda: gate_rows.astype(np.float32)),
        up_values=lambda: up_rows.astype(np.float32),
        down_norm=np.ones(D_FF, np.float32),
        ffn_norm=np.ones(D_MODEL, np.float32),
        neuron_bytes=2048,
        neuron_ids=None,
    )
    hidden = np.maximum(gate, 0) * np.maximum(up, 0)
    arrays = [a.astype(np.float32) for a in (attention, ffn, gate, hidden)]
    return LayerSample(0, arrays[0], arrays[1], arrays[2], arrays[3], (0,), weights)
