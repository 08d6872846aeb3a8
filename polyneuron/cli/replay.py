"""`polyneuron replay`: scenarios on the real actors."""

from __future__ import annotations

from polyneuron.cli import options, playing


def replay(
    words: playing.Words = None,
    seed: playing.Seed = -1,
    seeds: playing.Seeds = 1,
    trace: playing.Trace = None,
    play_library: playing.All = False,
    list_library: playing.List = False,
    as_json: options.Json = False,
) -> None:
    """Play scenarios on the real actors, with real reads and real losses."""
    from polyneuron.scenarios.expectation import Player
    from polyneuron.scenarios.playing import play_all

    if list_library:
        playing.show_library(Player.REPLAY, as_json=as_json)
        return
    playing.check_trace(trace)
    chosen = list(words or [])
    if play_library:
        chosen += playing.library_for(Player.REPLAY, with_folders=False)
    plays = playing.load_plays(chosen, Player.REPLAY, seed, seeds)
    playing.show_results(play_all(plays, Player.REPLAY, trace=trace), as_json=as_json)
