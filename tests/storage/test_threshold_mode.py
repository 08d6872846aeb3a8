"""Threshold mode: activations within a bound count as zero, wherever and however it is computed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from polyneuron.config import FeedForwardMode
from polyneuron.errors import ConfigError, FormatError
from polyneuron.io.ncf_format import Layout
from polyneuron.io.ncf_reader import read_ncf
from polyneuron.io.predictor_file import model_key
from polyneuron.io.profile_file import Profile, profile_path, read_profile, write_profile
from polyneuron.kernels import isa, reference
from polyneuron.model.convert import convert
from polyneuron.model.ncf_spec import spec_of
from polyneuron.planning.source import open_source
from polyneuron.profiling import activation_bounds
from polyneuron.profiling.layer_run import LayerRun
from polyneuron.profiling.layer_weights import layer_weights
from polyneuron.profiling.profile import make_profile
from tests.support.local_engine import LocalEngine
from tests.support.sparse_models import drelu_model
from tests.support.tiny_gguf import TinyModel, write_tiny_gguf

THRESHOLD, DENSE = FeedForwardMode.THRESHOLD, FeedForwardMode.DENSE
MODEL = replace(drelu_model(3), family="llama")
"""SiLU; else as the sparse ones."""
TOKENS = [int(token) for token in np.random.default_rng(5).integers(3, 280, 192)]
PROMPT = TOKENS[:70]
ANY_COST = 1e9


def silu_file(folder: Path, layout: Layout = Layout.BUNDLES, model: TinyModel = MODEL) -> Path:
    path = folder / f"silu_{layout}.ncf"
    convert(write_tiny_gguf(folder / "silu.gguf", model), path, layout=layout)
    return path


def profile_of(path: Path) -> Profile:
    source = open_source(path)
    key = model_key(source.manifest)
    return read_profile(profile_path(path), key, MODEL.num_layers, MODEL.d_ff)


def with_bounds(path: Path, bounds: tuple[float, ...]) -> None:
    """Put other bounds into a profile."""
    profile = profile_of(path)
    assert profile.bounds is not None
    write_profile(
        profile_path(path), replace(profile, bounds=replace(profile.bounds, values=bounds))
    )


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose profile has bounds that half of its neurons do not reach."""
    path = silu_file(tmp_path_factory.mktemp("threshold"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(activation_bounds, "SHARES", (0.5,))
        make_profile(path, TOKENS, None, max_cost=ANY_COST)
    return path


def logits(path: Path, prompt: list[int], **settings: object) -> bytes:
    with LocalEngine(path, **settings) as engine:
        rows = engine.generate(prompt, 3).logits
    return np.stack(rows).tobytes()


class TestEngine:
    @pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
    @pytest.mark.parametrize("chunk", [1, 7, 512])
    def test_one_result_wherever_rows_are(self, made: Path, share: float, chunk: int) -> None:
        """Prompts, single tokens, rows in memory, in the neuron cache and passing through."""
        want = logits(made, PROMPT, mode=THRESHOLD)
        settings = {"mode": THRESHOLD, "ffn_resident": share, "max_tokens": chunk}
        assert logits(made, PROMPT, **settings) == want

    def test_neurons_are_left_out(self, made: Path) -> None:
        with LocalEngine(made, mode=THRESHOLD) as engine:
            engine.generate(PROMPT[:1], 8)
            activity = engine.activity()
        shares = [layer.gated_share for layer in activity]
        assert all(0.3 < share < 0.7 for share in shares)
        assert logits(made, PROMPT, mode=THRESHOLD) != logits(made, PROMPT, mode=DENSE)

    def test_bounds_that_nothing_is_within_change_no_bit(self, made: Path, tmp_path: Path) -> None:
        path = silu_file(tmp_path)
        profile_path(path).write_bytes(profile_path(made).read_bytes())
        with_bounds(path, (1e-30,) * MODEL.num_layers)
        assert logits(path, PROMPT, mode=THRESHOLD) == logits(path, PROMPT, mode=DENSE)

    def test_every_isa_gives_the_same(self, made: Path) -> None:
        found = {logits(made, PROMPT, mode=THRESHOLD, isa_name=name) for name in isa.supported()}
        assert len(found) == 1

    def test_a_request_gives_what_it_gives_alone(self, made: Path) -> None:
        """A neuron that another sequence needs counts as zero all the same."""
        prompts = [PROMPT[:5], PROMPT[20:27], PROMPT[40:43]]
        alone = [logits(made, prompt, mode=THRESHOLD) for prompt in prompts]
        with LocalEngine(made, mode=THRESHOLD, max_sequences=3) as engine:
            results = engine.run_all([engine.request(prompt, 3) for prompt in prompts])
        assert [np.stack(result.logits).tobytes() for result in results] == alone


class TestLayer:
    def test_cut_activations_are_those_of_the_reference(self, made: Path) -> None:
        ncf = read_ncf(made)
        spec = spec_of(ncf)
        bound = 0.2
        stream = np.random.default_rng(3).standard_normal((40, MODEL.d_model)).astype(np.float32)
        with LayerRun(ncf, spec, 1, len(stream)) as run:
            normed, hidden = run.feed_forward(stream.copy())
            gates = layer_weights(run).deciding.product(normed)
            run.cut(bound)
            _, cut = run.feed_forward(stream.copy())
        acted = reference.feed_forward_act(spec.feed_forward, gates, np.ones_like(gates))
        assert 0.05 < (np.abs(acted) <= bound).mean() < 0.95
        assert cut.tobytes() == np.where(np.abs(acted) <= bound, np.float32(0.0), hidden).tobytes()


class TestBounds:
    def test_profile_counts_what_is_beyond_them(self, made: Path) -> None:
        profile = profile_of(made)
        assert profile.bounds is not None and profile.bounds.share == 0.5
        for layer in profile.layers:
            assert 0.4 < layer.facts["gated_share"] < 0.6
            assert layer.facts["gated_share"] == layer.facts["active_share"]

    def test_the_largest_share_that_costs_little_enough(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        ncf = read_ncf(silu_file(tmp_path))
        spec = spec_of(ncf)
        monkeypatch.setattr(activation_bounds, "SHARES", (0.1, 0.3, 0.6, 0.9))
        sequences = [TOKENS[:96], TOKENS[96:]]
        every = activation_bounds.find_bounds(ncf, spec, sequences, ANY_COST)
        assert every.share == 0.9
        one = activation_bounds.find_bounds(ncf, spec, sequences, max(1e-9, every.cost))
        assert one.share <= 0.9 and one.cost <= max(1e-9, every.cost)
        assert all(low <= high for low, high in zip(one.values, every.values, strict=True))

    def test_dense_perplexity_is_the_engines(self, tmp_path: Path) -> None:
        path = silu_file(tmp_path)
        ncf = read_ncf(path)
        found = activation_bounds.find_bounds(ncf, spec_of(ncf), [TOKENS[:96]], ANY_COST)
        with LocalEngine(path, mode=DENSE) as engine:
            scored = engine.score(TOKENS[48:96], 0)
        assert found.dense_ppl == pytest.approx(np.exp(-np.mean(scored)), rel=1e-5)

    def test_refused_where_nothing_is_saved(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = silu_file(tmp_path)
        monkeypatch.setattr(activation_bounds._Tried, "_ppl", lambda *_: next(ppls))
        ppls = iter([10.0] + [10.2] * len(activation_bounds.SHARES))
        with pytest.raises(ConfigError, match=r"20% of the neurons .* by 2\.0%, .*--mode dense"):
            make_profile(path, TOKENS, None, max_cost=0.01)
        assert not profile_path(path).exists()


class TestRefusals:
    def test_without_bounds(self, tmp_path: Path) -> None:
        path = silu_file(tmp_path)
        with pytest.raises(ConfigError, match=r"no bounds at .* polyneuron profile --threshold"):
            LocalEngine(path, mode=THRESHOLD)

    def test_tiles(self, tmp_path: Path) -> None:
        path = silu_file(tmp_path, Layout.TILES)
        with pytest.raises(ConfigError, match="--threshold needs bundles"):
            make_profile(path, TOKENS, None, max_cost=0.01)
        with pytest.raises(ConfigError, match=r"--mode threshold: .* convert its source"):
            LocalEngine(path, mode=THRESHOLD)

    def test_models_with_zeros(self, tmp_path: Path) -> None:
        path = silu_file(tmp_path, model=drelu_model(2))
        with pytest.raises(ConfigError, match=r"drelu .* use --mode exact"):
            LocalEngine(path, mode=THRESHOLD)
        with pytest.raises(ConfigError, match="use --mode exact"):
            make_profile(path, TOKENS, None, max_cost=0.01)

    @pytest.mark.parametrize("bound", [0.0, -1.0, float("nan"), float("inf")])
    def test_damaged_bounds(self, made: Path, tmp_path: Path, bound: float) -> None:
        path = silu_file(tmp_path)
        profile_path(path).write_bytes(profile_path(made).read_bytes())
        with_bounds(path, (bound,) * MODEL.num_layers)
        with pytest.raises(FormatError, match="bounds that are not positive numbers"):
            open_source(path).bounds()
