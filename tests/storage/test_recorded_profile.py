"""`profile --record`: what a recording holds, going on after a stop, what is refused first."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polyneuron.errors import ConfigError
from polyneuron.io.activation_trace import ActivationTrace, read_trace
from polyneuron.io.ncf_format import Layout
from polyneuron.io.ncf_reader import read_ncf
from polyneuron.io.predictor_file import model_key
from polyneuron.io.profile_file import profile_path, read_profile
from polyneuron.model.convert import convert
from polyneuron.planning.bundles import neuron_rows
from polyneuron.profiling import profile as profiling
from polyneuron.profiling.profile import make_profile
from polyneuron.profiling.recorded import check_recording
from polyneuron.profiling.reorder import reorder_model
from tests.support.local_engine import LocalEngine
from tests.support.program import run
from tests.support.sparse_models import sparse_models
from tests.support.tiny_gguf import TinyModel, write_tiny_gguf

MODELS = sparse_models(3)
MODEL = MODELS["drelu"]
TOKENS = [int(token) for token in np.random.default_rng(5).integers(3, 90, 96)]
Captured = pytest.CaptureFixture[str]


def model_in(folder: Path, model: TinyModel = MODEL, layout: Layout = Layout.BUNDLES) -> Path:
    source = write_tiny_gguf(folder / "tiny.gguf", model)
    convert(source, folder / "tiny.ncf", layout=layout)
    return folder / "tiny.ncf"


def recorded(path: Path, tokens: list[int] = TOKENS) -> ActivationTrace:
    output = path.parent / "text.trace"
    make_profile(path, tokens, None, record=output)
    return read_trace(output)


def counts(trace: ActivationTrace) -> np.ndarray:
    """(layers, neurons) tokens that need each."""
    bits = np.unpackbits(trace.bits.view(np.uint8), axis=2, bitorder="little")
    return bits.sum(axis=1)[:, : trace.head.num_neurons]


class TestRecording:
    @pytest.mark.parametrize("layout", Layout)
    @pytest.mark.parametrize("name", MODELS)
    def test_tokens_need_what_the_engine_counts(
        self, tmp_path: Path, name: str, layout: Layout
    ) -> None:
        path = model_in(tmp_path, MODELS[name], layout)
        trace = recorded(path)
        ncf, model = read_ncf(path), MODELS[name]
        head = trace.head
        assert head.model_key == model_key(ncf.manifest)
        assert (head.num_layers, head.num_neurons) == (model.num_layers, model.d_ff)
        is_bundles = layout is Layout.BUNDLES
        assert head.task_neurons == (neuron_rows(ncf.manifest).cluster_neurons if is_bundles else 0)
        profile = read_profile(profile_path(path), head.model_key, model.num_layers, model.d_ff)
        assert head.text_key == profile.text_key
        for found, layer in zip(counts(trace), profile.layers, strict=True):
            assert (found == layer.gated[0]).all()
        if not is_bundles:
            return
        with LocalEngine(path, max_tokens=1, mode="exact") as engine:
            engine.score(TOKENS, len(TOKENS) - 1)
            shares = [layer.gated_share for layer in engine.activity()]
        assert np.allclose(counts(trace).sum(axis=1) / (len(TOKENS) * model.d_ff), shares, rtol=0)

    def test_threshold_mode_needs_what_is_beyond_the_bounds(self, tmp_path: Path) -> None:
        path, output = model_in(tmp_path, replace(MODEL, family="llama")), tmp_path / "text.trace"
        made = make_profile(path, TOKENS, None, record=output, max_cost=1e9)
        found = counts(read_trace(output))
        for own, layer in zip(found, made.profile.layers, strict=True):
            assert (own == layer.gated[0]).all()
        with LocalEngine(path, max_tokens=1, mode="threshold") as engine:
            engine.score(TOKENS, len(TOKENS) - 1)
            shares = [layer.gated_share for layer in engine.activity()]
        assert 0.01 < max(shares) < 0.99
        assert np.allclose(found.sum(axis=1) / (len(TOKENS) * MODEL.d_ff), shares, rtol=0)

    def test_tokens_follow_the_text(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Each sequence begins anew; the first one is that of its text alone."""
        monkeypatch.setattr(profiling, "cut_sequences", lambda tokens: [TOKENS[:60], TOKENS[60:]])
        path = model_in(tmp_path)
        both = recorded(path)
        assert both.head.starts == (0, 60) and both.head.num_tokens == len(TOKENS)
        for part, rows in ((TOKENS[:60], slice(0, 60)), (TOKENS[60:], slice(60, None))):
            monkeypatch.setattr(profiling, "cut_sequences", lambda tokens: [tokens])
            alone = recorded(path, part)
            assert (alone.bits == both.bits[:, rows]).all()

    def test_recording_costs_no_profile(self, tmp_path: Path) -> None:
        path = model_in(tmp_path)
        make_profile(path, TOKENS, None)
        plain = profile_path(path).read_bytes()
        recorded(path)
        assert profile_path(path).read_bytes() == plain

    def test_neurons_are_in_the_order_of_the_file(self, tmp_path: Path) -> None:
        path = model_in(tmp_path)
        made = make_profile(path, TOKENS, None, record=tmp_path / "text.trace")
        hot = tmp_path / "hot.ncf"
        reorder_model(path, made.profile, hot)
        make_profile(hot, TOKENS, None, record=tmp_path / "hot.trace")
        first, second = (counts(read_trace(tmp_path / f"{n}.trace")) for n in ("text", "hot"))
        order = made.profile.layers[0].order
        assert (first[0][order] == second[0]).all()  # deeper layers sum in another order before
        assert (first[0] != second[0]).any()


class TestBrokenOff:
    @pytest.mark.parametrize("at_layer", [1, 2])
    def test_goes_on_and_writes_the_same(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_layer: int
    ) -> None:
        path, output = model_in(tmp_path), tmp_path / "text.trace"
        make_profile(path, TOKENS, None, record=output)
        whole = output.read_bytes()
        output.unlink()
        count = profiling.layer_profile

        def stop(sample: Any) -> Any:
            if sample.layer_id == at_layer:
                raise KeyboardInterrupt
            return count(sample)

        monkeypatch.setattr(profiling, "layer_profile", stop)
        with pytest.raises(KeyboardInterrupt):
            make_profile(path, TOKENS, None, record=output)
        assert not output.exists()
        monkeypatch.setattr(profiling, "layer_profile", count)
        made = make_profile(path, TOKENS, None, record=output)
        assert made.resumed_layers == at_layer
        assert output.read_bytes() == whole
        assert not list(tmp_path.glob("*.partial*"))

    def test_layers_that_were_not_recorded_are_run_again(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path, output = model_in(tmp_path), tmp_path / "text.trace"
        count = profiling.layer_profile

        def stop(sample: Any) -> Any:
            if sample.layer_id == 2:
                raise KeyboardInterrupt
            return count(sample)

        monkeypatch.setattr(profiling, "layer_profile", stop)
        with pytest.raises(KeyboardInterrupt):
            make_profile(path, TOKENS, None)
        monkeypatch.setattr(profiling, "layer_profile", count)
        assert make_profile(path, TOKENS, None, record=output).resumed_layers == 0
        assert read_trace(output).head.num_tokens == len(TOKENS)


class TestRefused:
    @pytest.mark.parametrize(
        ("name", "complaint"),
        [
            ("tiny.ncf", "the model itself"), ("tiny.profile", "the profile's name"),
            ("tiny.predictors", "the predictors' name"), ("there", "exists; .* or --force"),
            (".", "a folder"), ("none/text.trace", "no such folder"),
        ],
    )  # fmt: skip
    def test_places_that_will_not_do(self, tmp_path: Path, name: str, complaint: str) -> None:
        (tmp_path / "there").write_bytes(b"x")
        (tmp_path / "tiny.ncf").write_bytes(b"x")
        with pytest.raises(ConfigError, match=complaint):
            check_recording(tmp_path / "tiny.ncf", tmp_path / name, force=False)

    def test_force_replaces(self, tmp_path: Path) -> None:
        (tmp_path / "there").write_bytes(b"x")
        check_recording(tmp_path / "tiny.ncf", tmp_path / "there", force=True)
        with pytest.raises(ConfigError, match="the model itself"):
            check_recording(tmp_path / "tiny.ncf", tmp_path / "tiny.ncf", force=True)


class TestProgram:
    def words(self, folder: Path, *more: object) -> list[object]:
        path = model_in(folder)
        plain = ["profile", "-m", path, "--random-tokens", 64, "--predictor", "none"]
        return [*plain, "--record", folder / "text.trace", *more]

    def test_tokens_and_bytes_are_told(self, tmp_path: Path, capsys: Captured) -> None:
        assert run(*self.words(tmp_path)) == 0
        size = (tmp_path / "text.trace").stat().st_size
        out = capsys.readouterr().out
        assert f"recording: {tmp_path}/text.trace, 64 tokens, " in out.replace("\n", " ")
        assert run(*self.words(tmp_path, "--force", "--json")) == 0
        found = json.loads(capsys.readouterr().out)["recording"]
        assert found == {"file": str(tmp_path / "text.trace"), "tokens": 64, "bytes": size}

    def test_what_is_there_is_kept(self, tmp_path: Path, capsys: Captured) -> None:
        (tmp_path / "text.trace").write_bytes(b"mine")
        assert run(*self.words(tmp_path)) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1 and "or --force" in err
        assert (tmp_path / "text.trace").read_bytes() == b"mine"
        assert not (tmp_path / "tiny.profile").exists()
