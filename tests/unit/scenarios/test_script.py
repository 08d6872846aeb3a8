"""Scenario files: what they say, and how a slip in one is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from polyneuron.config import FeedForwardMode
from polyneuron.errors import ConfigError
from polyneuron.scenarios.disturbance import Deed, ReadFault
from polyneuron.scenarios.engine_settings import Policy
from polyneuron.scenarios.expectation import Player
from polyneuron.scenarios.script import Script, load_script

PLAIN = """
name = "story"
[device]
profile = "here"
[[requests]]
prompt_tokens = 16
output_tokens = 32
"""


def load(folder: Path, text: str, overrides: dict[str, Any] | None = None) -> Script:
    path = folder / "story.toml"
    path.write_text(text)
    return load_script(path, overrides)


def complaint(folder: Path, text: str, overrides: dict[str, Any] | None = None) -> str:
    """What is said of a file after its name; one line."""
    with pytest.raises(ConfigError) as caught:
        load(folder, text, overrides)
    message = str(caught.value)
    assert message.startswith(f"{folder}/story.toml: ")
    assert "\n" not in message
    return message.removeprefix(f"{folder}/story.toml: ")


EVENT = PLAIN + "[[events]]\n"
EXPECT = PLAIN + "[[expect]]\n"
REPLAY = PLAIN + "[replay]\n"

SLIPS: list[tuple[str, str]] = [
    ("name = x\n", "not TOML: Invalid value (at line 1, column 8)"),
    (PLAIN + "[enigne]", "enigne: not a key here; did you mean engine?"),
    (PLAIN.replace('name = "story"', ""), "name: missing; give a string"),
    (PLAIN.replace("story", "tale"), "name: is 'tale', the file is story.toml: they must be alike"),
    (PLAIN.replace("story", "A b"), "name: is 'A b': give small letters, digits and _"),
    ('name = "story"', "requests: missing; give at least one table [[requests]]"),
    ('name = "story"\nrequests = 3', "requests: is 3: give tables, each under [[requests]]"),
    ("seed = -1" + PLAIN, "seed: is -1: give a whole number, 0 to 4294967295"),
    ("seed = true" + PLAIN, "seed: is True: give a whole number, 0 to 4294967295"),
    ("players = []" + PLAIN, "players: is empty: give simulate, replay or both"),
    ('players = ["replya"]' + PLAIN, "players: is 'replya'; did you mean replay?"),
    (PLAIN.replace("prompt_tokens = 16", ""), "requests[0].prompt_tokens: missing; give a whole"),
    (PLAIN + "best_off = 2", "requests[0].best_off: not a key here; did you mean best_of?"),
    (PLAIN + "ends_every = 2", "requests[0].ends_every: only candidates end early: give best_of"),
    (PLAIN + "at_ms = 1\nat_token = 2", "requests[0].at_token: at_ms is given too; leave one out"),
    (PLAIN + "at_token = 1\nevery_ms = 2", "requests[0].every_ms: at_token has no time to count"),
    (PLAIN + "at_token = 33", "requests: at_token = 33: all requests give 32 tokens"),
    (PLAIN + "at_ms = nan", "requests[0].at_ms: is nan: give a number, 0 or more"),
    (PLAIN + '[engine]\nmode = "exakt"', "engine.mode: is 'exakt'; did you mean exact?"),
    (PLAIN + '[engine]\npolicy = "llm"', "engine.policy: is 'llm'; did you mean llmflash?"),
    (PLAIN + '[engine]\nmemory = "7 elephants"', "engine.memory '7 elephants': not a size"),
    (PLAIN + "[engine]\nmemory = -1", "engine.memory: is -1: give a size: 3GiB, 3000MB or bytes"),
    (PLAIN + "[engine]\nmemory = 9\nffn_resident = 1.0", "engine.ffn_resident: memory is given"),
    (PLAIN + "[engine]\nffn_resident = 1.5", "engine.ffn_resident: is 1.5: give a number, 0 to 1"),
    (PLAIN + "[engine]\nhot_shares = [2]", "engine.hot_shares: holds 2: give numbers from 0 to 1"),
    (PLAIN + "[engine]\nhot_shares = 2", "engine.hot_shares: is 2: give a list in brackets"),
    (PLAIN + '[engine]\ndeterministic = "no"', "engine.deterministic: is 'no': give true or false"),
    (EVENT + 'do = "slow_flsh"', "events[0].do: is 'slow_flsh'; did you mean slow_flash?"),
    (EVENT + "at_ms = 1", "events[0].do: missing; give one of shrink_memory"),
    (EVENT + 'do = "lose_npu"', "events[0].at_token: missing; give at_token or at_ms"),
    (EVENT + 'do = "lose_npu"\nat_ms = 1\nms = 2', "events[0].ms: not a key here; known: at_ms"),
    (EVENT + 'do = "slow_flash"\nat_ms = 1', "events[0].factor: missing; give a number, 1 or more"),
    (EVENT + 'do = "slow_flash"\nat_ms = 1\nfactor = 0.5', "events[0].factor: is 0.5: give a numb"),
    (EVENT + 'do = "stall_npu"\nat_ms = 1', "events[0].ms: missing; give a number, 0 or more"),
    (EVENT + 'do = "shrink_memory"\nat_ms = 1', "events[0].memory: give either memory or ffn_resi"),
    (
        EVENT + 'do = "slow_flash"\nat_ms = 1\nfactor = 2\nfor_ms = 1\nfor_tokens = 2',
        "events[0].for_tokens: for_ms is given too; leave one out",
    ),
    (
        EVENT + 'do = "fail_read"\nat_ms = 1\ncount = 2\npersistent = true',
        "events[0].count: persistent = true means all reads; leave one out",
    ),
    (
        EVENT + 'do = "throttle"\ncpu = 0.5\nat_ms = 0',
        'events[0].do: throttle is only simulated; give it player = "simulate"',
    ),
    (
        EVENT + 'do = "lose_npu"\nat_token = 40',
        "events: at_token = 40: all requests give 32 tokens",
    ),
    (EXPECT + 'figure = "hit_rat"\nmin = 1', "expect[0].figure: is 'hit_rat'; did you mean hit_ra"),
    (EXPECT + 'figure = "hit_rate"', "expect[0].figure: nothing is expected of it; give one of"),
    (EXPECT + 'figure = "hit_rate"\nnear = 1', "expect[0].within: near and within go together"),
    (EXPECT + 'figure = "tokens"\nmin = 2\nmax = 1', "expect[0].min: is above max: nothing could"),
    (EXPECT + 'figure = "tokens@3"\nmin = 2', "expect[0].figure: tokens@3: the sweep has no such"),
    (EXPECT + 'figure = "tokens"\nover = "token"\nmin = 2', "expect[0].over: is 'token'; did you"),
    (PLAIN + '[sweep]\n"enigne.memory" = [1]', "sweep.enigne.memory: not a key of a scenario"),
    (PLAIN + '[sweep]\n"engine.memory" = []', "sweep.engine.memory: is empty: give the values"),
    (PLAIN.replace("here", "twelve"), "device.profile: is 'twelve', and "),
    (
        REPLAY + 'model = "a.ncf"\nlayers = 3',
        "replay.layers: the file that model names has its own",
    ),
    (REPLAY + 'npu = "natif"', "replay.npu: 'natif': give native, native:KEY=VALUE"),
    (REPLAY + "memory = 9\nffn_resident = 1", "replay.ffn_resident: memory is given too"),
]


class TestSlips:
    @pytest.mark.parametrize(("text", "expected"), SLIPS)
    def test_slip_is_named(self, tmp_path: Path, text: str, expected: str) -> None:
        assert complaint(tmp_path, text).startswith(expected)

    def test_missing_file_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(
            ConfigError, match=r"none\.toml: No such file or directory; give a scen"
        ):
            load_script(tmp_path / "none.toml")

    def test_file_that_is_no_text_is_named(self, tmp_path: Path) -> None:
        path = tmp_path / "story.toml"
        path.write_bytes(b"\xff\xfe")
        with pytest.raises(ConfigError, match="not TOML: it is not UTF-8 text"):
            load_script(path)

    @pytest.mark.parametrize(
        ("key", "expected"),
        [
            ("requests.1.best_of", "requests.1.best_of: 1 is none of its 1 entries, from 0"),
            ("requests.first.best_of", "requests.first.best_of: first is none of its 1 entries"),
            ("name.first.best", "name.first.best: there is no table to set first in"),
            ("engine.memroy", "engine.memroy: not a key here; did you mean memory?"),
        ],
    )
    def test_override_that_leads_nowhere(self, tmp_path: Path, key: str, expected: str) -> None:
        assert complaint(tmp_path, PLAIN, {key: 1}).startswith(expected)


class TestValues:
    def test_what_is_not_said_has_defaults(self, tmp_path: Path) -> None:
        script = load(tmp_path, PLAIN)
        assert (script.seed, script.players) == (1, (Player.SIMULATE, Player.REPLAY))
        assert script.engine.policy is Policy.POWERINFER2
        assert script.requests[0].moment.at_ns == 0
        assert list(script.points()) == [("", script)]

    def test_everything_is_read(self, tmp_path: Path) -> None:
        script = load(
            tmp_path,
            EVENT
            + 'do = "fail_read"\nat_token = 3\nkind = "short"\ncount = 4\n'
            + '[[events]]\ndo = "stall_flash"\nat_ms = 1.5\nms = 30\nevery = 9\nfor_tokens = 5\n'
            + '[engine]\nmode = "predicted"\nmemory = "3GiB"\nhot_shares = [0.5, 0.7]\n'
            + '[[expect]]\nfigure = "hit_rate"\nnear = 0.9\nwithin = 0.1\nplayer = "replay"\n',
        )
        fail, stall = script.events
        assert (fail.deed, fail.kind, fail.count) == (Deed.FAIL_READ, ReadFault.SHORT, 4)
        assert (stall.moment.at_ns, stall.stall_ns, stall.for_tokens) == (1_500_000, 30_000_000, 5)
        assert script.engine.mode is FeedForwardMode.PREDICTED
        assert (script.engine.memory_bytes, script.engine.hot_shares) == (3 << 30, (0.5, 0.7))
        assert script.expectations[0].player is Player.REPLAY

    def test_events_of_the_other_player_are_left_out(self, tmp_path: Path) -> None:
        text = EVENT + 'do = "throttle"\ncpu = 0.5\nat_ms = 0\nplayer = "simulate"\n'
        script = load(tmp_path, text + '[[events]]\ndo = "lose_npu"\nat_ms = 0\n')
        deeds = {player: [e.deed for e in script.played_by(player).events] for player in Player}
        assert deeds == {
            Player.SIMULATE: [Deed.THROTTLE, Deed.LOSE_NPU],
            Player.REPLAY: [Deed.LOSE_NPU],
        }

    def test_clients_come_one_after_another(self, tmp_path: Path) -> None:
        script = load(tmp_path, PLAIN + "at_ms = 2\ncount = 3\nevery_ms = 0.5")
        times = [request.moment.at_ns for request in script.requests]
        assert times == [2_000_000, 2_500_000, 3_000_000]

    def test_candidates_end_from_the_last_on(self, tmp_path: Path) -> None:
        request = load(tmp_path, PLAIN + "best_of = 4\nends_every = 12").requests[0]
        assert request.candidate_tokens() == (32, 32, 24, 12)

    def test_profile_lies_below_the_scenario(self, tmp_path: Path) -> None:
        (tmp_path / "board.toml").write_text("name = 'b'\n[storage]\ndepth = 4\nreader = 'big'\n")
        own = PLAIN.replace("here", "board.toml") + "[device.storage]\ndepth = 8\n"
        storage = load(tmp_path, own).device["storage"]
        assert storage == {"depth": 8, "reader": "big"}

    def test_damaged_profile_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "board.toml").write_text("name = x\n")
        path = tmp_path / "story.toml"
        path.write_text(PLAIN.replace("here", "board.toml"))
        with pytest.raises(ConfigError, match=r"board\.toml: not TOML: .*line 1"):
            load_script(path)


class TestSweep:
    SWEPT = PLAIN + '[sweep]\n"engine.queue_depth" = [8, 16]\n"requests.0.best_of" = [1, 2]\n'

    def test_points_are_in_order(self, tmp_path: Path) -> None:
        points = list(load(tmp_path, self.SWEPT).points())
        assert [name for name, _ in points] == ["8,1", "8,2", "16,1", "16,2"]
        last = points[-1][1]
        assert (last.engine.queue_depth, last.requests[0].best_of) == (16, 2)

    def test_override_ends_a_sweep_of_its_key(self, tmp_path: Path) -> None:
        text = self.SWEPT + '[[expect]]\nfigure = "tokens@8,1"\nmin = 1\n'
        text += '[[expect]]\nfigure = "tokens"\nmin = 1\n'
        script = load(tmp_path, text, {"engine.queue_depth": 4, "requests.0.best_of": 1})
        assert [name for name, _ in script.points()] == [""]
        assert [wanted.figure for wanted in script.expectations] == ["tokens"]
