"""What a timeline tells, in the form in which it is counted and drawn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from polyneuron.tracing.record_table import RecordTable

OP_COLUMNS = ("t_ns", "ns", "wait_ns", "stall_ns", "step", "op", "kind", "layer", "units")
CLUSTER_COLUMNS = ("t_ns", "ns", "step", "layer", "cluster", "stage", "neurons", "misses")
READ_COLUMNS = ("t_ns", "ns", "read", "layer", "neuron", "bytes", "status", "step")
TOKEN_COLUMNS = ("t_ns", "request", "index")
RESIDENCY_COLUMNS = ("t_ns", "step", "admitted", "evicted", "resident", "slots")

AWAIT_ROWS = "await_rows"
"""The op in which an executor waits for flash."""
WAIT = "wait"
"""The stage in which a cluster does."""
DECODE, PREFILL = "decode", "prefill"


@dataclass(frozen=True, slots=True)
class Step:
    """One forward pass; a count or time that was not measured is None."""

    t_ns: int
    ns: int
    step: int
    phase: str
    graph: str
    tokens: int
    sequences: int
    executors: int
    compute_ns: int | None
    """Of all executors together, as the next two."""
    stall_ns: int | None
    wait_ns: int | None
    bytes: int | None
    reads: int | None
    needed: int | None
    hits: int | None
    misses: int | None
    predicted: int | None
    active: int | None
    detail: bool
    """Its ops, clusters and reads were recorded."""

    @property
    def end_ns(self) -> int:
        """When it was done."""
        return self.t_ns + self.ns

    @property
    def executor_ns(self) -> int:
        """The time its executors had, together."""
        return self.ns * self.executors

    @property
    def hit_rate(self) -> float | None:
        """Hits of the neurons that went through the neuron cache; None where none did."""
        if self.hits is None or self.misses is None or not self.hits + self.misses:
            return None
        return self.hits / (self.hits + self.misses)


@dataclass(frozen=True, slots=True)
class Mark:
    """An event that is a moment: a switch, a fault, a restart."""

    t_ns: int
    actor: str
    event: str
    keys: Mapping[str, Any]


@dataclass(slots=True)
class Request:
    """One request's life; a moment that was not seen is None."""

    request: int
    prompt_tokens: int
    state: str = ""
    queued_ns: int | None = None
    admitted_ns: int | None = None
    finished_ns: int | None = None
    num_tokens: int | None = None
    """As told at its end."""
    reason: str | None = None
    token_ns: dict[int, int] = field(default_factory=dict)
    """Index of a token -> when the first candidate had it."""

    def ttft_ns(self) -> int | None:
        """Time to first token, from the moment it was queued."""
        if self.queued_ns is None or 0 not in self.token_ns:
            return None
        return self.token_ns[0] - self.queued_ns

    def tbt_ns(self) -> list[int]:
        """Times between one token and the next."""
        times = self.token_ns
        return [times[i] - times[i - 1] for i in sorted(times) if i - 1 in times]


@dataclass(frozen=True, slots=True)
class Detail:
    """Records of the steps that have them; kinds and stages are indices into their words."""

    kinds: list[str]
    stages: list[str]
    ops: Mapping[str, RecordTable]
    """By actor."""
    clusters: Mapping[str, RecordTable]
    reads: RecordTable

    def executors(self) -> list[str]:
        """Who computed: NPUs first, then workers, then others, each by number."""
        return sorted({*self.ops, *self.clusters}, key=executor_place)

    def num_records(self) -> int:
        """Of all kinds and actors."""
        tables = [*self.ops.values(), *self.clusters.values(), self.reads]
        return sum(len(table) for table in tables)

    def ops_of(self, actor: str) -> RecordTable:
        """An actor's ops, perhaps none."""
        return self.ops.get(actor, NO_OPS)

    def clusters_of(self, actor: str) -> RecordTable:
        """An actor's cluster stages, perhaps none."""
        return self.clusters.get(actor, NO_CLUSTERS)


@dataclass(frozen=True, slots=True)
class Recording:
    """A whole timeline."""

    run: Mapping[str, Any]
    """Keys of its first event; empty where it lacks one."""
    num_events: int
    is_cut: bool
    """It ends in the middle of a line."""
    first_ns: int
    """Of the events after `run`, the first; pictures and figures count from here."""
    last_ns: int
    requests: list[Request]
    steps: list[Step]
    marks: list[Mark]
    tokens: RecordTable
    residency: RecordTable
    detail: Detail
    num_lost: int
    """Records that did not fit their ring."""


def executor_place(actor: str) -> tuple[int, int, str]:
    """A key that sorts executors as they are drawn."""
    kind, _, number = actor.partition(".")
    order = {"npu": 0, "worker": 1}.get(kind, 2)
    return order, int(number) if number.isdecimal() and len(number) < 10 else 0, actor


def _no_records(names: tuple[str, ...]) -> RecordTable:
    import numpy as np

    return RecordTable(names, np.empty((0, len(names)), dtype=np.int64))


NO_OPS, NO_CLUSTERS = _no_records(OP_COLUMNS), _no_records(CLUSTER_COLUMNS)
