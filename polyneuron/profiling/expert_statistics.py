"""What neurons of a layer of experts do over a text, and how often each expert is chosen."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from polyneuron.io.profile_file import BATCHES, LayerProfile
from polyneuron.profiling.expert_sample import ExpertLayer
from polyneuron.profiling.statistics import (
    CARRIED,
    carried_by,
    group_counts,
    overlap_counts,
    tail_coactivation,
)

Bools = NDArray[np.bool_]


def expert_layer_profile(layer: ExpertLayer) -> LayerProfile:
    """Count one layer; shares are those of all its neurons, chosen or not.

    Bundles keep the file's order: where a neuron's lies says nothing to a cache of single neurons.
    """
    active, gated, mean_abs, norms = [], [], [], []
    both = total = 0
    tails: list[tuple[float, float]] = []
    for found in layer.experts():
        on = _of_all_tokens(layer.num_tokens, found.tokens, found.sample.hidden != 0)
        opened = _of_all_tokens(layer.num_tokens, found.tokens, found.sample.gate > 0)
        active.append([group_counts(on, batch) for batch in BATCHES])
        gated.append([group_counts(opened, batch) for batch in BATCHES])
        mean_abs.append(np.abs(found.sample.hidden).sum(axis=0) / np.float32(layer.num_tokens))
        norms.append(found.sample.weights.down_norm)
        shared, all_of_them = overlap_counts(on, layer.starts)
        both, total = both + shared, total + all_of_them
        tails.append(tail_coactivation(found.sample.hidden != 0))
    counts = np.concatenate(active, axis=1)
    facts = _facts(layer, counts, np.concatenate(gated, axis=1), both / max(1, total))
    together, expected = np.mean(tails, axis=0)
    facts |= {"tail_together": float(together), "tail_expected": float(expected)}
    return LayerProfile(
        active=counts,
        gated=np.concatenate(gated, axis=1),
        mean_abs=np.concatenate(mean_abs),
        down_norm=np.concatenate(norms),
        order=np.arange(counts.shape[1], dtype=np.uint32),
        facts=facts,
    )


def _of_all_tokens(num_tokens: int, tokens: NDArray[np.intp], values: Bools) -> Bools:
    """values (n, d_ff) of some tokens -> (num_tokens, d_ff), False elsewhere."""
    spread = np.zeros((num_tokens, values.shape[1]), bool)
    spread[tokens] = values
    return spread


def _facts(
    layer: ExpertLayer,
    active: NDArray[np.uint32],
    gated: NDArray[np.uint32],
    overlap: float,
) -> dict[str, object]:
    """Figures of the whole layer."""
    rates = active[0] / layer.num_tokens
    shares = [
        len(layer.tokens_of(expert)) / layer.num_tokens for expert in range(layer.num_experts)
    ]
    ordered = np.sort(rates)[::-1]
    return {
        "active_share": float(rates.mean()),
        "gated_share": float(gated[0].mean()) / layer.num_tokens,
        "carried": {f"{share:.0%}": carried_by(ordered, share) for share in CARRIED},
        "batch_share": {
            str(batch): float(counts.sum()) / max(1, (layer.num_tokens // batch) * active.shape[1])
            for batch, counts in zip(BATCHES, active, strict=True)
        },
        "overlap": overlap,
        "overlap_by_chance": float(np.square(rates).sum() / max(float(rates.sum()), 1e-12)),
        "expert_shares": shares,
        "expert_overlap": expert_overlap(layer),
    }


def expert_overlap(layer: ExpertLayer) -> float:
    """Of a token's experts, those that the token before it has, too."""
    chosen = np.zeros((layer.num_tokens, layer.num_experts), bool)
    for expert in range(layer.num_experts):
        chosen[layer.tokens_of(expert), expert] = True
    both, total = overlap_counts(chosen, layer.starts)
    return both / max(1, total)
