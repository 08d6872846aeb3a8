"""What the real actors run in place of a model that a test machine does not have."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from polyneuron.backends.spec import parse_npu
from polyneuron.config import FeedForwardMode
from polyneuron.scenarios.script_table import ScriptTable

REPLAY_KEYS = (
    "model", "layers", "hidden", "neurons", "heads", "kv_heads", "vocab", "active", "memory",
    "ffn_resident", "mode", "workers", "npu_threads", "npu",
)  # fmt: skip
SHAPE_KEYS = ("layers", "hidden", "neurons", "heads", "kv_heads", "vocab", "active")
MAX_COUNT = 1 << 20


@dataclass(frozen=True, slots=True)
class ReplaySettings:
    """The `[replay]` table: a file, or the shape of a small sparse model written on the spot."""

    model: Path | None = None
    layers: int = 6
    hidden: int = 128
    """Width of the residual stream."""
    neurons: int = 384
    """Of each layer."""
    heads: int = 4
    kv_heads: int = 2
    vocab: int = 512
    active: float = 0.1
    """Share of neurons that a token activates."""
    memory_bytes: int | None = None
    """In place of `[engine] memory`; None: that one, if there is no `ffn_resident` here."""
    ffn_resident: float | None = None
    """In place of `[engine] ffn_resident`; None: that one."""
    mode: FeedForwardMode | None = None
    """In place of `[engine] mode`; None: that one."""
    workers: int = 0
    """CPU workers; 0: as many as the machine has cores. `[engine] workers` is the device's."""
    npu_threads: int = -1
    """Of the NPU executor; -1: one for each worker."""
    npu: str = "native"
    """Its back end, as `--npu` has it: also a modelled device with limits, or one that fails."""

    @classmethod
    def from_table(cls, table: ScriptTable, folder: Path) -> ReplaySettings:
        """The table; `folder` is where a path counts from."""
        table.only(REPLAY_KEYS)
        if table.has("memory") and table.has("ffn_resident"):
            table.refuse("ffn_resident", "memory is given too; leave one out")
        if table.has("model"):
            for key in SHAPE_KEYS:
                if table.has(key):
                    table.refuse(key, "the file that model names has its own; leave one out")
        plain = cls()
        parse_npu(npu := table.text("npu", plain.npu), f"{table.where}: {table.key_path('npu')}:")
        has_share, has_mode = table.has("ffn_resident"), table.has("mode")
        return cls(
            model=folder / table.text("model") if table.has("model") else None,
            **{
                key: table.whole(key, getattr(plain, key), 1, MAX_COUNT)
                for key in SHAPE_KEYS
                if key != "active"
            },
            active=table.number("active", plain.active, 0.0, 1.0),
            memory_bytes=table.size("memory") if table.has("memory") else None,
            ffn_resident=table.number("ffn_resident", None, 0.0, 1.0) if has_share else None,
            mode=table.choice("mode", FeedForwardMode) if has_mode else None,
            workers=table.whole("workers", plain.workers, 0, 1024),
            npu_threads=table.whole("npu_threads", plain.npu_threads, -1, 1024),
            npu=npu,
        )
