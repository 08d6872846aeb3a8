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

    player = Player.REPLAY
    if list_library:
        playing.show_library(player, as_json=as_json)
        return
    playing.check_trace(trace)
    plays = playing.load_plays(list(words or []), player, seed, seeds, play_library=play_library)
    playing.show_results(play_all(plays, player, trace=trace), as_json=as_json)
