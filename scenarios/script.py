"""Scenario files: read, completed by the profiles they name, checked (docs/SCENARIOS.md)."""

from __future__ import annotations

import itertools
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from polyneuron.errors import ConfigError
from polyneuron.scenarios.disturbance import SIMULATED_ONLY, Disturbance
from polyneuron.scenarios.engine_settings import EngineSettings
from polyneuron.scenarios.expectation import AT, Expectation, Player
from polyneuron.scenarios.included import included
from polyneuron.scenarios.replay_settings import SHAPE_KEYS, ReplaySettings
from polyneuron.scenarios.script_table import ScriptTable
from polyneuron.scenarios.workload import Request

SCRIPT_KEYS = (
    "name", "about", "seed", "players", "device", "model", "activity", "engine", "requests",
    "events", "expect", "sweep", "replay",
)  # fmt: skip
MAX_SEED = (1 << 32) - 1
NAME = re.compile(r"[a-z][a-z0-9_]*")


@dataclass(frozen=True, slots=True)
class Script:
    """One scenario, checked."""

    path: Path
    name: str
    about: str
    seed: int
    players: tuple[Player, ...]
    device: Mapping[str, Any]
    """The profile's tables with the scenario's own keys over them; `profile` names it. Of the
    profile "here" nothing else is known: the device is to be measured."""
    model: Mapping[str, Any]
    """The shape's tables with the scenario's own keys over them; `shape` names it."""
    activity: Mapping[str, Any]
    engine: EngineSettings
    requests: tuple[Request, ...]
    """One for each client, in the file's order."""
    events: tuple[Disturbance, ...]
    expectations: tuple[Expectation, ...]
    replay: ReplaySettings
    sweep: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Dotted key -> the values it takes; one that the command line sets is not swept."""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Dotted key -> what the command line or a sweep put in its place."""

    def where(self, table: str) -> str:
        """How a message about one of the plain tables begins."""
        return f"{self.path}: {table}"

    def played_by(self, player: Player) -> Script:
        """The script with the events that are this player's."""
        events = tuple(event for event in self.events if event.player in (None, player))
        return replace(self, events=events)

    def points(self) -> Iterator[tuple[str, Script]]:
        """Each point of the sweep with the word that names it; one, without a name, of none."""
        if not self.sweep:
            yield "", self
            return
        for values in itertools.product(*self.sweep.values()):
            point = dict(zip(self.sweep, values, strict=True))
            yield ",".join(map(str, values)), load_script(self.path, {**self.overrides, **point})


def load_script(path: Path, overrides: Mapping[str, Any] | None = None) -> Script:
    """Read and check a scenario; `overrides` are dotted keys with other values.

    ConfigError names the file, the key and what was expected.
    """
    changes = dict(overrides or {})
    document = read_toml(path)
    for dotted, value in changes.items():
        put(document, dotted, value, str(path))
    return _parse(path, ScriptTable(document, str(path)), changes)


def read_toml(path: Path) -> dict[str, Any]:
    """A TOML file's tables; ConfigError names the file, and the line of a slip."""
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not TOML: {error}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not TOML: it is not UTF-8 text") from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; give a scenario's file") from None


def put(document: dict[str, Any], dotted: str, value: Any, where: str) -> None:
    """Set a dotted key; a number in it counts the tables of a list, from 0."""
    *parents, last = dotted.split(".")
    place: Any = document
    for part in parents:
        if isinstance(place, dict):
            place = place.setdefault(part, {})
        else:
            place = place[_index(place, part, dotted, where)]
    if isinstance(place, dict):
        place[last] = value
    else:
        place[_index(place, last, dotted, where)] = value


def _index(place: Any, part: str, dotted: str, where: str) -> int:
    """A part of a dotted key as a place in a list."""
    if not isinstance(place, list):
        raise ConfigError(f"{where}: {dotted}: there is no table to set {part} in")
    if not part.isdecimal() or int(part) >= len(place):
        raise ConfigError(f"{where}: {dotted}: {part} is none of its {len(place)} entries, from 0")
    return int(part)


def _parse(path: Path, table: ScriptTable, overrides: Mapping[str, Any]) -> Script:
    table.only(SCRIPT_KEYS)
    requests = [request for row in table.tables("requests") for request in Request.from_table(row)]
    if not requests:
        table.refuse("requests", "missing; give at least one table [[requests]]")
    whole_sweep = _sweep(table.table("sweep"))
    expectations = [Expectation.from_table(row) for row in table.tables("expect")]
    _check_points(table, expectations, whole_sweep)
    players, events = _players(table), [Disturbance.from_table(r) for r in table.tables("events")]
    _check_events(table, players, events)
    _check_moments(table, requests, events)
    _check_replayed_file(table)
    sweep = {key: values for key, values in whole_sweep.items() if key not in overrides}
    if len(sweep) < len(whole_sweep):  # some points are out of reach now
        expectations = [e for e in expectations if AT not in e.figure + (e.over or "")]
    return Script(
        path=path,
        name=_name(path, table),
        about=table.text("about", ""),
        seed=table.whole("seed", 1, 0, MAX_SEED),
        players=players,
        device=included("devices", "profile", table.table("device"), path),
        model=included("models", "shape", table.table("model"), path),
        activity=table.table("activity").values,
        engine=EngineSettings.from_table(table.table("engine")),
        requests=tuple(requests),
        events=tuple(events),
        expectations=tuple(expectations),
        replay=ReplaySettings.from_table(table.table("replay"), path.parent),
        sweep=sweep,
        overrides=overrides,
    )


def _name(path: Path, table: ScriptTable) -> str:
    name = table.text("name")
    if not NAME.fullmatch(name):
        table.refuse("name", f"is {name!r}: give small letters, digits and _")
    if name != path.stem:
        table.refuse("name", f"is {name!r}, the file is {path.name}: they must be alike")
    return name


def _players(table: ScriptTable) -> tuple[Player, ...]:
    words = table.words("players") if table.has("players") else list(Player)
    if not words:
        table.refuse("players", "is empty: give simulate, replay or both")
    found = [
        ScriptTable({"players": word}, table.where).choice("players", Player) for word in words
    ]
    return tuple(dict.fromkeys(found))


def _check_events(
    table: ScriptTable, players: tuple[Player, ...], events: list[Disturbance]
) -> None:
    """Refuse events that one of the players cannot do."""
    for index, event in enumerate(events):
        is_replayed = Player.REPLAY in players and event.player is not Player.SIMULATE
        if is_replayed and event.deed in SIMULATED_ONLY:
            row = ScriptTable({}, table.where, f"events[{index}]")
            row.refuse("do", f'{event.deed} is only simulated; give it player = "simulate"')


def _check_moments(table: ScriptTable, requests: list[Request], events: list[Disturbance]) -> None:
    """Refuse moments that no run of this script comes to."""
    most = sum(sum(request.candidate_tokens()) for request in requests)
    for name, rows in (("requests", requests), ("events", events)):
        for row in rows:
            at_token = row.moment.at_token
            if at_token is not None and at_token > most:
                table.refuse(name, f"at_token = {at_token}: all requests give {most} tokens")


def _check_replayed_file(table: ScriptTable) -> None:
    """Refuse the shape of a small model where `[model]` names a file, which is replayed too."""
    replay = table.table("replay")
    for key in SHAPE_KEYS:
        if table.table("model").has("file") and replay.has(key):
            replay.refuse(key, "the file that model.file names has its own; leave one out")


def _sweep(table: ScriptTable) -> dict[str, tuple[Any, ...]]:
    for key in table.values:
        if key.partition(".")[0] not in SCRIPT_KEYS or key.partition(".")[0] == "sweep":
            table.refuse(key, 'not a key of a scenario; write "engine.memory" = [...]')
        if not table.words(key):
            table.refuse(key, "is empty: give the values it takes")
    return {key: tuple(values) for key, values in table.values.items()}


def _check_points(
    table: ScriptTable, expectations: list[Expectation], sweep: Mapping[str, tuple[Any, ...]]
) -> None:
    """Refuse figures of sweep points that do not exist."""
    points = {",".join(map(str, values)) for values in itertools.product(*sweep.values())}
    for index, expectation in enumerate(expectations):
        for figure in filter(None, (expectation.figure, expectation.over)):
            point = figure.partition(AT)[2]
            if AT in figure and point not in points:
                known = ", ".join(sorted(points - {""})) or "none"
                row = ScriptTable({}, table.where, f"expect[{index}]")
                row.refuse("figure", f"{figure}: the sweep has no such point; it has: {known}")
