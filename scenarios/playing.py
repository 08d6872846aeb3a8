"""Plays scenarios: every point of every seed, in one process or several, in the script's order."""

from __future__ import annotations

import hashlib
import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polyneuron.errors import ConfigError
from polyneuron.io.whole_file import write_whole
from polyneuron.scenarios.expectation import Player
from polyneuron.scenarios.result import Figures, ScenarioResult, check, named
from polyneuron.scenarios.script import Script, load_script


@dataclass(frozen=True, slots=True)
class Play:
    """One scenario to be played with one seed."""

    script: Script

    @classmethod
    def load(cls, path: Path, overrides: Mapping[str, Any], player: Player) -> Play:
        """Read it; ConfigError when it is not for this player."""
        script = load_script(path, overrides)
        if player not in script.players:
            others = " and ".join(script.players)
            raise ConfigError(f"{path}: players: it is for {others}, not for {player}")
        return cls(script)


@dataclass(frozen=True, slots=True)
class Turn:
    """One point of one play: what one process computes at a time."""

    script: Script
    trace: Path | None = None


@dataclass(frozen=True, slots=True)
class Played:
    """What a turn came to."""

    figures: Figures
    timeline_sha256: str | None


def simulate_turn(turn: Turn) -> Played:
    """Simulate one point, its timeline into the file that the turn names."""
    from polyneuron.scenarios.simulation import simulate
    from polyneuron.scenarios.timeline_sink import KeptTimeline, sha256_of

    timeline = KeptTimeline()
    figures = simulate(turn.script, timeline)
    text = timeline.text()
    if turn.trace is not None:
        write_whole(turn.trace, text)
    return Played(figures, sha256_of(text))


def replay_turn(turn: Turn) -> Played:
    """Replay one point on real actors, its timeline into the file that the turn names."""
    from polyneuron.scenarios.replay import replay

    figures = replay(turn.script, turn.trace)
    sha = None
    if turn.trace is not None:
        sha = hashlib.sha256(turn.trace.read_bytes()).hexdigest()
    return Played(figures, sha)


TURNS: Mapping[Player, Callable[[Turn], Played]] = {
    Player.SIMULATE: simulate_turn,
    Player.REPLAY: replay_turn,
}


def play_all(
    plays: Sequence[Play],
    player: Player,
    jobs: int = 1,
    trace: Path | None = None,
    ray: str | None = None,
) -> Iterator[ScenarioResult]:
    """The result of each play in order, as soon as it and those before it are there.

    The results are the same for any number of jobs, and on the Ray cluster at the address `ray`.
    """
    turns = [
        Turn(point.played_by(player), trace) for play in plays for _, point in play.script.points()
    ]
    if trace is not None and len(turns) > 1:
        raise ConfigError(f"--trace {trace}: this makes {len(turns)} timelines; choose one point")
    played = _perform(TURNS[player], turns, jobs, ray)
    for play in plays:
        names = [name for name, _ in play.script.points()]
        yield _result(play.script, player, names, [next(played) for _ in names])


def _perform(
    perform: Callable[[Turn], Played], turns: Sequence[Turn], jobs: int, ray: str | None
) -> Iterator[Played]:
    if ray is not None:
        from polyneuron.scenarios.ray_turns import perform_on_ray

        yield from perform_on_ray(perform, turns, ray)
        return
    if jobs <= 1 or len(turns) <= 1:
        yield from map(perform, turns)
        return
    # Not forked: threads of numpy's libraries do not survive that.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(jobs, len(turns)), context) as pool:
        yield from pool.map(perform, turns)


def _result(
    script: Script, player: Player, names: Sequence[str], played: Iterable[Played]
) -> ScenarioResult:
    figures: Figures = {}
    hashes = []
    for name, turn in zip(names, played, strict=True):
        figures |= named(turn.figures, name)
        hashes.append(turn.timeline_sha256)
    checked = check(script.expectations, figures, player, names)
    return ScenarioResult(script.name, script.seed, figures, checked, _one_hash(hashes))


def _one_hash(hashes: Sequence[str | None]) -> str | None:
    known = [text for text in hashes if text is not None]
    if len(known) <= 1:
        return known[0] if known else None
    return hashlib.sha256("".join(known).encode()).hexdigest()
