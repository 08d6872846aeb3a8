"""Golden files of simulated timelines: each point's hash, and the last lines of the last point."""

from __future__ import annotations

from polyneuron.scenarios.expectation import Player
from polyneuron.scenarios.script import Script
from polyneuron.scenarios.simulation import simulate
from polyneuron.scenarios.timeline_sink import KeptTimeline, sha256_of

TAIL = 20


def golden_text(script: Script) -> str:
    """What a golden file holds: it changes when any event of any point does."""
    parts, lines = [], []
    for name, point in script.points():
        timeline = KeptTimeline()
        simulate(point.played_by(Player.SIMULATE), timeline)
        lines = timeline.lines()
        sha = sha256_of("".join(lines).encode())
        parts.append(f"{sha} {len(lines)} events {name}".rstrip() + "\n")
    return "".join([*parts, *lines[-TAIL:]])
