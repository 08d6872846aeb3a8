"""`plan` on a machine that was measured, and `run --plan`: what is refused, and how."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from polyneuron.cli.main import main
from polyneuron.cli.options import planned
from polyneuron.config import EngineConfig, usable_cores
from polyneuron.errors import ConfigError
from polyneuron.io.ncf_format import Layout
from polyneuron.measure import device_store
from polyneuron.measure.device_profile import device_key
from polyneuron.model.convert import convert
from polyneuron.planning.plan_file import read_plan
from tests.support.made_up_device import make_device
from tests.support.tiny_gguf import TinyModel, write_tiny_gguf

MODEL = TinyModel(family="bamboo", num_layers=4, d_ff=160, tensor_type="Q4_0")
WORDS = ("--memory", "2GiB", "--ffn-resident", 0.6, "--mode", "exact", "-c", 64)


def run(*words: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main(list(map(str, words)))
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file in bundles, on a machine that nobody has measured."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "tiny.ncf"
    convert(write_tiny_gguf(tmp_path / "tiny.gguf", MODEL), path, layout=Layout.BUNDLES)
    return path


@pytest.fixture
def measured(model: Path) -> Path:
    """The same on a machine with a profile."""
    device_store.store_profile(replace(make_device(), key=device_key(model)))
    return model


def as_json(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, Any]:
    assert run(*words, "--json") == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


class TestPlan:
    def test_unmeasured_says_how(self, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert run("plan", "-m", model, *WORDS) == 0
        assert "polyneuron profile --device measures" in capsys.readouterr().out
        found = as_json(capsys, "plan", "-m", model, *WORDS)
        assert found["expected"] is None and found["plan"] is None

    def test_measured_says_speed(self, measured: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert run("plan", "-m", measured, *WORDS) == 0
        shown = capsys.readouterr().out
        assert "expected: " in shown and "tok/s" in shown and "plan: exact: " in shown
        found = as_json(capsys, "plan", "-m", measured, *WORDS)
        assert found["expected"]["tokens_per_second"] > 0
        assert 0 < found["expected"]["hit_rate"] <= 1
        assert found["plan"]["mode"] == "exact"
        assert set(found["plan"]["hot_neurons"]) == {"1", "2", "4", "8"}

    def test_output_measures_first(
        self, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        made = replace(make_device(), key=device_key(model))
        monkeypatch.setattr(device_store, "profile_device", lambda folder, progress: made)
        output = tmp_path / "plan.toml"
        assert run("plan", "-m", model, *WORDS, "-o", output) == 0
        assert read_plan(output).num_ctx == 64

    def test_own_plans_are_replaced_and_nothing_else(
        self, measured: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        output = tmp_path / "plan.toml"
        for memory in ("2GiB", "3GiB"):
            words = ("--memory", memory, *WORDS[2:])
            assert run("plan", "-m", measured, *words, "-o", output) == 0
        assert read_plan(output).memory_bytes == 3 << 30
        output.write_text("my own = 'notes'\n")
        assert run("plan", "-m", measured, *WORDS, "-o", output) == 2
        assert "exists and is no plan" in capsys.readouterr().err
        assert output.read_text() == "my own = 'notes'\n"

    def test_no_such_folder(
        self, measured: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert run("plan", "-m", measured, *WORDS, "-o", tmp_path / "no" / "plan.toml") == 2
        assert "no: no such folder; make it first" in capsys.readouterr().err


class TestRun:
    @pytest.fixture
    def plan(self, measured: Path, tmp_path: Path) -> Path:
        output = tmp_path / "plan.toml"
        assert run("plan", "-m", measured, *WORDS, "-o", output) == 0
        return output

    def test_plan_sets_the_engine(self, measured: Path, plan: Path) -> None:
        config = planned(EngineConfig(), plan, str(measured))
        assert (config.memory_bytes, config.num_ctx) == (2 << 30, 64)
        assert (str(config.mode), config.ffn_resident) == ("exact", 0.6)

    @pytest.mark.parametrize(
        "flag, settings",
        [("--memory", {"memory_bytes": 1 << 30}), ("--mode", {"mode": "dense"}),
         ("-t", {"num_workers": 1}), ("-c", {"num_ctx": 32}), ("-tb", {"num_npu_threads": 1}),
         ("--ffn-resident", {"ffn_resident": 0.5})],
    )  # fmt: skip
    def test_flags_that_it_sets_are_refused(
        self, measured: Path, plan: Path, flag: str, settings: dict[str, Any]
    ) -> None:
        with pytest.raises(ConfigError, match=f"^{flag}: the plan .* sets it"):
            planned(EngineConfig(**settings), plan, str(measured))

    def test_cores_may_be_named_beside_it(self, measured: Path, plan: Path) -> None:
        core = usable_cores()[0]
        assert planned(EngineConfig(cores=(core,)), plan, str(measured)).cores == (core,)

    def test_cores_it_names_are_refused(self, measured: Path, plan: Path) -> None:
        core = usable_cores()[0]
        edited = plan.read_text().replace("[engine]", f"[engine]\ncores = [{core}]")
        plan.write_text(edited)
        assert planned(EngineConfig(), plan, str(measured)).cores == (core,)
        with pytest.raises(ConfigError, match=r"^-C or -Cr: the plan .* sets it"):
            planned(EngineConfig(cores=(core,)), plan, str(measured))

    @pytest.mark.parametrize("key", ["cores", "io_cores"])
    def test_cores_that_are_gone_are_named(self, measured: Path, plan: Path, key: str) -> None:
        plan.write_text(plan.read_text().replace("[engine]", f"[engine]\n{key} = [4097]"))
        with pytest.raises(
            ConfigError, match=rf"engine\.{key}: core 4097 does not exist or is not"
        ):
            planned(EngineConfig(), plan, str(measured))

    def test_bad_plan_ends_with_one_line(
        self, measured: Path, plan: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        plan.write_text(plan.read_text().replace('mode = "exact"', 'mode = "fast"'))
        assert run("run", "-m", measured, "--plan", plan, "-p", "x") == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"polyneuron: error: --plan {plan}: engine.mode is 'fast'")
