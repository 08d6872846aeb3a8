"""The order in which a layer's bundles should lie: hottest first, the cold tail by company."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Bools = NDArray[np.bool_]
Order = NDArray[np.uint32]

TAIL_SHARE = 0.5
"""Of the neurons; those before are in memory and their neighbours do not matter."""
GROUP_NEURONS = 64
LEAST_USES = 4
"""A neuron that was active less often has shown no company."""
NUM_ROUNDS = 8


def hottest_first(counts: NDArray[np.integer]) -> Order:
    """Neurons by how often they were active; of equals the one that lies first."""
    return np.argsort(-counts.astype(np.int64), kind="stable").astype(np.uint32)


def bundle_order(active: Bools) -> Order:
    """The order of neurons for active (tokens, d_ff); entry i is the neuron that becomes number i.

    The hottest half by rate; of the rest those with a few uses in groups of at most 64 that tend to
    be active together, hottest group first; then the others by rate.
    """
    counts = np.count_nonzero(active, axis=0)
    order = hottest_first(counts)
    cut = len(order) - int(TAIL_SHARE * len(order))
    tail = order[cut:]
    known = tail[counts[tail] >= LEAST_USES]
    groups = split_by_company(active[:, known])
    rates = [float(counts[known[group]].mean()) for group in groups]
    in_groups = [known[groups[i]] for i in np.argsort(-np.array(rates), kind="stable")]
    rest = tail[counts[tail] < LEAST_USES]
    return np.concatenate([order[:cut], *in_groups, rest]).astype(np.uint32)


def split_by_company(active: Bools) -> list[NDArray[np.int64]]:
    """Groups of at most 64 columns of active (tokens, n), each ascending.

    A group is halved along the leading direction of its columns, centred and of equal length, again
    and again: columns that rise and fall together stay on one side.
    """
    columns = active.astype(np.float32)
    columns -= columns.mean(axis=0)
    columns /= np.maximum(np.linalg.norm(columns, axis=0), np.float32(1e-12))
    waiting, done = [np.arange(active.shape[1])], []
    while waiting:
        group = waiting.pop()
        if len(group) <= GROUP_NEURONS:
            if len(group):
                done.append(group)
            continue
        place = _leading(columns[:, group])
        ranked = group[np.argsort(place, kind="stable")]
        half = -(-len(group) // (2 * GROUP_NEURONS)) * GROUP_NEURONS
        waiting += [np.sort(ranked[half:]), np.sort(ranked[:half])]
    return done


def _leading(columns: NDArray[np.float32]) -> NDArray[np.float32]:
    """Each column's place along the leading direction of columns (tokens, n)."""
    rng = np.random.default_rng(0)
    place: NDArray[np.float32] = rng.standard_normal((columns.shape[1],), np.float32)
    for _ in range(NUM_ROUNDS):
        place = columns.T @ (columns @ place)
        place /= np.float32(max(float(np.linalg.norm(place)), 1e-30))
    return place
