"""Sweeps as tasks of a Ray cluster: the same results as here."""

from __future__ import annotations

import pytest

from polyneuron.actors.cluster import ClusterConfig, PrivateCluster
from polyneuron.scenarios.expectation import Player
from polyneuron.scenarios.library import find_scenario
from polyneuron.scenarios.playing import Play, play_all
from tests.support.program import run

pytestmark = pytest.mark.ray

STORE_BYTES = 80 << 20


class TestRayTurns:
    def test_results_are_the_same(self) -> None:
        names = ("several_clients", "cold_start")
        plays = [Play.load(find_scenario(name), {}, Player.SIMULATE) for name in names]
        here = list(play_all(plays, Player.SIMULATE))
        with PrivateCluster(ClusterConfig(STORE_BYTES, num_cpus=2)):
            there = list(play_all(plays, Player.SIMULATE, ray="here"))
        assert there == here
        assert all(result.timeline_sha256 for result in there)

    def test_refused_scenario_is_the_users(self) -> None:
        path = find_scenario("cold_start")
        play = Play.load(path, {"engine.context": 8}, Player.SIMULATE)
        with (
            PrivateCluster(ClusterConfig(STORE_BYTES, num_cpus=1)),
            pytest.raises(Exception, match=r"engine\.context is 8") as caught,
        ):
            list(play_all([play], Player.SIMULATE, ray="here"))
        assert type(caught.value).__name__ == "ConfigError"

    @pytest.mark.parametrize(
        ("address", "message"),
        [
            ("auto", "--ray auto: give the address of a Ray cluster's head, host:port"),
            ("127.0.0.1:1", "--ray 127.0.0.1:1: nothing answers there"),
            ("127.0.0.1:99999", "--ray 127.0.0.1:99999: nothing answers there"),
        ],
    )
    def test_address_without_a_cluster(
        self, address: str, message: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert run("simulate", "cold_start", "--ray", address) == 2
        assert message in capsys.readouterr().err

    def test_traces_stay_here(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert run("simulate", "cold_start", "--ray", "auto", "--trace", "t.jsonl") == 2
        assert "--trace t.jsonl: another machine would write it" in capsys.readouterr().err
