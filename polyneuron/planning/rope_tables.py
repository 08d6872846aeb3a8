"""The rotary tables of a model in the arena: one for all layers, or a second for local ones."""

import numpy as np

from polyneuron.kernels.arena import Arena
from polyneuron.model.rope import rope_rows
from polyneuron.model.spec import ModelSpec, RopeSpec
from polyneuron.planning.layout import ArenaLayout


def rope_tables(spec: ModelSpec) -> dict[str, RopeSpec]:
    """The model's rotary embeddings by the names of their tables in the fixed region."""
    tables = {"rope": spec.rope, "local_rope": spec.local_rope}
    return {name: rope for name, rope in tables.items() if rope and rope.rotary_dim}


def write_rope(arena: Arena, spec: ModelSpec, layout: ArenaLayout) -> None:
    """Fill the tables for every position of a context."""
    num_ctx = layout.config.num_ctx
    for name, rope in rope_tables(spec).items():
        shape = (num_ctx, rope.rotary_dim)
        arena.view(layout.at(f"fixed.{name}"), shape, np.float32)[:] = rope_rows(rope, num_ctx)
