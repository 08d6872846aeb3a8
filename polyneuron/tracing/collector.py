"""Reads a timeline's file into a recording, line by line."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from operator import attrgetter
from pathlib import Path
from typing import BinaryIO

from polyneuron.errors import ConfigError, FormatError
from polyneuron.timeline_events import KEYS, Event, TimelineEvent, parse_event
from polyneuron.tracing.record_table import RecordColumns, Words
from polyneuron.tracing.recording import (
    CLUSTER_COLUMNS,
    OP_COLUMNS,
    READ_COLUMNS,
    RESIDENCY_COLUMNS,
    TOKEN_COLUMNS,
    Detail,
    Mark,
    Recording,
    Request,
    Step,
)

MAX_LINE_BYTES = 1 << 20
PROGRESS_EVERY = 1 << 12
MAX_NUMBER = 1 << 52
"""What a page can still count exactly; as a time, 52 days."""
MAX_TIME_NS = 1 << 62

_MARKS = {Event.PHASE, Event.BATCH, Event.GRAPH, Event.PLAN, Event.FAULT, Event.RESTART}
_STEP_KEYS = tuple(KEYS[Event.STEP])


def read_recording(path: Path, on_bytes: Callable[[int, int], None] | None = None) -> Recording:
    """The recording in a file; ConfigError when it cannot be read, FormatError when it is no
    timeline. One that was cut in the middle of its last line is read up to there.

    `on_bytes` hears now and then how many bytes were read, and how many there are.
    """
    collector = Collector()
    try:
        with path.open("rb") as file:
            total = path.stat().st_size
            for event in _events(file, path, collector):
                collector.take(event)
                if on_bytes is not None and collector.num_events % PROGRESS_EVERY == 0:
                    on_bytes(file.tell(), total)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    if not collector.num_events:
        raise FormatError(f"{path}: is empty: give a file that run --trace wrote")
    recording = collector.recording()
    if recording.last_ns - recording.first_ns >= MAX_NUMBER:
        raise FormatError(f"{path}: its times are over 52 days apart: not one run's timeline")
    return recording


def _events(file: BinaryIO, path: Path, collector: Collector) -> Iterator[TimelineEvent]:
    number = 0
    while line := file.readline(MAX_LINE_BYTES):
        number += 1
        place = f"{path}:{number}"
        try:
            event = parse_event(line, place)
            _check_numbers(event, place)
        except RecursionError:
            raise FormatError(f"{place}: is no JSON object: not a timeline") from None
        except FormatError:
            is_last = not line.endswith(b"\n") and len(line) < MAX_LINE_BYTES
            if not (is_last and collector.num_events):
                raise
            collector.is_cut = True
            return
        yield event


def _check_numbers(event: TimelineEvent, place: str) -> None:
    """Refuse what no run can have: it would only fail later, or be drawn as nonsense."""
    if not 0 <= event.t_ns < MAX_TIME_NS:
        raise FormatError(f"{place}: t_ns is {event.t_ns}: must be 0 to {MAX_TIME_NS}")
    for name, value in event.keys.items():
        if type(value) is int:
            least = 0 if name in _NEVER_NEGATIVE else -MAX_NUMBER
            if not least <= value < MAX_NUMBER:
                raise FormatError(f"{place}: {name} is {value}: must be {least} to {MAX_NUMBER}")
        elif type(value) is float and not math.isfinite(value):
            raise FormatError(f"{place}: {name} is {value}: must be a number")


_NEVER_NEGATIVE = frozenset(
    {
        "ns", "wait_ns", "compute_ns", "stall_ns", "bytes", "reads", "needed", "hits", "misses",
        "predicted", "active", "tokens", "sequences", "executors", "units", "neurons", "records",
        "prompt_tokens", "resident", "slots",
    }
)  # fmt: skip


class Collector:
    """Takes events in any order and makes a recording of them."""

    def __init__(self) -> None:
        self.num_events = 0
        self.is_cut = False
        self._run: dict[str, object] = {}
        self._first_ns, self._last_ns, self._num_lost = MAX_TIME_NS, 0, 0
        self._requests: dict[int, Request] = {}
        self._steps: list[Step] = []
        self._marks: list[Mark] = []
        self._tokens = RecordColumns(*TOKEN_COLUMNS)
        self._residency = RecordColumns(*RESIDENCY_COLUMNS)
        self._kinds, self._stages = Words(), Words()
        self._ops = defaultdict[str, RecordColumns](lambda: RecordColumns(*OP_COLUMNS))
        self._clusters = defaultdict[str, RecordColumns](lambda: RecordColumns(*CLUSTER_COLUMNS))
        self._reads = RecordColumns(*READ_COLUMNS)
        self._takers: dict[str, Callable[[TimelineEvent], None]] = {
            Event.REQUEST: self._take_request,
            Event.TOKEN: self._take_token,
            Event.STEP: self._take_step,
            Event.OP: self._take_op,
            Event.CLUSTER: self._take_cluster,
            Event.READ: self._take_read,
            Event.RESIDENCY: self._take_residency,
            Event.LOST: self._take_lost,
            **dict.fromkeys(_MARKS, self._take_mark),
        }

    def take(self, event: TimelineEvent) -> None:
        """Count one event in; one of a kind that is not known counts only for the time."""
        self.num_events += 1
        if event.event == Event.RUN:  # reading the model comes after it and is not in the picture
            self._take_run(event)
            return
        end_ns = event.t_ns + int(event.keys.get("ns") or 0 if event.event in KEYS else 0)
        self._first_ns = min(self._first_ns, event.t_ns)
        self._last_ns = max(self._last_ns, end_ns)
        taker = self._takers.get(event.event)
        if taker is not None:
            taker(event)

    def recording(self) -> Recording:
        """All that was taken, in order of time."""
        by_time = attrgetter("t_ns")
        first_ns = min(self._first_ns, self._last_ns)  # of no event at all: both zero
        return Recording(
            run=self._run,
            num_events=self.num_events,
            is_cut=self.is_cut,
            first_ns=first_ns,
            last_ns=self._last_ns,
            requests=[self._requests[key] for key in sorted(self._requests)],
            steps=sorted(self._steps, key=by_time),
            marks=sorted(self._marks, key=by_time),
            tokens=self._tokens.table(),
            residency=self._residency.table(),
            detail=Detail(
                self._kinds.all(),
                self._stages.all(),
                {actor: columns.table() for actor, columns in self._ops.items()},
                {actor: columns.table() for actor, columns in self._clusters.items()},
                self._reads.table(),
            ),
            num_lost=self._num_lost,
        )

    def _take_run(self, event: TimelineEvent) -> None:
        self._run = {name: event.keys[name] for name in KEYS[Event.RUN]}

    def _take_request(self, event: TimelineEvent) -> None:
        keys = event.keys
        request = self._request(keys["request"])
        request.prompt_tokens, request.state = keys["prompt_tokens"], keys["state"]
        if request.state == "queued":
            request.queued_ns = event.t_ns
        elif request.state == "admitted":
            request.admitted_ns = event.t_ns
        elif request.state == "finished":
            request.finished_ns = event.t_ns
            request.num_tokens, request.reason = keys.get("tokens"), keys.get("reason")

    def _request(self, request: int) -> Request:
        return self._requests.setdefault(request, Request(request, 0))

    def _take_token(self, event: TimelineEvent) -> None:
        request, index = event.keys["request"], event.keys["index"]
        self._tokens.append((event.t_ns, request, index))
        times = self._request(request).token_ns
        times[index] = min(times.get(index, event.t_ns), event.t_ns)

    def _take_step(self, event: TimelineEvent) -> None:
        self._steps.append(Step(event.t_ns, **{name: event.keys[name] for name in _STEP_KEYS}))

    def _take_op(self, event: TimelineEvent) -> None:
        k = event.keys
        kind = self._kinds.number(k["kind"])
        self._ops[event.actor].append(
            (event.t_ns, k["ns"], k["wait_ns"], k.get("stall_ns", 0), k["step"], k["op"], kind,
             k["layer"], k["units"])
        )  # fmt: skip

    def _take_cluster(self, event: TimelineEvent) -> None:
        k = event.keys
        stage = self._stages.number(k["stage"])
        self._clusters[event.actor].append(
            (event.t_ns, k["ns"], k["step"], k["layer"], k["cluster"], stage, k["neurons"],
             k["misses"])
        )  # fmt: skip

    def _take_read(self, event: TimelineEvent) -> None:
        self._reads.append((event.t_ns, *(event.keys[name] for name in READ_COLUMNS[1:])))

    def _take_residency(self, event: TimelineEvent) -> None:
        self._residency.append((event.t_ns, *(event.keys[name] for name in RESIDENCY_COLUMNS[1:])))

    def _take_lost(self, event: TimelineEvent) -> None:
        self._num_lost += event.keys["records"]

    def _take_mark(self, event: TimelineEvent) -> None:
        known = {name: event.keys[name] for name in KEYS[Event(event.event)]}
        self._marks.append(Mark(event.t_ns, event.actor, event.event, known))
