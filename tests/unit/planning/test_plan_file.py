"""Plans are written, edited by people, and read back with every slip named."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyneuron.config import EngineConfig, FeedForwardMode, KvType
from polyneuron.errors import ConfigError
from polyneuron.planning.plan_file import check_plan, plan_file, plan_text, read_plan
from polyneuron.planning.planner import Plan
from tests.support.made_up_device import make_planner, shape_source

MEMORY = 3600 << 20
SOURCE = shape_source()


@lru_cache(maxsize=1)
def planned() -> Plan:
    return make_planner(MEMORY).plan()


@pytest.fixture
def plan() -> Plan:
    return planned()


@pytest.fixture
def path(tmp_path: Path, plan: Plan) -> Path:
    path = tmp_path / "plan.toml"
    path.write_text(plan_text(plan, plan_file(plan, SOURCE, 1024)))
    return path


class TestWritten:
    def test_comes_back_as_it_was(self, path: Path, plan: Plan) -> None:
        assert read_plan(path) == plan_file(plan, SOURCE, 1024)

    def test_says_what_to_expect(self, path: Path) -> None:
        head = path.read_text().splitlines()[:3]
        assert all(line.startswith("# ") for line in head)
        assert "tok/s" in head[1] and "against dense" in head[2]

    @given(name=st.text(st.characters(exclude_categories=["Cs"]), max_size=20))
    def test_any_file_name_is_toml(self, name: str) -> None:
        plan = planned()
        file = replace(plan_file(plan, SOURCE, 1024), model_file=name)
        assert tomllib.loads(plan_text(plan, file))["model"]["file"] == name

    def test_sets_the_engine(self, path: Path) -> None:
        config = EngineConfig(**read_plan(path).settings())
        assert config.memory_bytes == MEMORY
        assert config.mode is FeedForwardMode.EXACT
        assert config.queue_depth in (8, 16, 32, 64)

    def test_share_that_stays_is_kept(self, path: Path) -> None:
        assert read_plan(path).settings()["ffn_resident"] is None
        path.write_text(path.read_text().replace("ffn_resident = 1.0", "ffn_resident = 0.5"))
        assert read_plan(path).settings()["ffn_resident"] == 0.5

    def test_cores_are_kept_where_they_are_told(self, plan: Plan, path: Path) -> None:
        assert plan_file(plan, SOURCE, 1024).cores == {}
        told = {"cores": (0, 4, 7), "io_cores": (7, 4, 0)}
        file = replace(plan_file(plan, SOURCE, 1024), cores=told)
        path.write_text(plan_text(plan, file))
        assert read_plan(path) == file
        config = EngineConfig(**file.settings())
        assert (config.cores, config.io_cores) == ((0, 4, 7), (7, 4, 0))

    def test_cores_come_from_the_configuration(self) -> None:
        plan = make_planner(MEMORY, io_cores=(1, 0)).plan()
        assert plan_file(plan, SOURCE, 1024).cores == {"io_cores": (1, 0)}

    @pytest.mark.parametrize("npu", ["native:graphs=4", "openvino:NPU", "none"])
    def test_who_computes_prompts_may_be_named(self, path: Path, npu: str) -> None:
        assert "npu" not in read_plan(path).settings()
        path.write_text(path.read_text().replace("queue_depth", f'npu = "{npu}"\nqueue_depth', 1))
        settings = read_plan(path).settings()
        assert settings["npu"] == npu
        assert (settings["num_npu_threads"] == 0) == (npu == "none")

    def test_short_prompts_are_told(self, plan: Plan, path: Path) -> None:
        tokens = plan.chosen.budget.layout.config.sparse_prompt_tokens
        assert tokens and read_plan(path).settings()["sparse_prompt_tokens"] == tokens
        line = next(x for x in path.read_text().splitlines() if x.startswith("sparse_prompt"))
        path.write_text(path.read_text().replace(line, "sparse_prompt_tokens = 0"))
        assert EngineConfig(**read_plan(path).settings()).sparse_tokens == 0
        path.write_text(path.read_text().replace("sparse_prompt_tokens = 0", ""))
        assert EngineConfig(**read_plan(path).settings()).sparse_tokens == 4  # max_sequences

    def test_keys_and_values_may_be_smaller(self, path: Path) -> None:
        whole = path.read_text()
        path.write_text(whole.replace('kv_type = "f16"', 'kv_type = "q8"'))
        assert EngineConfig(**read_plan(path).settings()).kv_type is KvType.Q8
        lines = [line for line in whole.splitlines() if not line.startswith("kv_type")]
        path.write_text("\n".join(lines))
        assert "kv_type" not in read_plan(path).settings()  # a file from before it had one

    def test_sizes_may_be_written_out(self, path: Path) -> None:
        path.write_text(path.read_text().replace('"3600MiB"', '"3GiB"'))
        assert read_plan(path).memory_bytes == 3 << 30


class TestEdited:
    @pytest.mark.parametrize(
        "old, new, complaint",
        [
            ('mode = "exact"', 'mode = "quick"', "engine.mode is 'quick'; give one of dense"),
            ("queue_depth = ", "queue_dept = ", "engine.queue_depth is missing"),
            ("workers = ", "colour = 1\nworkers = ", "engine.colour is not known; known here"),
            ("workers = ", "workers = 9000 #", "engine.workers is '9000'; give a whole number"),
            ("lookahead = false", "lookahead = 0", "engine.lookahead is '0'; give true or false"),
            ("workers = ", "io_cores = 7\nworkers = ", "engine.io_cores is '7'; give numbers of"),
            ("workers = ", "cores = [1.5]\nworkers = ", "engine.cores is '[1.5]'; give numbers"),
            (
                "sparse_prompt_tokens = ",
                "sparse_prompt_tokens = 65 #",
                "engine.sparse_prompt_tokens is '65'; give a whole number from 0 to 64",
            ),
            ("workers = ", 'npu = "tpu"\nworkers = ', "engine.npu is 'tpu'; give native, native:"),
            ('"3600MiB"', '"much"', "memory.budget is 'much'; give bytes"),
            ('"3600MiB"', "true", "memory.budget is 'True'; give bytes"),
            ("ffn_resident = 1.0", "ffn_resident = 2", "memory.ffn_resident is '2'; give a number"),
            ('kv_type = "f16"', 'kv_type = "q5"', "memory.kv_type is 'q5'; give one of f16, q8"),
            ('kv_type = "f16"', "kv_type = 8", "memory.kv_type is '8'; give one of f16, q8, q4"),
            ("[memory]", "[memories]", "memory is missing; write a table"),
            ("1 = 0", "many = 0", "hot_clusters.many is no number of sequences"),
            ("1 = 0", "1 = -1", "hot_clusters.1 is '-1'; give a whole number"),
            ("format_version = 1", "format_version = 7", "format_version is 7; plan anew"),
            ("format_version = 1", "format_version =", "not a TOML file"),
        ],
    )
    def test_slips_are_named(self, path: Path, old: str, new: str, complaint: str) -> None:
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new, 1))
        with pytest.raises(ConfigError) as refusal:
            read_plan(path)
        message = str(refusal.value)
        assert message.startswith(f"--plan {path}: ") and complaint in message
        assert "\n" not in message

    def test_no_file_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="No such file"):
            read_plan(tmp_path / "none.toml")

    def test_other_bytes_are_no_plan(self, tmp_path: Path) -> None:
        (tmp_path / "plan.toml").write_bytes(b"\xff\xfe\x00")
        with pytest.raises(ConfigError, match="not a TOML file"):
            read_plan(tmp_path / "plan.toml")


class TestChecked:
    def test_its_own_model_is_right(self, path: Path) -> None:
        check_plan(read_plan(path), path, SOURCE, MEMORY)

    def test_another_model_is_refused(self, path: Path) -> None:
        with pytest.raises(
            ConfigError, match=r"was made for bamboo-7b\.ncf, whose content differs"
        ):
            check_plan(read_plan(path), path, shape_source("bamboo-7b", 4), MEMORY)

    def test_a_larger_budget_than_now_is_refused(self, path: Path) -> None:
        with pytest.raises(ConfigError, match=r"memory\.budget is 3600 MiB and 3000 MiB are free"):
            check_plan(read_plan(path), path, SOURCE, 3000 << 20)
