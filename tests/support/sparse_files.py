"""A small sparse model file with its profile and predictors beside it, as a user would have it."""

from __future__ import annotations

from pathlib import Path

from polyneuron.profiling.predictors import PredictorSettings
from polyneuron.profiling.profile import make_profile
from polyneuron.scenarios.replay_model import random_prompt
from polyneuron.synth.shapes import shape_spec
from polyneuron.synth.write import SynthSettings, synthesize

VOCAB, LAYERS, NEURONS = 512, 4, 768


def write_sparse_file(folder: Path, *, profiled: bool = True, layers: int = LAYERS) -> Path:
    """A dReLU model of random weights, hottest neurons first."""
    path = folder / "sparse.ncf"
    spec = shape_spec(
        "bamboo-7b", num_layers=layers, d_model=128, d_ff=NEURONS, num_heads=4, num_kv_heads=2,
        vocab_size=VOCAB,
    )  # fmt: skip
    for _ in synthesize(SynthSettings(spec, sparsity=0.85, seed=3, is_hot_first=True), path):
        pass
    if profiled:
        make_profile(path, random_prompt(1, "text", 512, VOCAB), PredictorSettings(rank=64))
    return path
