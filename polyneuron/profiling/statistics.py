"""What neurons of a layer do over a text: how often, how much, and with whom."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from polyneuron.io.profile_file import BATCHES, LayerProfile
from polyneuron.profiling.neuron_order import bundle_order
from polyneuron.profiling.sample import LayerSample

Bools = NDArray[np.bool_]
CARRIED = (0.1, 0.2, 0.3, 0.5)
"""Shares of the hottest neurons whose part of all activations is told."""
TAIL_SHARE = 0.5
"""Of the neurons, the coldest: where co-activation is looked at."""


def layer_profile(sample: LayerSample) -> LayerProfile:
    """Count one layer."""
    active, gated = sample.hidden != 0, sample.needed
    rates = np.sort(active.mean(axis=0))[::-1]
    together, expected = tail_coactivation(active)
    overlap, by_chance = overlap_of(active, sample.starts)
    return LayerProfile(
        active=np.stack([group_counts(active, batch) for batch in BATCHES]),
        gated=np.stack([group_counts(gated, batch) for batch in BATCHES]),
        mean_abs=np.abs(sample.hidden).mean(axis=0),
        down_norm=sample.weights.down_norm,
        order=bundle_order(active),
        facts={
            "active_share": float(active.mean()),
            "gated_share": float(gated.mean()),
            "carried": {f"{share:.0%}": carried_by(rates, share) for share in CARRIED},
            "batch_share": {
                str(batch): float(group_counts(active, batch).sum())
                / max(1, (len(active) // batch) * active.shape[1])
                for batch in BATCHES
            },
            "overlap": overlap,
            "overlap_by_chance": by_chance,
            "tail_together": together,
            "tail_expected": expected,
        },
    )


def group_counts(active: Bools, batch: int) -> NDArray[np.uint32]:
    """In how many groups of `batch` tokens some token activates each neuron: (d_ff).

    The tokens of a group are far apart in the text, as those of several clients are. Tokens that
    fill no group are left out.
    """
    groups = len(active) // batch
    parts = active[: groups * batch].reshape(batch, groups, active.shape[1])
    counts: NDArray[np.uint32] = np.count_nonzero(parts.any(axis=0), axis=0).astype(np.uint32)
    return counts


def carried_by(rates: NDArray[np.float64], share: float) -> float:
    """The part of all activations that the first `share` of the neurons carry."""
    total = float(rates.sum())
    return float(rates[: int(share * len(rates))].sum()) / total if total else 0.0


def overlap_of(active: Bools, starts: Sequence[int]) -> tuple[float, float]:
    """The part of a token's active neurons that the token before it activates, too.

    And the part that would be, if tokens had only the neurons' rates in common. The first tokens of
    sequences are not counted.
    """
    both, total = overlap_counts(active, starts)
    rates = active.mean(axis=0)
    by_chance = float(np.square(rates).sum() / max(float(rates.sum()), 1e-12))
    return both / max(1, total), by_chance


def overlap_counts(active: Bools, starts: Sequence[int]) -> tuple[int, int]:
    """Active neurons (tokens, n) that the token before activates, too, and all of them."""
    follows = np.ones(len(active), bool)
    follows[list(starts)] = False
    rows = np.flatnonzero(follows)
    both = sum(int(np.count_nonzero(active[row] & active[row - 1])) for row in rows)
    return both, sum(int(np.count_nonzero(active[row])) for row in rows)


def tail_coactivation(active: Bools) -> tuple[float, float]:
    """Of the coldest half: mean of P(j active | i active) over all pairs, and of P(j active).

    The sum over pairs is one over tokens: each adds what its active neurons weigh times how many
    there are, so that all pairs are counted at the cost of one pass.
    """
    counts = np.count_nonzero(active, axis=0)
    coldest = np.argsort(counts, kind="stable")[: int(TAIL_SHARE * len(counts))]
    seen = coldest[counts[coldest] > 0]
    if len(seen) < 2:
        return 0.0, 0.0
    tail = active[:, seen].astype(np.float32)
    weight = 1.0 / counts[seen]
    pairs = float((tail @ weight) @ tail.sum(axis=1, dtype=np.float64)) - len(seen)
    expected = float((counts[seen] / len(active)).mean())
    return pairs / (len(seen) * (len(seen) - 1)), expected
