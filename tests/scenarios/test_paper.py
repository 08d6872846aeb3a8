"""The paper's scenarios: one set of constants for each device and model, and figures that hold."""

from pathlib import Path
from typing import Any

import pytest

from polyneuron.scenarios.device_model import with_fitted
from polyneuron.scenarios.paper_table import PAPER, paper_rows
from polyneuron.scenarios.script import read_toml
from tests.support.simulated import SCENARIOS

FILES = sorted(PAPER.glob("*.toml"))
MAY_SET = {
    "device": {"profile"},
    "model": {"shape"},
    "engine": {"policy", "memory", "ffn_resident", "context"},
}
MAY_SWEEP = {"model.shape", "engine.policy", "engine.memory", "requests.0.best_of"}
MAY_HAVE = {"name", "about", "players", "requests", "expect", "sweep", *MAY_SET}


def keys(table: Any) -> set[str]:
    return set(table)


class TestOneSetOfConstants:
    @pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
    def test_no_scenario_has_its_own(self, path: Path) -> None:
        script = read_toml(path)
        assert keys(script) <= MAY_HAVE
        for table, allowed in MAY_SET.items():
            assert keys(script.get(table, {})) <= allowed
        assert keys(script.get("sweep", {})) <= MAY_SWEEP

    def test_what_is_fitted_is_not_what_the_paper_states(self) -> None:
        table = read_toml(SCENARIOS / "devices" / "oneplus12.toml")
        _, reasons = with_fitted(table, "oneplus12")
        stated = {f"{part}.{key}" for part in ("cpu", "npu", "storage") for key in table[part]}
        assert not stated & set(reasons)

    def test_every_expectation_has_its_source(self) -> None:
        for path in FILES:
            for wanted in read_toml(path)["expect"]:
                assert wanted["source"].startswith("PAPER 3."), path.name


def test_ladder_holds() -> None:
    rows = paper_rows([PAPER / "ladder.toml"], jobs=1)
    assert [row.figure for row in rows] == [
        "baseline", "bundles", "cache", "pipeline", "powerinfer2",
    ]  # fmt: skip
    assert all(row.ok for row in rows), [(row.figure, row.difference) for row in rows]
