"""Counters of a Chrome trace: hit rate, bytes a token, reads in flight, resident slots."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from polyneuron.tracing.chrome_tracks import Track, Tracks
from polyneuron.tracing.read_lanes import reads_in_flight
from polyneuron.tracing.recording import Recording


def counters(recording: Recording, tracks: Tracks) -> Iterator[dict[str, Any]]:
    """Every counter's values in order of time; what was not measured has none."""
    first_ns = recording.first_ns
    for step in recording.steps:
        if step.hit_rate is not None:
            yield _value(tracks.cache, "hit rate", step.t_ns - first_ns, step.hit_rate)
    for step in recording.steps:
        if step.bytes is not None and step.tokens:
            value = step.bytes / step.tokens
            yield _value(tracks.io, "bytes a token", step.t_ns - first_ns, value)
    for t_ns, depth in reads_in_flight(recording.detail.reads):
        yield _value(tracks.io, "reads in flight", t_ns - first_ns, depth)
    residency = recording.residency
    times, resident = residency.column("t_ns").tolist(), residency.column("resident").tolist()
    for t_ns, slots in zip(times, resident, strict=True):
        yield _value(tracks.cache, "resident slots", t_ns - first_ns, slots)


def _value(track: Track, name: str, at_ns: int, value: float) -> dict[str, Any]:
    return {
        "ph": "C", "name": name, "pid": track.pid, "tid": track.tid, "ts": at_ns / 1000,
        "args": {"value": value},
    }  # fmt: skip
