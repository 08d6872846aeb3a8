"""Up to which length a prompt is cheaper neuron by neuron than layer by layer.

A decode program reads the neurons that some token needs and that are not in memory; a prefill
program reads every layer that is not wholly there, in order. The first grows with the tokens, the
second hardly: `sparse_tokens` is where they meet (docs/PLANNING.md).
"""

from __future__ import annotations

from dataclasses import dataclass

from polyneuron.config import MAX_SPARSE_TOKENS
from polyneuron.planning.bundles import PIECE_BYTES
from polyneuron.planning.cost_model import (
    DENSE,
    IN_ORDER,
    CostModel,
    Knobs,
    Prices,
    balanced,
    shared,
)
from polyneuron.planning.device import Kernel
from polyneuron.planning.work import RowWork

PACKING = 0.3
"""Bytes a second at which rows become tiles, by those of a plain read. Measured: 7 of 25 GB/s."""


@dataclass(frozen=True, slots=True)
class PromptCost:
    """One chunk of a prompt on a device; times are nanoseconds of wall time."""

    model: CostModel
    knobs: Knobs
    stream_bytes: int
    """Read in order for each chunk by the prefill program."""

    def sparse_ns(self, tokens: int) -> float:
        """By the decode program: a step of so many tokens."""
        return self.model.step(self.knobs, tokens).total_ns

    def ordered_ns(self, tokens: int) -> float:
        """By the prefill program. Its first piece is waited for: nothing is read ahead of it."""
        work, knobs, device = self.model.work, self.knobs, self.model.device
        prices = self.model.prices(knobs, tokens)
        layer_ns = prices.attention_ns + self._feed_forward_ns(prices, tokens)
        compute_ns = balanced(work.num_layers * layer_ns + prices.head_ns, knobs.workers)
        compute_ns += prices.outside_ns + work.num_layers * prices.handoffs_ns
        compute_ns += work.num_layers * prices.position_ns * self.model.positions * tokens
        if not self.stream_bytes:
            return compute_ns
        reads = device.layer_reads()
        rate = reads.reads_per_s * reads.read_bytes
        cpu_ns = self.stream_bytes / reads.read_bytes * reads.cpu_ns
        computed_ns = shared(compute_ns, cpu_ns, knobs.workers, device.num_cores)
        first_ns = min(PIECE_BYTES, self.stream_bytes) * 1e9 / rate
        return first_ns + max(computed_ns, self.stream_bytes * 1e9 / rate)

    def _feed_forward_ns(self, prices: Prices, tokens: int) -> float:
        """One layer's kernels, without the wait for whoever has claimed last."""
        rows = self.model.work.rows
        if rows is None:
            return prices.feed_forward_ns
        down_ns = tokens * self._added(rows) * prices.down_ns / IN_ORDER
        return prices.decide_ns + self._up_ns(rows, tokens) + down_ns

    def _up_ns(self, rows: RowWork, tokens: int) -> float:
        """Up rows of all neurons become tiles and are multiplied."""
        num_bytes = rows.num_neurons * rows.up_row
        if not num_bytes:
            return 0.0
        tiles = self._rate(Kernel.TILES, rows.up_type, rows.cols, tokens)
        packing = PACKING * self._rate(Kernel.MEMORY, rows.up_type, rows.cols)
        return num_bytes * 1e9 * (1.0 / tiles + 1.0 / packing)

    def _added(self, rows: RowWork) -> float:
        """Down rows of a layer that a token adds."""
        hotness = self.model.hotness
        if self.knobs.mode == DENSE or hotness is None:
            return rows.num_neurons
        return hotness.needed() * hotness.active_share * rows.num_neurons

    def _rate(self, kernel: Kernel, storage: str, cols: int, tokens: int = 1) -> float:
        device = self.model.device
        return device.kernel_bytes_per_s(kernel, storage, cols, self.knobs.workers, tokens)

    def sparse_tokens(self) -> int:
        """The longest prompt that, as all shorter ones, is cheaper by the decode program."""
        for tokens in range(1, MAX_SPARSE_TOKENS + 1):
            if self.sparse_ns(tokens) > self.ordered_ns(tokens):
                return tokens - 1
        return MAX_SPARSE_TOKENS
