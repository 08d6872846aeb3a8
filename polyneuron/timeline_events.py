"""The events of a timeline and the types of their keys, as docs/TIMELINE.md tells them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from polyneuron.errors import FormatError

FORMAT = 1


class Event(StrEnum):
    """What a line of a timeline is about."""

    RUN = "run"
    REQUEST = "request"
    TOKEN = "token"
    PHASE = "phase"
    BATCH = "batch"
    GRAPH = "graph"
    STEP = "step"
    OP = "op"
    CLUSTER = "cluster"
    READ = "read"
    RESIDENCY = "residency"
    PLAN = "plan"
    FAULT = "fault"
    RESTART = "restart"
    LOST = "lost"


class TraceDetail(StrEnum):
    """Which steps have records of their ops, clusters and reads."""

    AUTO = "auto"
    """The first 64 steps and then every 16th."""
    STEPS = "steps"
    """None."""
    ALL = "all"
    """Every one."""

    def covers(self, step: int) -> bool:
        """Whether a step, counted from 0, has them."""
        if self is TraceDetail.AUTO:
            return step < FIRST_DETAILED or step % DETAIL_EVERY == 0
        return self is TraceDetail.ALL


FIRST_DETAILED = 64
DETAIL_EVERY = 16

WHOLE: tuple[type, ...] = (int,)
WHOLE_OR_NULL = (int, type(None))
NUMBER = (int, float)
TEXT = (str,)
TRUTH = (bool,)

Keys = Mapping[str, tuple[type, ...]]

ALWAYS: Keys = {"t_ns": WHOLE, "seq": WHOLE, "actor": TEXT, "event": TEXT}

KEYS: Mapping[Event, Keys] = MappingProxyType(
    {
        Event.RUN: {
            "format": WHOLE, "clock": TEXT, "model": TEXT, "mode": TEXT, "isa": TEXT,
            "workers": WHOLE, "npu_threads": WHOLE, "layers": WHOLE, "clusters": WHOLE,
            "memory_bytes": WHOLE, "arena_bytes": WHOLE, "cold_slots": WHOLE, "policy": TEXT,
        },
        Event.REQUEST: {"request": WHOLE, "state": TEXT, "prompt_tokens": WHOLE},
        Event.TOKEN: {"request": WHOLE, "index": WHOLE},
        Event.PHASE: {"phase": TEXT},
        Event.BATCH: {"sequences": WHOLE, "hot_clusters": WHOLE, "hot_share": NUMBER},
        Event.GRAPH: {"graph": TEXT, "previous": TEXT},
        Event.STEP: {
            "ns": WHOLE, "step": WHOLE, "phase": TEXT, "graph": TEXT, "tokens": WHOLE,
            "sequences": WHOLE, "compute_ns": WHOLE_OR_NULL, "stall_ns": WHOLE_OR_NULL,
            "wait_ns": WHOLE_OR_NULL, "executors": WHOLE, "bytes": WHOLE_OR_NULL,
            "reads": WHOLE_OR_NULL, "needed": WHOLE_OR_NULL, "hits": WHOLE_OR_NULL,
            "misses": WHOLE_OR_NULL, "predicted": WHOLE_OR_NULL, "active": WHOLE_OR_NULL,
            "detail": TRUTH,
        },
        Event.OP: {
            "ns": WHOLE, "wait_ns": WHOLE, "step": WHOLE, "op": WHOLE, "kind": TEXT,
            "layer": WHOLE, "units": WHOLE,
        },
        Event.CLUSTER: {
            "ns": WHOLE, "step": WHOLE, "layer": WHOLE, "cluster": WHOLE, "stage": TEXT,
            "neurons": WHOLE, "misses": WHOLE,
        },
        Event.READ: {
            "ns": WHOLE, "read": WHOLE, "layer": WHOLE, "neuron": WHOLE, "bytes": WHOLE,
            "status": WHOLE, "step": WHOLE,
        },
        Event.RESIDENCY: {
            "step": WHOLE, "admitted": WHOLE, "evicted": WHOLE, "resident": WHOLE, "slots": WHOLE,
        },
        Event.PLAN: {"what": TEXT, "cold_slots": WHOLE, "memory_bytes": WHOLE},
        Event.FAULT: {"kind": TEXT, "target": TEXT},
        Event.RESTART: {"target": TEXT, "generation": WHOLE, "ns": WHOLE},
        Event.LOST: {"records": WHOLE},
    }
)  # fmt: skip
"""Keys that an event always has, beside time, number, actor and name."""

OPTIONAL_KEYS: Mapping[Event, Keys] = MappingProxyType(
    {
        Event.RUN: {"neurons": WHOLE, "cluster_neurons": WHOLE},
        Event.REQUEST: {"tokens": WHOLE, "reason": TEXT},
        Event.OP: {"stall_ns": WHOLE},
    }
)
"""Keys that it may have."""


@dataclass(frozen=True, slots=True)
class TimelineEvent:
    """One line of a timeline; `keys` has what belongs to the event alone."""

    t_ns: int
    seq: int
    actor: str
    event: str
    keys: Mapping[str, Any]


def parse_event(line: bytes | str, place: str) -> TimelineEvent:
    """The event of a line; FormatError says what is wrong at `place`.

    Events and keys that are not known stay as they are: a newer polyneuron may have written them.
    """
    try:
        keys = json.loads(line)
    except ValueError:
        raise FormatError(f"{place}: is no JSON object: not a timeline, or cut short") from None
    if not isinstance(keys, dict):
        raise FormatError(f"{place}: is no JSON object: not a timeline")
    _check_keys(keys, ALWAYS, place)
    name = keys["event"]
    if name in KEYS:
        _check_keys(keys, KEYS[name], place)
        _check_keys(keys, OPTIONAL_KEYS.get(name, {}), place, may_lack=True)
    if name == Event.RUN and keys["format"] != FORMAT:
        raise FormatError(
            f"{place}: format is {keys['format']}, this polyneuron reads {FORMAT}: use a newer one"
        )
    t_ns, seq, actor, name = (keys.pop(key) for key in ALWAYS)
    return TimelineEvent(t_ns, seq, actor, name, keys)


def _check_keys(keys: dict[str, Any], types: Keys, place: str, *, may_lack: bool = False) -> None:
    for name, allowed in types.items():
        if name not in keys:
            if may_lack:
                continue
            raise FormatError(f"{place}: {keys.get('event', 'the event')} lacks {name!r}")
        value = keys[name]
        if type(value) not in allowed:
            wanted = " or ".join("null" if t is type(None) else t.__name__ for t in allowed)
            raise FormatError(f"{place}: {name} is {value!r}: must be {wanted}")
