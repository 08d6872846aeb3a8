"""What an engine is opened with, and the one place that reads the environment."""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from polyneuron.errors import ConfigError
from polyneuron.timeline_events import TraceDetail

ENV_PREFIX = "POLYNEURON_"
DEFAULT_NUM_CTX = 4096
MAX_QUEUE_DEPTH = 1024
MAX_SPARSE_TOKENS = 64
"""Each takes a partial sum of every cluster of a layer: on a 7B 0.5 MiB."""
DEFAULT_LOGIT_ROWS = 8
DEFAULT_REQUESTS = 64


class Phase(StrEnum):
    """What the engine is doing."""

    IDLE = "idle"
    PREFILL = "prefill"
    DECODE = "decode"


class FeedForwardMode(StrEnum):
    """What a feed-forward block computes (DESIGN §6)."""

    AUTO = "auto"
    """Exact where the file allows it, else dense."""
    DENSE = "dense"
    """Every neuron."""
    EXACT = "exact"
    """Every gate; up and down of the neurons whose gate is not zero: the same result."""
    PREDICTED = "predicted"
    """The neurons a predictor names, and the hot ones; those it misses are lost."""
    THRESHOLD = "threshold"
    """Every gate; neurons whose activation is within a bound count as zero: for SiLU models."""


class KvType(StrEnum):
    """What keys and values are stored as; q8 and q4 in blocks of 32 with an f16 scale."""

    F16 = "f16"
    Q8 = "q8"
    Q4 = "q4"


ENUMERATED: dict[str, type[StrEnum]] = {
    "mode": FeedForwardMode, "trace_detail": TraceDetail, "kv_type": KvType,
}  # fmt: skip
"""Fields of EngineConfig that a member's name will do for."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Sizes of one engine; every count is at least 1 unless told otherwise."""

    num_ctx: int = 0
    """Positions of one sequence; 0: the model's own context, at most 4096."""
    num_workers: int = 0
    """CPU workers; 0: one for each physical core that is fast, or for each of `cores`."""
    num_npu_threads: int = -1
    """Threads of the NPU executor's native back end in prefill; -1: one for each worker."""
    npu: str = "native"
    """Who computes dense matrices in prefill: native, openvino[:DEVICE] or none (docs/NPU.md)."""
    cores: tuple[int, ...] = ()
    """Cores that executors and the I/O actor keep to; empty: all that this process may use."""
    io_cores: tuple[int, ...] = ()
    """Cores to read from, the best first: the I/O actor keeps to the first without a worker."""
    kv_type: KvType = KvType.F16
    """What keys and values are stored as; its name as a string will do."""
    max_tokens: int = 512
    """Tokens of one prefill chunk."""
    max_sequences: int = 4
    """Sequences that run at once; the KV cache holds this many full contexts."""
    max_requests: int = DEFAULT_REQUESTS
    """Requests accepted at once, running and waiting; one more is refused."""
    max_logit_rows: int = DEFAULT_LOGIT_ROWS
    """Rows of logits a step may give; `perplexity` asks for more."""
    memory_bytes: int = 0
    """All the product may take, Ray included; 0: what machine and cgroup leave."""
    ffn_resident: float | None = None
    """At most this share of the feed-forward layers in memory, 0 to 1; None: all that fit."""
    sparse_prompt_tokens: int | None = None
    """Prompts, or what is left of one after whole chunks, of at most so many tokens are computed as
    decode steps are, where only the neurons that are needed are read, 0 to 64; longer ones read
    every layer in order. None: `max_sequences`. Predicted mode takes single tokens only."""
    mode: FeedForwardMode = FeedForwardMode.AUTO
    """What feed-forward blocks compute; its name as a string will do."""
    bounds: tuple[float, ...] = ()
    """Threshold mode: each layer's bound, from the model's profile."""
    hot_clusters: tuple[int, ...] = ()
    """Predicted mode: clusters of each layer, from the first on, that are computed without being
    predicted, in steps of 1, 2, … tokens; the last one holds for more tokens too. The most of them
    stay in memory. In a file ordered by hotness they are the hottest."""
    hot_on_npu: bool = False
    """Predicted mode: hot clusters are the NPU executor's, else the CPU workers' too."""
    lookahead: bool = True
    """Predicted mode: order missing rows before attention is computed, not after it."""
    matrix_barrier: bool = False
    """Predicted mode: compute no cluster before the rows of all have landed; to compare with."""
    keep_neurons: bool = True
    """Predicted mode: whether the neuron cache keeps rows for later tokens; no: to compare with."""
    trace: str | None = None
    """The file a timeline is written to (docs/TIMELINE.md); None: none is."""
    trace_detail: TraceDetail = TraceDetail.AUTO
    """Which steps of a timeline have records of ops, clusters and reads."""
    deterministic: bool = False
    """Hash every step's logits; in memory the result is deterministic in any case."""
    queue_depth: int = 32
    """Reads of missed neurons under way at once, 1 to 1024."""

    def __post_init__(self) -> None:
        for key, kind in ENUMERATED.items():
            object.__setattr__(self, key, _member_of(kind, key, getattr(self, key)))
        if self.ffn_resident is not None and not 0 <= self.ffn_resident <= 1:
            raise ConfigError(f"ffn_resident is {self.ffn_resident}: must be 0 to 1, or None")
        if any(count < 0 for count in self.hot_clusters):
            raise ConfigError(f"hot_clusters is {self.hot_clusters}: each must be 0 or more")
        for name in ("num_ctx", "num_workers"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} is {getattr(self, name)}: must be 0 (automatic) or more")
        for name in ("max_tokens", "max_sequences", "max_requests", "max_logit_rows"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}: must be at least 1")
        if not 1 <= self.queue_depth <= MAX_QUEUE_DEPTH:
            raise ConfigError(f"queue_depth is {self.queue_depth}: must be 1 to {MAX_QUEUE_DEPTH}")
        if self.sparse_prompt_tokens is not None:
            check_whole("sparse_prompt_tokens", self.sparse_prompt_tokens, 0, MAX_SPARSE_TOKENS)
        for name in ("max_tokens", "max_logit_rows"):
            if getattr(self, name) < self.max_sequences:
                raise ConfigError(
                    f"{name} is {getattr(self, name)}: a decode step of max_sequences "
                    f"{self.max_sequences} needs as many"
                )

    @property
    def sparse_tokens(self) -> int:
        """The most tokens of a prompt that a decode program computes."""
        wanted = self.sparse_prompt_tokens
        most = min(self.max_sequences if wanted is None else wanted, self.max_tokens)
        return min(most, 1) if self.mode is FeedForwardMode.PREDICTED else most

    @property
    def decode_tokens(self) -> int:
        """The most tokens of a step of a decode program."""
        return max(self.max_sequences, self.sparse_tokens)

    def hot_for(self, num_tokens: int) -> int:
        """Hot clusters of each layer in a step of so many tokens."""
        if not self.hot_clusters:
            return 0
        return self.hot_clusters[min(num_tokens, len(self.hot_clusters)) - 1]


def _member_of(kind: type[StrEnum], key: str, value: str) -> StrEnum:
    try:
        return kind(value)
    except ValueError:
        names = ", ".join(kind)
        raise ConfigError(f"{key} is {value!r}: must be one of {names}") from None


def check_whole(name: str, value: Any, low: int, high: int | None) -> None:
    """Raise ConfigError unless value is a whole number between the bounds."""
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if not (is_whole and low <= value and (high is None or value <= high)):
        bounds = f"{low} or more" if high is None else f"from {low} to {high}"
        raise ConfigError(f"{name} is {value!r}: must be a whole number, {bounds}")


def usable_cores() -> list[int]:
    """Cores this process may run on, ascending."""
    return sorted(os.sched_getaffinity(0))


def env_name(flag: str) -> str:
    """The environment twin of a flag: `--top-k` is `POLYNEURON_TOP_K`."""
    return ENV_PREFIX + flag.lstrip("-").replace("-", "_").upper()


def cache_folder() -> Path:
    """Where converted models are kept: `polyneuron` in XDG_CACHE_HOME, by default ~/.cache."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():  # relative ones are to be ignored, says the specification
        try:
            base = Path.home() / ".cache"
        except RuntimeError:
            raise ConfigError("no home folder: set XDG_CACHE_HOME to a folder") from None
    return base / "polyneuron"
