"""How a scenario runs its model: policy, memory and the settings of an engine."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from polyneuron.config import MAX_QUEUE_DEPTH, FeedForwardMode
from polyneuron.scenarios.script_table import ScriptTable

ENGINE_KEYS = (
    "policy", "memory", "ffn_resident", "mode", "context", "workers", "max_tokens", "max_sequences",
    "queue_depth", "hot_shares", "deterministic",
)  # fmt: skip


class Policy(StrEnum):
    """Who runs the model; the ladder's rungs each keep what those before them brought."""

    MMAP = "mmap"
    """The whole file mapped, pages evicted as the operating system does."""
    LLMFLASH = "llmflash"
    """Bundles, a window of recent neurons, a matrix barrier (LLM in a flash)."""
    BASELINE = "baseline"
    """Whole layers streamed from flash."""
    BUNDLES = "bundles"
    """Single neurons are read, none is kept."""
    CACHE = "cache"
    """Neurons are kept; a matrix waits for all its reads."""
    PIPELINE = "pipeline"
    """Clusters compute as soon as their own rows are there."""
    POWERINFER2 = "powerinfer2"
    """Hot clusters dense beside the cold ones."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Settings under `[engine]`; counts as in EngineConfig."""

    policy: Policy = Policy.POWERINFER2
    memory_bytes: int = 0
    """All it may take; 0: what the device has."""
    ffn_resident: float | None = None
    """At most this share of feed forward in memory, 0 to 1; None: all that fits."""
    mode: FeedForwardMode = FeedForwardMode.AUTO
    num_ctx: int = 4096
    num_workers: int = 0
    """0: one for each compute core of the device."""
    max_tokens: int = 512
    """Tokens of one prefill chunk."""
    max_sequences: int = 4
    queue_depth: int = 32
    hot_shares: tuple[float, ...] = ()
    """Share of a layer's neurons that are hot with 1, 2, … sequences; the last holds for more.
    Empty: the planner's choice."""
    deterministic: bool = True

    @classmethod
    def from_table(cls, table: ScriptTable) -> EngineSettings:
        """The `[engine]` table."""
        table.only(ENGINE_KEYS)
        if table.has("memory") and table.has("ffn_resident"):
            table.refuse("ffn_resident", "memory is given too; leave one out")
        plain = cls()
        return cls(
            policy=table.choice("policy", Policy, plain.policy),
            memory_bytes=table.size("memory"),
            ffn_resident=table.number("ffn_resident", 0, 0, 1)
            if table.has("ffn_resident")
            else None,
            mode=table.choice("mode", FeedForwardMode, plain.mode),
            num_ctx=table.whole("context", plain.num_ctx, 1, 1 << 20),
            num_workers=table.whole("workers", plain.num_workers, 0, 1024),
            max_tokens=table.whole("max_tokens", plain.max_tokens, 1, 1 << 20),
            max_sequences=table.whole("max_sequences", plain.max_sequences, 1, 1024),
            queue_depth=table.whole("queue_depth", plain.queue_depth, 1, MAX_QUEUE_DEPTH),
            hot_shares=_shares(table),
            deterministic=table.flag("deterministic", plain.deterministic),
        )


def _shares(table: ScriptTable) -> tuple[float, ...]:
    shares = table.words("hot_shares")
    for share in shares:
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
            table.refuse("hot_shares", f"holds {share!r}: give numbers from 0 to 1")
    return tuple(float(share) for share in shares)
