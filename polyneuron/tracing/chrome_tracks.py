"""Where a Chrome trace draws what: a process for each kind of actor, a thread for each track."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from polyneuron.tracing.recording import Recording, executor_place


@dataclass(frozen=True, slots=True)
class Track:
    """A thread of a Chrome trace."""

    pid: int
    tid: int


_COORDINATOR, _NPU, _CPU, _IO, _CACHE, _OTHER = range(1, 7)
_PROCESSES = {
    _COORDINATOR: "coordinator", _NPU: "NPU", _CPU: "CPU workers", _IO: "flash",
    _CACHE: "neuron cache", _OTHER: "other actors",
}  # fmt: skip
_KINDS = {
    "coordinator": _COORDINATOR, "driver": _COORDINATOR, "npu": _NPU, "worker": _CPU, "io": _IO,
    "cache": _CACHE,
}  # fmt: skip


class Tracks:
    """The tracks of a recording's actors."""

    def __init__(self, recording: Recording, num_read_lanes: int) -> None:
        actors = {mark.actor for mark in recording.marks} | {*recording.detail.executors()}
        self._num_read_lanes = num_read_lanes
        self._of: dict[str, Track] = {}
        for actor in ("coordinator", "cache", "io", *sorted(actors, key=executor_place)):
            if actor not in self._of:
                pid = _KINDS.get(actor.partition(".")[0], _OTHER)
                tid = 1 + sum(track.pid == pid for track in self._of.values())
                self._of[actor] = Track(pid, tid)

    @property
    def coordinator(self) -> Track:
        """Where steps and requests are."""
        return self._of["coordinator"]

    @property
    def cache(self) -> Track:
        """Where counters of the neuron cache are."""
        return self._of["cache"]

    @property
    def io(self) -> Track:
        """Where what happens to all reads is."""
        return self._of["io"]

    def actors(self) -> list[str]:
        """All that have a track of their own."""
        return list(self._of)

    def of(self, actor: str) -> Track:
        """An actor's track."""
        return self._of[actor]

    def read_lane(self, lane: int) -> Track:
        """The track of a lane of reads, from 0."""
        return Track(_IO, 1000 + lane)

    def metadata(self) -> Iterator[dict[str, Any]]:
        """Names and order of all processes and threads."""
        threads = {track: actor for actor, track in self._of.items()}
        for lane in range(self._num_read_lanes):
            threads[self.read_lane(lane)] = f"reads, lane {lane}"
        for pid in sorted({track.pid for track in threads}):
            yield _named("process_name", pid, 0, name=_PROCESSES[pid])
            yield _named("process_sort_index", pid, 0, sort_index=pid)
        for track, name in threads.items():
            yield _named("thread_name", track.pid, track.tid, name=name)
            yield _named("thread_sort_index", track.pid, track.tid, sort_index=track.tid)


def _named(kind: str, pid: int, tid: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "ts": 0, "args": args}
