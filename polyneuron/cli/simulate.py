"""`polyneuron simulate`: scenarios in model time."""

from __future__ import annotations

from typing import Annotated

from polyneuron.cli import options, playing
from polyneuron.cli.options import option
from polyneuron.errors import ConfigError

MAX_JOBS = 1024


def simulate(
    words: playing.Words = None,
    seed: playing.Seed = -1,
    seeds: playing.Seeds = 1,
    jobs: Annotated[
        int, option("--jobs", "-j", min=1, max=MAX_JOBS, text="processes for sweeps and seeds")
    ] = 1,
    ray: Annotated[
        str | None, option("--ray", text="tasks of this Ray cluster instead: its host:port")
    ] = None,
    trace: playing.Trace = None,
    play_library: playing.All = False,
    list_library: playing.List = False,
    as_json: options.Json = False,
) -> None:
    """Play scenarios in model time: the engine's policies on a device's cost model."""
    from polyneuron.scenarios.expectation import Player
    from polyneuron.scenarios.playing import play_all

    player = Player.SIMULATE
    if list_library:
        playing.show_library(player, as_json=as_json)
        return
    playing.check_trace(trace)
    if ray is not None and trace is not None:
        raise ConfigError(f"--trace {trace}: another machine would write it; leave --ray out")
    plays = playing.load_plays(list(words or []), player, seed, seeds, play_library=play_library)
    playing.show_results(play_all(plays, player, jobs, trace, ray), as_json=as_json)
