"""A scenario that names a model file: what the simulator takes from it, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from polyneuron.errors import ConfigError
from polyneuron.io.predictor_file import predictor_path
from polyneuron.io.profile_file import profile_path
from polyneuron.planning.known_model import known_model
from polyneuron.planning.source import open_source
from polyneuron.scenarios.counted_activity import counted_activity
from polyneuron.scenarios.device_model import DeviceModel
from polyneuron.scenarios.file_shape import modelled
from polyneuron.scenarios.result import Figures
from polyneuron.scenarios.script import Script, load_script
from polyneuron.scenarios.simulation import SimulatedRun
from tests.support.made_up_device import make_device
from tests.support.simulated import device
from tests.support.sparse_files import LAYERS, NEURONS, write_sparse_file

HERE = DeviceModel.of_profile(make_device(), 8 << 30)
PAGE = """
name = "tried"
[device]
profile = "here"
[model]
file = "sparse.ncf"
[engine]
mode = "predicted"
ffn_resident = 0.5
context = 256
max_sequences = 1
[[requests]]
prompt_tokens = 8
output_tokens = 40
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("models")
    write_sparse_file(found)
    return found


def script(folder: Path, page: str = PAGE, **changes: object) -> Script:
    path = folder / "tried.toml"
    path.write_text(page)
    return load_script(path, {key.replace("__", "."): value for key, value in changes.items()})


def play(folder: Path, page: str = PAGE, **changes: object) -> Figures:
    return SimulatedRun(script(folder, page, **changes), None, HERE).play()


class TestActivity:
    @pytest.mark.parametrize("is_predicted", [False, True])
    def test_rates_are_those_beside_the_file(self, folder: Path, is_predicted: bool) -> None:
        source = open_source(folder / "sparse.ncf")
        found = counted_activity(source, is_predicted=is_predicted)
        assert found.layer_rates.shape == (LAYERS, NEURONS)
        model = known_model(source, make_device(), 256)
        assert model.predictor is not None
        assert model.hotness is not None
        wanted = model.predictor.asked if is_predicted else model.hotness
        assert found.layer_rates.mean() == pytest.approx(wanted.needed(), rel=0.01)
        assert found.needed(NEURONS, 4).mean() == pytest.approx(wanted.needed(4), rel=0.01)
        assert (found.gate < 1) == is_predicted

    def test_a_file_without_a_profile_has_a_supposed_law(self, tmp_path: Path) -> None:
        source = open_source(write_sparse_file(tmp_path, profiled=False))
        found = counted_activity(source, is_predicted=False)
        assert np.all(np.diff(found.layer_rates[0]) <= 0)  # the file is in that order
        assert 0.1 < found.layer_rates.mean() < 0.15
        assert np.all(found.novelties == 1.0)


class TestPlan:
    def test_plan_is_the_engines(self, folder: Path) -> None:
        made = script(folder)
        shape, own = modelled(made, HERE)
        assert own is not None
        assert (shape.layers, shape.neurons, shape.matrices) == (LAYERS, NEURONS, 3)
        run = SimulatedRun(made, None, HERE)
        assert run.engine.cold_slots == own.budget.cold_slots > NEURONS
        assert run.engine.plan.used_bytes == own.budget.total_bytes
        assert run.engine.costs().num_cores == own.config.num_workers

    def test_hot_shares_are_whole_clusters_that_are_pinned(self, folder: Path) -> None:
        run = SimulatedRun(script(folder, engine__hot_shares=[0.25, 0.125]), None, HERE)
        assert run.engine.hot_for(1) == run.engine.pinned_neurons == NEURONS // 4
        assert run.engine.hot_for(2) < run.engine.hot_for(1)

    def test_memory_taken_away_is_taken_from_the_cache(self, folder: Path) -> None:
        less = PAGE + '\n[[events]]\ndo = "shrink_memory"\nat_token = 10\nffn_resident = 0.35\n'
        usual, shrunk = play(folder), play(folder, less)
        assert (shrunk["hit_rate"] or 1) < (usual["hit_rate"] or 0)
        few = PAGE + '\n[[events]]\ndo = "shrink_memory"\nat_token = 10\nffn_resident = 0.01\n'
        with pytest.raises(ConfigError, match="at least"):
            play(folder, few)


class TestFigures:
    def test_more_memory_is_never_slower_and_misses_less(self, folder: Path) -> None:
        found = [play(folder, engine__ffn_resident=share) for share in (0.3, 0.6, 1.0)]
        rates = [figures["decode_tok_s"] or 0 for figures in found]
        assert rates == sorted(rates)
        read = [figures["bytes_per_token"] or 0 for figures in found]
        assert read[0] > read[1] > read[2] == 0

    @pytest.mark.parametrize("share", [0.4, 0.6])
    def test_simulated_speed_is_what_the_planner_expects(self, folder: Path, share: float) -> None:
        """Of a long answer: the planner does not count what the first tokens miss."""
        long = {"requests__0__output_tokens": 400, "engine__context": 512}
        made = script(folder, engine__ffn_resident=share, **long)
        _, own = modelled(made, HERE)
        assert own is not None
        expected = own.cost_model.step(own.knobs(1, own.budget.cold_slots))
        figures = SimulatedRun(made, None, HERE).play()
        assert figures["decode_tok_s"] == pytest.approx(expected.tokens_per_s, rel=0.15)
        assert figures["hit_rate"] == pytest.approx(expected.hit_rate, abs=0.01)
        assert figures["reads_per_token"] == pytest.approx(expected.reads, rel=0.1)

    @pytest.mark.parametrize("mode", ["exact", "dense"])
    def test_other_modes_play(self, folder: Path, mode: str) -> None:
        resident = play(folder, engine__mode=mode, engine__ffn_resident=1.0)
        half = play(folder, engine__mode=mode)
        assert resident["bytes_per_token"] == 0
        assert (half["bytes_per_token"] or 0) > 0
        assert (half["decode_tok_s"] or 0) < (resident["decode_tok_s"] or 0)

    @pytest.mark.parametrize("share", [0.1, 0.25])
    def test_layers_that_pass_through_are_read_for_every_token(
        self, folder: Path, share: float
    ) -> None:
        made = script(folder, engine__mode="exact", engine__ffn_resident=share)
        _, own = modelled(made, HERE)
        assert own is not None
        assert own.budget.streamed_bytes > 0
        expected = own.cost_model.step(own.knobs(1, own.budget.cold_slots))
        figures = SimulatedRun(made, None, HERE).play()
        assert (figures["bytes_per_token"] or 0) >= own.budget.streamed_bytes
        assert figures["bytes_per_token"] == pytest.approx(expected.bytes_read, rel=0.15)
        assert figures["decode_tok_s"] == pytest.approx(expected.tokens_per_s, rel=0.15)

    def test_same_seed_same_figures(self, folder: Path) -> None:
        assert play(folder) == play(folder)
        assert play(folder) != play(folder, seed=2)

    @pytest.mark.parametrize("policy", ["powerinfer2", "llmflash", "mmap"])
    def test_a_file_plays_on_a_phone(self, folder: Path, policy: str) -> None:
        made = script(folder, engine__policy=policy, device__profile="oneplus12")
        figures = SimulatedRun(made, None, device()).play()
        assert (figures["decode_tok_s"] or 0) > 0

    @pytest.mark.parametrize("policy", ["cache", "bundles"])
    def test_rungs_of_the_ladder_read_more(self, folder: Path, policy: str) -> None:
        rung, whole = play(folder, engine__policy=policy), play(folder)
        assert (rung["decode_tok_s"] or 0) < (whole["decode_tok_s"] or 0)


class TestRefused:
    @pytest.mark.parametrize(
        ("old", "new", "complaint"),
        [
            ('"sparse.ncf"', '"none.ncf"', "model.file: .*none.ncf: no such file; give a path"),
            ('"sparse.ncf"', "7", "model.file is 7: give a text"),
            ("[engine]", "layers = 3\n[engine]", "model.layers: the file that file names"),
            ("[engine]", "[activity]\nactive = 0.1\n[engine]", "activity.active: it was counted"),
            ("[engine]", "[replay]\nlayers = 3\n[engine]", "replay.layers: the file that model"),
        ],
    )
    def test_one_line_names_key_and_cure(
        self, folder: Path, old: str, new: str, complaint: str
    ) -> None:
        with pytest.raises(ConfigError, match=complaint) as found:
            play(folder, PAGE.replace(old, new, 1))
        assert "\n" not in str(found.value)

    def test_rungs_that_the_engine_has_in_predicted_mode_only(self, folder: Path) -> None:
        with pytest.raises(ConfigError, match='replay knows cache in mode = "predicted" only'):
            play(folder, engine__policy="cache", engine__mode="exact")

    def test_predictors_that_are_missing(self, tmp_path: Path) -> None:
        write_sparse_file(tmp_path, profiled=False)
        with pytest.raises(ConfigError, match="no predictors at"):
            play(tmp_path)

    def test_files_beside_it_that_are_another_models(self, folder: Path, tmp_path: Path) -> None:
        path = write_sparse_file(tmp_path, profiled=False, layers=LAYERS - 1)
        predictor_path(path).write_bytes(predictor_path(folder / "sparse.ncf").read_bytes())
        with pytest.raises(ConfigError, match="another model"):
            play(tmp_path)
        predictor_path(path).unlink()
        profile_path(path).write_bytes(profile_path(folder / "sparse.ncf").read_bytes())
        with pytest.raises(ConfigError, match="another model"):
            play(tmp_path, engine__mode="exact")
