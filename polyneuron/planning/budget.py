"""The memory budget: what a run takes, how many layers stay, what each token reads (DESIGN §7)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from polyneuron.config import DEFAULT_NUM_CTX, EngineConfig, usable_cores
from polyneuron.errors import ConfigError
from polyneuron.kernels.arena import MAX_EXECUTORS
from polyneuron.model.spec import ModelSpec
from polyneuron.planning.layout import ArenaLayout, plan_layout
from polyneuron.planning.source import ModelSource
from polyneuron.sizes import show_size

MIB = 1 << 20
RAY_BYTES = 90 * MIB
"""Ray's daemons: measured 70 to 100 MiB."""
DRIVER_BYTES = 130 * MIB
"""The driver with tokenizer and vocabulary: measured 110 to 130 MiB."""
ACTOR_BYTES = 38 * MIB
"""Private memory of an actor once it works: measured 32 to 38 MiB."""
OTHER_ACTORS = 4  # coordinator, NPU executor, I/O actor, cache actor
HEADROOM_SHARE = 0.02
"""Of the budget, left free: page tables, sockets, what grows while running."""


def resolve_config(config: EngineConfig, spec: ModelSpec) -> EngineConfig:
    """Fill in what was left automatic, and refuse what the model or the arena cannot do."""
    if config.num_ctx > spec.context_length:
        raise ConfigError(
            f"-c {config.num_ctx}: the model was trained for {spec.context_length} positions; "
            f"give at most that"
        )
    workers = config.num_workers or min(len(usable_cores()), MAX_EXECUTORS // 2)
    automatic = max(0, min(workers, MAX_EXECUTORS - workers))
    npu_threads = automatic if config.num_npu_threads < 0 else config.num_npu_threads
    if workers + npu_threads > MAX_EXECUTORS:
        raise ConfigError(
            f"{workers} workers and {npu_threads} NPU threads: there are places for "
            f"{MAX_EXECUTORS} of both together"
        )
    return replace(
        config,
        num_ctx=config.num_ctx or min(spec.context_length, DEFAULT_NUM_CTX),
        num_workers=workers,
        num_npu_threads=npu_threads,
    )


def private_estimate(config: EngineConfig) -> int:
    """Bytes outside the arena, before anything is started; a run measures them."""
    actors = OTHER_ACTORS + config.num_workers
    return RAY_BYTES + DRIVER_BYTES + actors * ACTOR_BYTES


@dataclass(frozen=True, slots=True)
class Budget:
    """A layout inside a limit, with its account in bytes."""

    limit_bytes: int
    private_bytes: int
    """Ray's daemons, actors and driver outside the arena."""
    layout: ArenaLayout
    num_resident: int
    num_layers: int

    @property
    def total_bytes(self) -> int:
        """All that is expected to be taken."""
        return self.private_bytes + self.layout.num_bytes

    @property
    def streamed_bytes(self) -> int:
        """Bytes read from the file for each forward pass."""
        return sum(place.section.num_bytes for place in self.layout.streamed)

    @property
    def resident_ffn_fraction(self) -> float:
        """Share of the feed-forward bytes that stay in memory."""
        layers = self.layout.sections[1:]
        total = sum(place.section.num_bytes for place in layers)
        return 1.0 - self.streamed_bytes / total if total else 1.0

    def rows(self) -> list[tuple[str, int]]:
        """The table: what, bytes."""
        spans = self.layout.spans
        named = ("fixed", "hot", "stage", "kv")
        others = self.layout.num_bytes - sum(spans[name].num_bytes for name in named)
        return [
            ("fixed weights (embeddings, attention, norms, head)", spans["fixed"].num_bytes),
            (f"resident feed-forward layers ({self.num_resident} of {self.num_layers})",
             spans["hot"].num_bytes),
            ("stage buffers for streamed layers", spans["stage"].num_bytes),
            ("KV cache", spans["kv"].num_bytes),
            ("activations, step boards, mailboxes, scratch", others),
            ("Ray and Python (measured once running)", self.private_bytes),
            ("headroom", self.limit_bytes - self.total_bytes),
        ]  # fmt: skip


def fit(source: ModelSource, config: EngineConfig, limit_bytes: int, private_bytes: int) -> Budget:
    """The layout with the most resident layers inside the limit.

    `config.ffn_resident` lowers that number. Raises ConfigError that names the minimum when not
    even streaming every layer fits.
    """
    manifest, spec = source.manifest, source.spec
    room = int(limit_bytes * (1 - HEADROOM_SHARE)) - private_bytes
    most = _most_wanted(spec, config)
    low, high = -1, most
    while low < high:  # bytes grow with the number of resident layers, but for the last step
        middle = (low + high + 1) // 2
        if plan_layout(manifest, spec, config, middle).num_bytes <= room:
            low = middle
        else:
            high = middle - 1
    if low < most and plan_layout(manifest, spec, config, most).num_bytes <= room:
        low = most  # without streamed layers there are no stage buffers
    if low < 0:
        least = plan_layout(manifest, spec, config, 0).num_bytes + private_bytes
        raise ConfigError(
            f"--memory {show_size(limit_bytes)}: this model needs at least "
            f"{show_size(int(least / (1 - HEADROOM_SHARE)) + MIB)} with context {config.num_ctx}; "
            f"give more, or a smaller context with -c"
        )
    layout = plan_layout(manifest, spec, config, low)
    return Budget(limit_bytes, private_bytes, layout, low, spec.num_layers)


def _most_wanted(spec: ModelSpec, config: EngineConfig) -> int:
    if config.ffn_resident is None:
        return spec.num_layers
    return int(config.ffn_resident * spec.num_layers + 0.5)
