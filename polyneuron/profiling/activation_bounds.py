"""Finds bounds under which activations of a SiLU model may count as zero (PAPER §5; CATS).

A layer's bound is a quantile of |act(gate)| over a text, the same share of neurons in every layer.
Which share costs how much is measured, not supposed: all shares run side by side over another part
of the text, layer by layer, each with its own hidden states, and their perplexities are compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from polyneuron.errors import ConfigError
from polyneuron.io.ncf_format import Layout
from polyneuron.io.ncf_reader import NcfFile
from polyneuron.io.profile_file import ActivationBounds
from polyneuron.kernels.gemv import feed_forward_act
from polyneuron.model.spec import ModelSpec
from polyneuron.planning.source import check_boundable
from polyneuron.profiling.calibration import MIN_TOKENS, embed
from polyneuron.profiling.layer_run import LayerRun
from polyneuron.profiling.layer_weights import layer_weights
from polyneuron.profiling.next_token import NextToken
from polyneuron.profiling.sample import check_finite

F32 = NDArray[np.float32]

SHARES = tuple(round(0.05 * step, 2) for step in range(4, 19))
"""Of neurons that count as zero: those that are tried. Fewer than the first save next to nothing:
gates are computed in any case, and what is left out is no longer read in order."""
DEFAULT_COST = 0.01
"""Of perplexity, what bounds may cost."""

Progress = Callable[[int, int], None]


def activations_of(spec: ModelSpec, deciding: F32) -> F32:
    """|act(deciding)| as the kernels compute it, of any shape."""
    flat = np.ascontiguousarray(deciding).reshape(-1)
    acted = feed_forward_act(spec.feed_forward, flat, np.ones_like(flat))
    return np.abs(acted).reshape(deciding.shape)


def find_bounds(
    ncf: NcfFile,
    spec: ModelSpec,
    sequences: Sequence[Sequence[int]],
    max_cost: float,
    progress: Progress = lambda done, total: None,
) -> ActivationBounds:
    """The largest bounds whose perplexity is at most `max_cost` of itself higher.

    The first half of each sequence chooses them, the second half pays. `progress` gets tokens times
    layers.
    `ncf` is what `check_bounds_wanted` lets pass. Raises ConfigError for a text that is too short,
    and where they save nothing.
    """
    halves = [_halves(sequence) for sequence in sequences]
    chosen_by = [half for half, _ in halves]
    tried = _Tried(ncf, spec, [paid for _, paid in halves])
    streams = [_embedded(ncf, spec, half) for half in chosen_by]
    num_tokens = sum(len(sequence) for sequence in sequences)
    longest = max(len(half) for pair in halves for half in pair)
    for layer in range(spec.num_layers):
        with LayerRun(ncf, spec, layer, longest) as run:
            tried.run_layer(run, _quantiles(run, streams))
        progress((layer + 1) * num_tokens, spec.num_layers * num_tokens)
    return tried.best(max_cost)


def check_bounds_wanted(ncf: NcfFile, spec: ModelSpec) -> None:
    """ConfigError for a file that threshold mode cannot run."""
    check_boundable(spec)
    if ncf.manifest.layout is not Layout.BUNDLES:
        raise ConfigError(
            f"{ncf.path}: --threshold needs bundles, and it keeps its feed-forward weights as "
            f"tiles; give the GGUF it was made of, or convert that with --layout bundles"
        )


def _halves(sequence: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
    if len(sequence) < 2 * MIN_TOKENS:
        raise ConfigError(
            f"--threshold needs at least {2 * MIN_TOKENS} tokens of text, this has "
            f"{len(sequence)}: give a longer one with --text"
        )
    return sequence[: len(sequence) // 2], sequence[len(sequence) // 2 :]


def _embedded(ncf: NcfFile, spec: ModelSpec, tokens: Sequence[int]) -> F32:
    return embed(ncf, spec, np.asarray(tokens, np.int64))


def _quantiles(run: LayerRun, streams: list[F32]) -> F32:
    """Run dense streams through a layer; the activations that SHARES of the neurons do not reach
    (shares)."""
    normed = []
    for stream in streams:
        run.attention(stream)
        normed.append(run.feed_forward(stream)[0])
    gates = layer_weights(run).deciding.product(np.concatenate(normed))
    check_finite(run.source.path, run.layer_id, "gate values", gates)
    found: F32 = np.quantile(activations_of(run.spec, gates), SHARES).astype(np.float32)
    return found


@dataclass(slots=True)
class _Tried:
    """What every share comes to: without any first, then SHARES."""

    ncf: NcfFile
    spec: ModelSpec
    texts: list[Sequence[int]]
    bounds: list[F32] = field(default_factory=list)
    """Of each layer so far (shares)."""
    streams: list[list[F32]] = field(init=False)
    """Of each share, those of the texts."""

    def __post_init__(self) -> None:
        begun = [_embedded(self.ncf, self.spec, text) for text in self.texts]
        self.streams = [[stream.copy() for stream in begun] for _ in (0.0, *SHARES)]

    def run_layer(self, run: LayerRun, bounds: F32) -> None:
        self.bounds.append(bounds)
        for bound, streams in zip((0.0, *bounds), self.streams, strict=True):
            run.cut(float(bound))
            for stream in streams:
                run.attention(stream)
                run.feed_forward(stream)

    def best(self, max_cost: float) -> ActivationBounds:
        head = NextToken(self.ncf, self.spec)
        dense, *ppls = [self._ppl(head, streams) for streams in self.streams]
        allowed = [ppl <= dense * (1.0 + max_cost) for ppl in ppls]
        count = allowed.index(False) if False in allowed else len(allowed)
        if not count:
            raise ConfigError(
                f"{self.ncf.path}: counting {SHARES[0]:.0%} of the neurons as zero raises "
                f"perplexity by {ppls[0] / dense - 1:.1%}, more than --max-cost {max_cost:g}: "
                f"fewer would save nothing, so this model is best run with --mode dense"
            )
        values = tuple(float(bounds[count - 1]) for bounds in self.bounds)
        return ActivationBounds(values, SHARES[count - 1], ppls[count - 1], dense)

    def _ppl(self, head: NextToken, streams: list[F32]) -> float:
        scored = [
            head.log_probs(stream, tokens)
            for stream, tokens in zip(streams, self.texts, strict=True)
        ]
        return math.exp(-float(np.concatenate(scored).mean()))
