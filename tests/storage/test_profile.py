"""Profiles and predictors as files: what they hold, going on after a stop, another order."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polyneuron.errors import ChecksumError, ConfigError, FormatError, UnsupportedError
from polyneuron.io.layer_journal import LayerJournal
from polyneuron.io.ncf_format import Layout
from polyneuron.io.ncf_reader import read_ncf
from polyneuron.io.packed_arrays import pack_arrays, unpack_arrays
from polyneuron.io.predictor_file import (
    PredictorFile,
    PredictorInput,
    model_key,
    predictor_path,
    read_predictors,
)
from polyneuron.io.profile_file import Profile, profile_path, read_profile
from polyneuron.kernels.gemv import FeedForwardKind
from polyneuron.kernels.quant import StorageType
from polyneuron.model.convert import convert
from polyneuron.model.ncf_spec import spec_of
from polyneuron.profiling import profile as profiling
from polyneuron.profiling.kinds import settings_of
from polyneuron.profiling.layer_run import LayerRun
from polyneuron.profiling.predictors import PredictorSettings
from polyneuron.profiling.profile import make_profile
from polyneuron.profiling.reorder import check_reorder, reorder_model, stored_layers
from tests.support.local_engine import LocalEngine
from tests.support.tiny_gguf import TinyModel
from tests.support.tiny_ncf import stored, write_source

MODEL = TinyModel(
    family="bamboo", num_layers=3, d_model=64, d_ff=160, num_heads=4, num_kv_heads=2, head_dim=16,
    tensor_type="Q4_0",
)  # fmt: skip
TOKENS = [int(token) for token in np.random.default_rng(5).integers(3, 280, 160)]
SETTINGS = PredictorSettings(input=PredictorInput.ATTENTION, kept=0.9)


def model_in(folder: Path, layout: Layout = Layout.BUNDLES) -> Path:
    convert(write_source(folder, MODEL), folder / "tiny.ncf", layout=layout)
    return folder / "tiny.ncf"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with profile and predictors beside it; tests leave it as it is."""
    path = model_in(tmp_path_factory.mktemp("made"))
    make_profile(path, TOKENS, SETTINGS)
    return path


def profile_of(path: Path) -> Profile:
    key = model_key(read_ncf(path).manifest)
    return read_profile(profile_path(path), key, MODEL.num_layers, MODEL.d_ff)


def predictors_of(path: Path) -> PredictorFile:
    key = model_key(read_ncf(path).manifest)
    return read_predictors(predictor_path(path), key, MODEL.num_layers, (MODEL.d_ff, MODEL.d_model))


def sidecars(path: Path) -> list[bytes]:
    return [profile_path(path).read_bytes(), predictor_path(path).read_bytes()]


@pytest.fixture(scope="module")
def hot(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model, hottest neurons first."""
    path = tmp_path_factory.mktemp("hot") / "hot.ncf"
    reorder_model(made, profile_of(made), path)
    return path


class TestProfile:
    def test_counts_are_of_all_tokens(self, made: Path) -> None:
        found = profile_of(made)
        assert found.num_tokens == len(TOKENS)
        for layer in found.layers:
            assert layer.active.max() <= len(TOKENS)
            assert (layer.active <= layer.gated).all()
            assert layer.facts["active_share"] == pytest.approx(
                layer.active[0].sum() / (len(TOKENS) * MODEL.d_ff)
            )
            shares = list(layer.facts["batch_share"].values())
            assert shares == sorted(shares)

    @pytest.mark.parametrize("kind", ["low-rank", "sign", "oracle", "mlp"])
    def test_kinds_can_be_run(self, tmp_path: Path, kind: str) -> None:
        """Rows from memory or from the file, one result; each layer tells its neurons' shares."""
        if kind == "mlp" and importlib.util.find_spec("torch") is None:
            pytest.skip("torch is not installed")
        path = model_in(tmp_path)
        settings = settings_of(kind, FeedForwardKind.DRELU, StorageType.Q4, kept=0.9)
        made = make_profile(path, TOKENS, settings)
        found = predictors_of(path)
        assert found.named is not None and found.info.has_up == (kind == "sign")
        for index, report in enumerate(made.report["layers"]):
            assert abs(found.named[index].mean() - report["predicted"]) < 0.2
        logits = []
        for resident in (None, 0.4):
            with LocalEngine(path, mode="predicted", ffn_resident=resident) as engine:
                rows = engine.generate(TOKENS[:8], 4).logits
                shares = [layer.predicted_share for layer in engine.activity()]
            logits.append([row.tobytes() for row in rows])
        assert logits[0] == logits[1]
        assert all(0.0 < share < 1.0 for share in shares)
        with LocalEngine(path, mode="exact") as engine:
            exact = [row.tobytes() for row in engine.generate(TOKENS[:8], 4).logits]
        assert (logits[0] == exact) == (kind == "oracle")

    def test_values_that_are_no_numbers_are_named(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run_half = LayerRun.feed_forward

        def broken(run: LayerRun, stream: Any) -> Any:
            normed, hidden = run_half(run, stream)
            hidden[7, 3] = np.nan
            return normed, hidden

        monkeypatch.setattr(LayerRun, "feed_forward", broken)
        path = model_in(tmp_path)
        with pytest.raises(FormatError, match=r"tiny\.ncf: layer 0's activations at token 7 are n"):
            make_profile(path, TOKENS, SETTINGS)
        assert not profile_path(path).exists()

    def test_predictors_can_be_run(self, made: Path) -> None:
        with LocalEngine(made, mode="predicted") as engine:
            assert len(engine.generate(TOKENS[:8], 4).tokens) > 0

    def test_nothing_else_is_left(self, made: Path) -> None:
        names = {path.name for path in made.parent.iterdir()}
        assert names == {"tiny.gguf", "tiny.ncf", "tiny.profile", "tiny.predictors"}

    def test_tiles_have_no_predictors(self, tmp_path: Path) -> None:
        path = model_in(tmp_path, Layout.TILES)
        with pytest.raises(ConfigError, match="--predictor none"):
            make_profile(path, TOKENS, SETTINGS)
        assert make_profile(path, TOKENS, None).predictors_path is None
        assert profile_path(path).exists() and not predictor_path(path).exists()

    def test_what_is_in_the_way_is_named_first(self, tmp_path: Path) -> None:
        path = model_in(tmp_path)
        predictor_path(path).mkdir()
        with pytest.raises(ConfigError, match=r"tiny\.predictors: a folder"):
            make_profile(path, TOKENS, SETTINGS)
        assert not profile_path(path).exists()

    def test_a_width_that_no_block_fits_has_no_predictors(self, tmp_path: Path) -> None:
        odd = replace(MODEL, d_model=80, num_heads=5, num_kv_heads=5, tensor_type="F16")
        convert(write_source(tmp_path, odd), tmp_path / "odd.ncf", layout=Layout.BUNDLES)
        with pytest.raises(ConfigError, match="multiple of 32, and this one is 80; give --pred"):
            make_profile(tmp_path / "odd.ncf", TOKENS, SETTINGS)
        assert make_profile(tmp_path / "odd.ncf", TOKENS, None).predictors_path is None


class TestReading:
    def test_another_models_is_refused(self, made: Path) -> None:
        with pytest.raises(ConfigError, match="of another model file; make it anew"):
            read_profile(profile_path(made), "other", MODEL.num_layers, MODEL.d_ff)

    @pytest.mark.parametrize(
        ("change", "error"),
        [
            (lambda raw: raw[:-1], ChecksumError),
            (lambda raw: raw[:40] + bytes([raw[40] ^ 1]) + raw[41:], ChecksumError),
            (lambda raw: raw[:8] + b"\x07" + raw[9:], UnsupportedError),
            (lambda raw: b"GGUF" + raw[4:], FormatError),
            (lambda raw: raw[:9], FormatError),
        ],
        ids=["cut off", "flipped", "version", "magic", "short"],
    )
    def test_damage_is_named(
        self, made: Path, tmp_path: Path, change: Any, error: type[Exception]
    ) -> None:
        path = tmp_path / "bad.profile"
        path.write_bytes(change(profile_path(made).read_bytes()))
        with pytest.raises(error, match=r"bad\.profile: .*make it anew"):
            read_profile(path, "", MODEL.num_layers, MODEL.d_ff)

    def test_wrong_sizes_are_named(self, made: Path) -> None:
        key = model_key(read_ncf(made).manifest)
        with pytest.raises(FormatError, match="has 3 layers, the model has 4"):
            read_profile(profile_path(made), key, 4, MODEL.d_ff)
        with pytest.raises(FormatError, match="has no array <u4"):
            read_profile(profile_path(made), key, 3, 96)

    def test_packed_arrays_come_back(self) -> None:
        values = {"a": np.arange(6, dtype=np.uint32).reshape(2, 3), "b": [np.ones(2, np.float32)]}
        back = unpack_arrays("x", pack_arrays(values))
        assert (back["a"] == values["a"]).all() and back["b"][0].dtype == np.float32
        with pytest.raises(FormatError, match="x: its contents are no msgpack"):
            unpack_arrays("x", b"\xc1")
        with pytest.raises(TypeError):
            pack_arrays({"a": {1, 2}})


class TestGoingOn:
    @pytest.mark.parametrize("at_layer", [0, 1, 2])
    def test_broken_off_gives_the_same(
        self, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_layer: int
    ) -> None:
        path = model_in(tmp_path)
        count = profiling.layer_profile

        def stop(sample: Any) -> Any:
            if sample.layer_id == at_layer:
                raise KeyboardInterrupt
            return count(sample)

        monkeypatch.setattr(profiling, "layer_profile", stop)
        with pytest.raises(KeyboardInterrupt):
            make_profile(path, TOKENS, SETTINGS)
        assert not profile_path(path).exists() and not predictor_path(path).exists()
        left = {p.name for p in tmp_path.iterdir()} - {"tiny.gguf", "tiny.ncf"}
        partial = {"tiny.profile.partial", "tiny.profile.partial.state"}
        assert left == (partial if at_layer else set())
        monkeypatch.setattr(profiling, "layer_profile", count)
        assert make_profile(path, TOKENS, SETTINGS).resumed_layers == at_layer
        assert sidecars(path) == sidecars(made)

    def test_another_text_begins_anew(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        key, other = b"k" * 32, b"o" * 32
        output = tmp_path / "a.profile"
        with LayerJournal(output, key, lambda: None) as journal:
            journal.add(b"one", b"after one")
        with LayerJournal(output, other, lambda: None) as journal:
            assert journal.num_layers == 0 and journal.state == b""
        assert not list(tmp_path.iterdir())

    def test_records_beyond_the_state_are_done_again(self, tmp_path: Path) -> None:
        output, key = tmp_path / "a.profile", b"k" * 32
        with LayerJournal(output, key, lambda: None) as journal:
            journal.add(b"one", b"after one")
            state = (tmp_path / "a.profile.partial.state").read_bytes()
            journal.add(b"two", b"after two")
        (tmp_path / "a.profile.partial.state").write_bytes(state)
        with LayerJournal(output, key, lambda: None) as journal:
            assert (list(journal.records()), journal.state) == ([b"one"], b"after one")

    @pytest.mark.parametrize("cut", range(1, 19))
    def test_torn_records_do_not_count(self, tmp_path: Path, cut: int) -> None:
        output, key = tmp_path / "a.profile", b"k" * 32
        with LayerJournal(output, key, lambda: None) as journal:
            journal.add(b"one", b"after one")
            journal.add(b"two three", b"after two")
        partial = tmp_path / "a.profile.partial"
        partial.write_bytes(partial.read_bytes()[:-cut])
        with LayerJournal(output, key, lambda: None) as journal:
            assert journal.num_layers == 0  # the state of layer one is gone


class TestReorder:
    def test_bundles_lie_as_the_profile_says(self, made: Path, hot: Path) -> None:
        old, new = read_ncf(made), read_ncf(hot)
        new.check_all()
        for index, layer in enumerate(profile_of(made).layers):
            ids = new.layer_section(index).neuron_ids
            assert ids is not None and (ids == layer.order).all()
            for role in ("ffn_gate", "ffn_up", "ffn_down"):
                name = f"blk.{index}.{role}.weight"
                assert (stored(new, name) == stored(old, name)[layer.order]).all()
        assert (
            stored(new, "token_embd.weight").tobytes() == stored(old, "token_embd.weight").tobytes()
        )
        rms = [tensor.rms_error for tensor in old.tensors]
        assert [tensor.rms_error for tensor in new.tensors] == rms

    def test_profile_and_predictors_follow(self, made: Path, hot: Path) -> None:
        old, new = profile_of(made), profile_of(hot)
        spec, shape = spec_of(read_ncf(hot)), (MODEL.d_ff, MODEL.d_model)
        found = [
            list(
                stored_layers(
                    read_predictors(
                        predictor_path(path), model_key(read_ncf(path).manifest), 3, shape
                    )
                )
            )
            for path in (made, hot)
        ]
        for index in range(spec.num_layers):
            order = old.layers[index].order
            assert (new.layers[index].active == old.layers[index].active[:, order]).all()
            half = new.layers[index].active[0][: MODEL.d_ff // 2].astype(int)
            assert (np.diff(half) <= 0).all()
            before, after = found[0][index], found[1][index]
            assert (after.fc2 == before.fc2[order]).all()
            assert (after.threshold == before.threshold[order]).all()
            assert before.fc1 is not None and after.fc1 is not None
            assert (after.fc1 == before.fc1).all()
            named = [predictors_of(path).named for path in (made, hot)]
            assert named[0] is not None and named[1] is not None
            assert (named[1][index] == named[0][index][order]).all()

    def test_second_matrices_follow(self, tmp_path: Path) -> None:
        path, hot = model_in(tmp_path), tmp_path / "hot.ncf"
        settings = settings_of("sign", FeedForwardKind.DRELU, StorageType.Q4, kept=0.9)
        make_profile(path, TOKENS, settings)
        reorder_model(path, profile_of(path), hot)
        before, after = (list(stored_layers(predictors_of(p))) for p in (path, hot))
        for one, other, layer in zip(before, after, profile_of(path).layers, strict=True):
            assert one.up is not None and other.up is not None
            assert (other.up == one.up[layer.order]).all()
            assert (other.fc2 == one.fc2[layer.order]).all()

    def test_again_is_the_same_file(self, made: Path, hot: Path) -> None:
        before = hot.read_bytes()
        reorder_model(made, profile_of(made), hot)
        assert hot.read_bytes() == before

    def test_of_a_reordered_file_numbers_are_the_models(self, hot: Path, tmp_path: Path) -> None:
        make_profile(hot, TOKENS[:64], None)
        profile = profile_of(hot)
        reorder_model(hot, profile, tmp_path / "again.ncf")
        once, twice = read_ncf(hot), read_ncf(tmp_path / "again.ncf")
        first, second = once.layer_section(0).neuron_ids, twice.layer_section(0).neuron_ids
        assert first is not None and second is not None
        assert (second == first[profile.layers[0].order]).all()

    def test_predictors_of_another_model_are_left_aside(self, made: Path, tmp_path: Path) -> None:
        path = model_in(tmp_path)
        make_profile(path, [token ^ 1 for token in TOKENS], None)
        raw = predictor_path(made).read_bytes()
        other = tmp_path / "other.ncf"
        reorder_model(path, profile_of(path), other)
        predictor_path(other).write_bytes(raw)  # of the file in its first order
        make_profile(other, TOKENS, None)
        reorder_model(other, profile_of(other), tmp_path / "last.ncf")
        assert profile_path(tmp_path / "last.ncf").exists()
        assert not predictor_path(tmp_path / "last.ncf").exists()

    def test_what_cannot_be_is_refused_first(self, made: Path, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="the model itself"):
            check_reorder(made, made, True)
        check_reorder(made, made.with_suffix(".hot"), False)  # its profile has a name of its own
        (tmp_path / "there.ncf").write_bytes(b"x")
        with pytest.raises(ConfigError, match="exists"):
            check_reorder(made, tmp_path / "there.ncf", False)
        with pytest.raises(ConfigError, match="only bundles have an order"):
            check_reorder(model_in(tmp_path, Layout.TILES), tmp_path / "out.ncf", False)
