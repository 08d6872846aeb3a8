"""How sparse a dReLU model is and how well a low rank predicts its gates: docs/SYNTH.md's figures.

`python -m tests.bench.planted TWIN.gguf` gives a planted model random tokens;
`python -m tests.bench.planted MODEL.gguf --text FILE` gives a real one a text. The pass is in
float32, layer by layer: a 7B model takes minutes and 4 GiB.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from polyneuron.io.gguf_file import read_header
from polyneuron.model.tokenizer import Tokenizer
from polyneuron.synth.twin import SETTINGS_KEY
from tests.support.activity import (
    Activity,
    LayerRecord,
    RecordingModel,
    block_covariance,
    fit_gates,
    judge,
)
from tests.support.reference_model import Floats

RANK_FRACTIONS = (16, 8, 4, 2, 1)
"""Of the width."""
SEQUENCE_TOKENS = 1024
NUM_FIRST = 16
"""Tokens before attention has a window; they are left out."""
RIDGE = 1e-2
"""Of the mean variance, where one input is regressed on the other."""
HELD_OUT = 4
"""The last of so many parts."""


class DecodedWhenRead(dict[str, Floats]):
    """Weights of a file that is too big to be in memory as floats; none is kept."""

    def __init__(self, model: BigModel) -> None:
        super().__init__()
        self._model = model

    def __missing__(self, name: str) -> Floats:
        return self._model.decoded(name)


class BigModel(RecordingModel):
    """Decodes each matrix when it is needed and keeps none."""

    def _load(self, names: tuple[str, ...]) -> dict[str, Floats]:
        return DecodedWhenRead(self)


def sequences_of(path: Path, text: Path | None, num_tokens: int) -> list[Floats]:
    """Token ids, in sequences."""
    header = read_header(path)
    if text is None:
        vocabulary = len(header.metadata["tokenizer.ggml.tokens"])
        return [np.random.default_rng(0).integers(3, vocabulary, num_tokens)]
    tokens = np.array(Tokenizer.from_metadata(header.metadata).encode(text.read_text()))
    whole = min(num_tokens, len(tokens)) // SEQUENCE_TOKENS * SEQUENCE_TOKENS
    return list(tokens[:whole].reshape(-1, SEQUENCE_TOKENS))


def print_activity(layer_id: int, layer: Activity) -> None:
    """One row of the table."""
    by_token = layer.active.mean(axis=1)
    figures = {
        "active": by_token.mean(), "least": by_token.min(), "most": by_token.max(),
        "up with gate": layer.active.sum() / layer.gate_positive.sum(),
        "hottest 20 %": layer.carried_by(0.2), "hottest 50 %": layer.carried_by(0.5),
        "1 before": layer.overlap(1), "8 before": layer.overlap(8),
        "64 before": layer.overlap(64), "in any of 32": layer.in_any_of(32),
        "LRU of 1/2": layer.cached(0.5), "LRU of 1/4": layer.cached(0.25),
    }  # fmt: skip
    print(f"layer {layer_id}: " + ", ".join(f"{k} {v:.3f}" for k, v in figures.items()), flush=True)


def covariance_of(inputs: Floats, is_planted: bool) -> Floats:
    """(d_model, d_model) of the tokens' inputs (tokens, d_model)."""
    if is_planted:
        return block_covariance(inputs)
    centred = inputs - inputs.mean(axis=0)
    covariance: Floats = centred.T @ centred / len(centred)
    return covariance


def regression_of(source: Floats, target: Floats) -> Floats:
    """(d_model, d_model): target ~ regression @ source, both (tokens, d_model) without mean."""
    squares = source.T @ source
    squares[np.diag_indices_from(squares)] += RIDGE * np.trace(squares) / len(squares)
    solved: Floats = np.linalg.solve(squares, source.T @ target)
    return solved.T


@dataclass(frozen=True, slots=True)
class Inputs:
    """Of one layer, without their mean over the known tokens: (tokens, d_model)."""

    known: Floats
    held_out: Floats
    mean: Floats

    @classmethod
    def of(cls, sequences: list[Floats]) -> Inputs:
        """The last part is held out."""
        whole = np.concatenate([part[NUM_FIRST:] for part in sequences])
        num_known = len(whole) * (HELD_OUT - 1) // HELD_OUT
        mean = whole[:num_known].mean(axis=0)
        return cls(whole[:num_known] - mean, whole[num_known:] - mean, mean)


def print_ranks(weights: Floats, record: LayerRecord, is_planted: bool) -> None:
    """A line for each input and rank."""
    own, before = Inputs.of(record.inputs), Inputs.of(record.attention_inputs)
    means = weights @ own.mean
    gates = own.held_out @ weights.T + means
    print(f"  gates positive {(gates > 0).mean():.3f}")
    fits = {"feed forward's": (fit_gates(weights, covariance_of(own.known, is_planted)), own, 1.0)}
    if is_planted:  # Columns are alike, so one factor is the best regression.
        factor = float((before.known * own.known).sum() / np.square(before.known).sum())
        fits["attention's"] = (fits["feed forward's"][0], before, factor)
    else:
        through = weights @ regression_of(before.known, own.known)
        fit = fit_gates(through, covariance_of(before.known, is_planted))
        fits["attention's"] = (fit, before, 1.0)
    for name, (fit, inputs, factor) in fits.items():
        for fraction in RANK_FRACTIONS:
            rank = len(own.mean) // fraction
            found = judge(fit.predict(factor * inputs.held_out, rank) + means, gates, means)
            print(
                f"  {name} input, rank {rank}: variance {found.variance_share:.3f}, "
                f"recall {found.recall:.3f}, precision {found.precision:.3f}, "
                f"for recall 0.95 {found.predicted:.3f}",
                flush=True,
            )


def main() -> None:
    """Activity of all layers, then the ranks of some."""
    parser = argparse.ArgumentParser(description="Sparsity and rank of a dReLU model.")
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--layers", type=int, nargs="*", default=[0, 15, 31])
    parser.add_argument("--rank-layers", type=int, nargs="*", default=[15])
    args = parser.parse_args()
    is_planted = SETTINGS_KEY in read_header(args.model).metadata
    model = BigModel(args.model)
    for tokens in sequences_of(args.model, args.text, args.tokens):
        model.logits(tokens)
    for layer_id, record in enumerate(model.seen):
        by_token = record.activity[0].after(NUM_FIRST).active.mean(axis=1)
        print(f"layer {layer_id}: active {by_token.mean():.4f}")
    for layer_id in args.layers:
        print_activity(layer_id, model.seen[layer_id].activity[0].after(NUM_FIRST))
    for layer_id in args.rank_layers:
        print(f"layer {layer_id}", flush=True)
        weights = model.weights[model.names.layers[layer_id].ffn_gate or ""]
        print_ranks(weights, model.seen[layer_id], is_planted)


if __name__ == "__main__":
    main()
