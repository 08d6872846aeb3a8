"""Ops of feed-forward blocks whose matrices lie in tiles: gate, up and activation, then down."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from polyneuron.kernels.arena import OpKind
from polyneuron.planning.layout import WeightPlace

if TYPE_CHECKING:
    from polyneuron.planning.step_program import Compiler


def tile_readers(compiler: Compiler, layer: int) -> list[WeightPlace]:
    """The matrices that read feed forward's norm."""
    names = [f"blk.{layer}.ffn_{part}.weight" for part in ("gate", "up")]
    return [compiler.weight(name) for name in names if name in compiler.layout.weights]


def add_tile_feed_forward(compiler: Compiler, layer: int) -> None:
    """Append a layer's norm and its block."""
    compiler.ffn_norm(layer, tile_readers(compiler, layer))
    add_tile_block(compiler, layer)


def add_tile_block(
    compiler: Compiler, layer: int, suffix: str = "", hidden: str = "hidden", **values: Any
) -> None:
    """Append gate, up and down; `values`: more fields of the down product."""
    prefix = f"blk.{layer}."
    up = compiler.weight(f"{prefix}ffn_up{suffix}.weight")
    down = compiler.weight(f"{prefix}ffn_down{suffix}.weight")
    gate = compiler.layout.weights.get(f"{prefix}ffn_gate{suffix}.weight")
    readers = [place for place in (gate, up) if place]
    if len({place.takes_acts for place in readers}) > 1:
        raise AssertionError("gate and up of one layer are stored alike")
    compiler.add(
        kind=OpKind.FEED_FORWARD, layer=layer, unit=compiler.dense_unit, rows=up.rows, cols=up.cols,
        weight=gate.offset if gate else 0, weight_type=int(gate.storage or 0) if gate else 0,
        up_weight=up.offset, up_type=int(up.storage or 0), stream_index=up.stream_index,
        bias=compiler.vector(f"{prefix}ffn_gate{suffix}.bias"),
        up_bias=compiler.vector(f"{prefix}ffn_up{suffix}.bias"),
        activation=int(compiler.spec.feed_forward), **compiler.source(compiler.ffn_input, up),
        **compiler.outputs(hidden, [down]),
    )  # fmt: skip
    post_norm = compiler.names.layers[layer].post_ffn_norm
    bias = f"{prefix}ffn_down{suffix}.bias"
    compiler.residual(layer, down, hidden, bias, post_norm, **values)
