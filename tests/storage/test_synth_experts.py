"""Files of random experts: one set of weights in both, and what docs/SYNTH.md says of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from polyneuron.errors import ConfigError
from polyneuron.io.gguf_file import read_header
from polyneuron.io.ncf_reader import read_ncf
from polyneuron.kernels.quant import StorageType
from polyneuron.model.architecture import describe
from polyneuron.model.ncf_spec import spec_of
from polyneuron.model.spec import LayerTensors
from polyneuron.synth import pieces, twin
from polyneuron.synth.codings import CODINGS
from polyneuron.synth.planting import ATTENTION_VARIANCE, FEED_FORWARD_VARIANCE
from polyneuron.synth.routing import chosen_weights, drawn_logits
from polyneuron.synth.shapes import shape_spec
from polyneuron.synth.write import SynthSettings, synthesize
from tests.support.local_engine import LocalEngine
from tests.support.reference_model import Floats, ReferenceModel
from tests.support.synthetic import EXPERTS, bundle_values, small_settings, write_synth
from tests.support.tiny_ncf import cut_small, stored

SPARSE, DENSE = "turbosparse-mixtral-47b", "qwen3moe-30b-a3b"
SHAPE = {
    "num_layers": 4, "d_model": 384, "d_ff": 512, "num_heads": 6, "num_kv_heads": 2,
    "vocab_size": 1024,
}  # fmt: skip
NUM_TOKENS, NUM_FIRST = 400, 16
FED = ("ffn_gate", "ffn_up", "ffn_down")


class WatchedModel(ReferenceModel):
    """Keeps what each layer's router chose, which neurons were active, and feed forward's input."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, np.float32)
        self.weights_seen: list[Floats] = []
        self.active: list[list[NDArray[np.bool_]]] = []
        self.inputs: list[Floats] = []

    def _mixture(self, layer: LayerTensors, x: Floats) -> Floats:
        weights = self.expert_weights(layer, x)
        self.weights_seen.append(weights)
        self.inputs.append(x)
        gate, up = self.weights[layer.ffn_gate or ""], self.weights[layer.ffn_up]
        self.active.append(
            [
                (x[rows] @ gate[expert].T > 0) & (x[rows] @ up[expert].T > 0)
                for expert, rows in enumerate((weights > 0).T)
            ]
        )
        return super()._mixture(layer, x)


def watched(folder: Path, shape: str, **changes: int) -> WatchedModel:
    """A model that has computed random tokens."""
    write_synth(folder, small_settings(shape, **{**SHAPE, **changes}))
    model = WatchedModel(folder / "synth.gguf")
    model.logits(np.random.default_rng(0).integers(3, SHAPE["vocab_size"], NUM_TOKENS))
    return model


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> WatchedModel:
    return watched(tmp_path_factory.mktemp("sparse"), SPARSE)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> WatchedModel:
    return watched(tmp_path_factory.mktemp("dense"), DENSE, d_ff=64)


class TestFiles:
    @pytest.mark.parametrize(("shape", "family"), [(SPARSE, "llama"), (DENSE, "qwen3moe")])
    def test_both_have_the_shape(self, shape: str, family: str, tmp_path: Path) -> None:
        settings = small_settings(shape, **EXPERTS)
        write_synth(tmp_path, settings)
        ncf, header = read_ncf(tmp_path / "synth.ncf"), read_header(tmp_path / "synth.gguf")
        assert spec_of(ncf) == settings.spec
        found = describe(header)
        expected = replace(settings.spec, family=family, norm_eps=found.norm_eps)
        assert found == expected
        ncf.check_all()

    @pytest.mark.parametrize("shape", [SPARSE, DENSE])
    @pytest.mark.parametrize("quant", CODINGS)
    @pytest.mark.parametrize("is_cut", [False, True], ids=["whole", "cut"])
    def test_bundles_hold_the_twins_weights(
        self, shape: str, quant: str, is_cut: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if is_cut:  # pieces that end inside experts
            cut_small(monkeypatch)
            monkeypatch.setattr(twin, "PIECE_BYTES", 2000)
        write_synth(tmp_path, small_settings(shape, **EXPERTS, quant=quant))
        ncf, reference = read_ncf(tmp_path / "synth.ncf"), ReferenceModel(tmp_path / "synth.gguf")
        for layer_id in range(2):
            for role in FED:
                name = f"blk.{layer_id}.{role}_exps.weight"
                twins = reference.weights[name]
                expected = twins.transpose(0, 2, 1) if role == "ffn_down" else twins
                got = bundle_values(ncf, name)
                assert np.array_equal(got, expected.reshape(got.shape)), name

    def test_routers_keep_halves(self, tmp_path: Path) -> None:
        write_synth(tmp_path, small_settings(SPARSE, **EXPERTS))
        ncf, header = read_ncf(tmp_path / "synth.ncf"), read_header(tmp_path / "synth.gguf")
        assert ncf.tensor("blk.0.ffn_gate_inp.weight").storage is StorageType.F16
        assert header.tensor("blk.0.ffn_gate_inp.weight").type_name == "F16"

    def test_hot_first_moves_neurons_inside_their_experts(self, tmp_path: Path) -> None:
        (tmp_path / "hot").mkdir()
        write_synth(tmp_path, small_settings(SPARSE, **EXPERTS), twin=False)
        settings = small_settings(SPARSE, **EXPERTS, is_hot_first=True)
        write_synth(tmp_path / "hot", settings, twin=False)
        plain, hot = read_ncf(tmp_path / "synth.ncf"), read_ncf(tmp_path / "hot" / "synth.ncf")
        ids = hot.layer_section(1).neuron_ids
        assert ids is not None
        assert np.array_equal(ids // 96, np.repeat(np.arange(8), 96))
        for role in FED:
            name = f"blk.1.{role}_exps.weight"
            assert np.array_equal(stored(hot, name), stored(plain, name)[ids])
        gate = bundle_values(hot, "blk.1.ffn_gate_exps.weight").reshape(8, 96, -1)
        assert np.all(np.diff(gate[:, :, 0], axis=1) <= 0), "thresholds rise in each expert"

    def test_threads_do_not_show(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        cut_small(monkeypatch)
        monkeypatch.setattr(twin, "PIECE_BYTES", 2000)
        data = []
        for num_threads in (1, 3):
            threads = list(range(num_threads))
            monkeypatch.setattr(pieces, "usable_cores", lambda threads=threads: threads)
            write_synth(tmp_path, small_settings(SPARSE, **EXPERTS), force=True)
            data.append([(tmp_path / f"synth.{end}").read_bytes() for end in ("ncf", "gguf")])
        assert data[0] == data[1]

    def test_a_disk_that_is_short_is_named_with_what_is_needed(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Space:
            f_bavail, f_frsize = 10 << 30, 1

        monkeypatch.setattr("polyneuron.io.piece_writer.os.statvfs", lambda path: Space)
        settings = SynthSettings(shape_spec(SPARSE))
        with pytest.raises(ConfigError, match=r"needs 29\.\d+ GiB, .* has 10\.00 GiB") as caught:
            next(synthesize(settings, tmp_path / "a.ncf"))
        assert "\n" not in str(caught.value)
        assert list(tmp_path.iterdir()) == []


class TestRouting:
    def test_the_hottest_quarter_gets_about_half_of_all_choices(
        self, sparse: WatchedModel, dense: WatchedModel
    ) -> None:
        for model, least, most in ((sparse, 0.36, 0.52), (dense, 0.45, 0.62)):
            for weights in model.weights_seen:
                uses = np.sort((weights[NUM_FIRST:] > 0).mean(axis=0))[::-1]
                carried = uses[: len(uses) // 4].sum() / uses.sum()
                assert least < carried < most

    def test_layers_differ_in_their_hot_experts(self, dense: WatchedModel) -> None:
        hot = [set(np.argsort(-(w > 0).mean(axis=0))[:16].tolist()) for w in dense.weights_seen]
        assert len(hot[0] & hot[1]) < 8

    def test_consecutive_tokens_share_experts(
        self, sparse: WatchedModel, dense: WatchedModel
    ) -> None:
        """More than tokens far apart do, in the last layers, where attention has added most."""
        for model, least, most in ((sparse, 0.26, 0.50), (dense, 0.09, 0.35)):
            gains = []
            for weights in model.weights_seen:
                chosen = weights[NUM_FIRST:] > 0
                share = [(chosen[n:] & chosen[:-n]).sum() / chosen[n:].sum() for n in (1, 64)]
                assert least < share[0] < most
                gains.append(share[0] - share[1])
            assert gains[-1] > 0.01

    def test_weights_are_those_that_scales_suppose(self, sparse: WatchedModel) -> None:
        experts = sparse.spec.experts
        assert experts is not None
        _, drawn = chosen_weights(drawn_logits(8), experts)
        expected = np.square(drawn).sum(axis=1).mean()
        for weights in sparse.weights_seen:
            assert np.square(weights).sum(axis=1).mean() == pytest.approx(expected, rel=0.1)


class TestActivity:
    def test_the_share_asked_for_is_active_in_chosen_experts(self, sparse: WatchedModel) -> None:
        for layer in sparse.active:
            assert 0.14 < np.concatenate(layer).mean() < 0.17

    def test_each_experts_hot_neurons_carry_most(self, sparse: WatchedModel) -> None:
        for layer in sparse.active:
            for active in layer:
                rates = np.sort(active.mean(axis=0))[::-1]
                assert 0.55 < rates[: len(rates) // 5].sum() / rates.sum() < 0.80

    @pytest.mark.parametrize("sparsity", [0.6, 0.95])
    def test_other_sparsities_hold(self, sparsity: float, tmp_path: Path) -> None:
        write_synth(tmp_path, small_settings(SPARSE, **SHAPE, sparsity=sparsity))
        model = WatchedModel(tmp_path / "synth.gguf")
        model.logits(np.random.default_rng(1).integers(3, SHAPE["vocab_size"], 200))
        for layer in model.active:
            assert np.concatenate(layer).mean() == pytest.approx(1 - sparsity, rel=0.25)

    def test_the_stream_has_the_size_that_thresholds_suppose(
        self, sparse: WatchedModel, dense: WatchedModel
    ) -> None:
        for model, rel in ((sparse, 0.2), (dense, 0.3)):
            num_layers = len(model.inputs)
            for layer_id, inputs in enumerate(model.inputs):
                stream = inputs[NUM_FIRST:] / inputs[NUM_FIRST:, :1]
                expected = 1 + (ATTENTION_VARIANCE * (layer_id + 1)) / num_layers
                expected += FEED_FORWARD_VARIANCE * layer_id / num_layers
                assert np.square(stream[:, 32:]).mean() == pytest.approx(expected, rel=rel)


class TestRuns:
    @pytest.mark.parametrize("shape", [SPARSE, DENSE])
    @pytest.mark.parametrize("share", [0.4, None])
    def test_engine_computes_what_the_twin_says(
        self, shape: str, share: float | None, tmp_path: Path
    ) -> None:
        write_synth(tmp_path, small_settings(shape, **EXPERTS, quant="q8"))
        prompt = list(range(3, 43))
        with LocalEngine(tmp_path / "synth.ncf", ffn_resident=share) as engine:
            result = engine.generate(prompt, 1)
        expected = ReferenceModel(tmp_path / "synth.gguf").logits(np.array(prompt))[-1]
        error = np.abs(result.logits[0] - expected).max()
        assert error < 0.08 * np.abs(expected).max()  # activations have 8 bits
