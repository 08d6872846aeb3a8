"""A recording as a Chrome trace: what Perfetto and chrome://tracing open.

One process for each kind of actor, one thread for each actor or lane of reads; steps, ops, cluster
stages and reads are complete events, rates are counters, and a flow leads from a read to its use.
Times are in us since the first event.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, TextIO

import numpy as np

from polyneuron.timeline_events import Event
from polyneuron.tracing.chrome_counters import counters
from polyneuron.tracing.chrome_tracks import Track, Tracks
from polyneuron.tracing.op_waits import flash_waits_ns
from polyneuron.tracing.read_lanes import read_lanes
from polyneuron.tracing.read_uses import ReadUses, read_uses
from polyneuron.tracing.record_table import Column, RecordTable
from polyneuron.tracing.recording import Detail, Mark, Recording, Request, Step

TraceEvent = dict[str, Any]

_FOR_ALL = {Event.FAULT, Event.RESTART}
"""Marks that are drawn through every track."""


def write_chrome_trace(recording: Recording, target: TextIO) -> None:
    """Write the trace, one event a line."""
    target.write('{"displayTimeUnit":"ms","otherData":')
    facts = {**recording.run, "first_event_ns": recording.first_ns, "cut": recording.is_cut}
    target.write(json.dumps({key: str(value) for key, value in facts.items()}))
    target.write(',"traceEvents":[\n')
    separator = ""
    for event in chrome_events(recording):
        target.write(separator + json.dumps(event, separators=(",", ":")))
        separator = ",\n"
    target.write("\n]}\n")


def chrome_events(recording: Recording) -> Iterator[TraceEvent]:
    """Every event of the trace; those of one track or counter in order of time."""
    detail = recording.detail
    uses, lanes = read_uses(detail), read_lanes(detail.reads)
    num_lanes = int(lanes.max(initial=-1)) + 1
    tracks = Tracks(recording, num_lanes)
    yield from tracks.metadata()
    for actor in tracks.actors():
        track = tracks.of(actor)
        found = [_mark(mark, track, recording.first_ns) for mark in recording.marks
                 if mark.actor == actor]  # fmt: skip
        if track == tracks.coordinator:
            found += _coordination(recording, track)
        if actor in uses.executors:
            found += _executor(recording, actor, track)
            used = np.flatnonzero(uses.executor == uses.executors.index(actor))
            found += _flow_ends(recording, uses, used, track)
        yield from sorted(found, key=_place)
    for lane in range(num_lanes):
        indices = np.flatnonzero(lanes == lane)
        yield from sorted(_reads(recording, uses, indices, tracks.read_lane(lane)), key=_place)
    yield from counters(recording, tracks)


def _place(event: TraceEvent) -> tuple[float, float]:
    """Sorts a track by time, an outer slice before the inner, and flows after what they touch."""
    return event["ts"], -event.get("dur", -1.0)


def _coordination(recording: Recording, track: Track) -> Iterator[TraceEvent]:
    for request in recording.requests:
        yield from _request(request, track, recording)
    for step in recording.steps:
        yield _step(step, track, recording.first_ns)


def microseconds(ns: int) -> float:
    """Exact to the nanosecond: three decimals of a number below 2^52 ns."""
    return ns / 1000


def _complete(
    track: Track, name: str, cat: str, start_ns: int, ns: int, args: TraceEvent
) -> TraceEvent:
    return {
        "ph": "X", "name": name, "cat": cat, "pid": track.pid, "tid": track.tid,
        "ts": microseconds(start_ns), "dur": microseconds(ns), "args": args,
    }  # fmt: skip


def _request(request: Request, track: Track, recording: Recording) -> Iterator[TraceEvent]:
    """An asynchronous slice: requests overlap, and one that never ended ends with the file."""
    begin_ns = request.queued_ns if request.queued_ns is not None else request.admitted_ns
    if begin_ns is None:
        return
    end_ns = recording.last_ns if request.finished_ns is None else request.finished_ns
    both = {"cat": "request", "name": f"request {request.request}", "id": request.request,
            "pid": track.pid, "tid": track.tid}  # fmt: skip
    args = {"prompt_tokens": request.prompt_tokens, "tokens": len(request.token_ns)}
    yield {"ph": "b", "ts": microseconds(begin_ns - recording.first_ns), **both, "args": args}
    yield {"ph": "e", "ts": microseconds(end_ns - recording.first_ns), **both}


def _step(step: Step, track: Track, first_ns: int) -> TraceEvent:
    names = ("graph", "tokens", "sequences", "compute_ns", "stall_ns", "wait_ns", "bytes", "reads",
             "hits", "misses")  # fmt: skip
    args = {name: getattr(step, name) for name in names}
    name = f"step {step.step} {step.phase}"
    return _complete(track, name, "step", step.t_ns - first_ns, step.ns, args)


def _mark(mark: Mark, track: Track, first_ns: int) -> TraceEvent:
    scope = "g" if mark.event in _FOR_ALL else "t"
    return {
        "ph": "i", "name": mark.event, "cat": "mark", "s": scope, "pid": track.pid,
        "tid": track.tid, "ts": microseconds(mark.t_ns - first_ns), "args": dict(mark.keys),
    }  # fmt: skip


def _executor(recording: Recording, actor: str, track: Track) -> Iterator[TraceEvent]:
    """Ops, the waits before them and the clusters within."""
    detail, first_ns = recording.detail, recording.first_ns
    yield from _ops(detail, actor, track, first_ns)
    yield from _clusters(detail.clusters_of(actor), detail.stages, track, first_ns)


def _ops(detail: Detail, actor: str, track: Track, first_ns: int) -> Iterator[TraceEvent]:
    free_ns = 0
    rows, kinds = detail.ops_of(actor).rows.tolist(), detail.kinds
    for row, flash_ns in zip(rows, flash_waits_ns(detail, actor).tolist(), strict=True):
        t_ns, ns, wait_ns, stall_ns, step, op, kind, layer, units = row
        start_ns = t_ns - first_ns
        for name, until_ns, waited_ns in (
            ("wait for others", start_ns - flash_ns, wait_ns - flash_ns),
            ("wait for flash", start_ns, flash_ns),
        ):
            shown_ns = min(waited_ns, until_ns - free_ns)  # it did not wait while it worked
            if shown_ns > 0:
                args = {"step": step}
                yield _complete(track, name, "wait", until_ns - shown_ns, shown_ns, args)
        name = kinds[kind] if layer < 0 else f"{kinds[kind]} {layer}"
        args = {"step": step, "op": op, "layer": layer, "units": units, "stall_ns": stall_ns}
        yield _complete(track, name, "op", start_ns, ns, args)
        free_ns = max(free_ns, start_ns + ns)


def _clusters(
    clusters: RecordTable, stages: list[str], track: Track, first_ns: int
) -> Iterator[TraceEvent]:
    for t_ns, ns, step, layer, cluster, stage, neurons, misses in clusters.rows.tolist():
        args = {"step": step, "layer": layer, "cluster": cluster, "neurons": neurons,
                "misses": misses}  # fmt: skip
        yield _complete(track, stages[stage], "cluster", t_ns - first_ns, ns, args)


def _reads(
    recording: Recording, uses: ReadUses, indices: Column, track: Track
) -> Iterator[TraceEvent]:
    """The reads of one lane, and the begin of a flow from each whose use was recorded."""
    first_ns = recording.first_ns
    for index, row in zip(indices, recording.detail.reads.rows[indices].tolist(), strict=True):
        t_ns, ns, read, layer, neuron, num_bytes, status, step = row
        args = {"read": read, "layer": layer, "neuron": neuron, "bytes": num_bytes,
                "status": status, "step": step}  # fmt: skip
        name = f"read {layer}" if status == 0 else f"read {layer} failed"
        yield _complete(track, name, "read", t_ns - first_ns, ns, args)
        if uses.executor[index] >= 0:
            # A slice does not hold the moment of its end: the flow leaves just before.
            leaves_ns = t_ns + max(ns - 1, 0) - first_ns
            yield _flow("s", bool(uses.ended_wait[index]), int(index), track, leaves_ns)


def _flow_ends(
    recording: Recording, uses: ReadUses, indices: Column, track: Track
) -> Iterator[TraceEvent]:
    for index in indices.tolist():
        at_ns = int(uses.t_ns[index]) - recording.first_ns
        flow = _flow("f", bool(uses.ended_wait[index]), index, track, at_ns)
        yield {**flow, "bp": "e"}  # it ends in the slice around it, not in the next one


def _flow(ph: str, ended_wait: bool, index: int, track: Track, at_ns: int) -> TraceEvent:
    name = "waited for" if ended_wait else "in time"
    return {"ph": ph, "name": name, "cat": "use", "id": index, "pid": track.pid,
            "tid": track.tid, "ts": microseconds(at_ns)}  # fmt: skip
