"""A simulation that plays a recording hits and reads what the engine did on the same text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from polyneuron.config import FeedForwardMode
from polyneuron.io.gguf_file import read_header
from polyneuron.io.ncf_format import Layout
from polyneuron.model.convert import convert
from polyneuron.model.tokenizer import Tokenizer
from polyneuron.planning.bundles import BundlePlan
from polyneuron.profiling.profile import make_profile
from polyneuron.scenarios.device_model import DeviceModel
from polyneuron.scenarios.result import Figures
from polyneuron.scenarios.script import load_script
from polyneuron.scenarios.simulation import SimulatedRun, simulate
from tests.support.local_engine import LocalEngine
from tests.support.made_up_device import make_device
from tests.support.models import DRELU, NO_DRELU
from tests.support.predictors import write_oracle
from tests.support.recordings import engine_scenario
from tests.support.sparse_models import sparse_models
from tests.support.tiny_gguf import write_tiny_gguf

TEXT = Path(__file__).resolve().parents[1] / "data" / "text" / "genesis_1_12.txt"
PROMPT_TOKENS, NUM_TOKENS = 24, 40
SHARES = (0.4, 0.6, 0.9)
OF_WORKERS = 0.002
"""Of all uses: two workers look tasks up in whatever order they come to them."""


@dataclass(frozen=True)
class Ran:
    """What an engine counted while it answered."""

    tokens: list[int]
    """Prompt and answer."""
    hits: int
    misses: int
    reads: int
    bytes: int
    bundles: BundlePlan

    def recorded(self, model: Path, folder: Path) -> Figures:
        """The same answer, recorded by `profile` and simulated."""
        make_profile(model, self.tokens, None, record=folder / "text.trace")
        requests = f"prompt_tokens = {PROMPT_TOKENS}\noutput_tokens = {NUM_TOKENS}"
        path = engine_scenario(folder / "ran.toml", self.bundles, requests, "text.trace")
        return simulate(load_script(path), None)


def ran(model: Path, prompt: list[int], share: float, workers: int = 1, mode: str = "exact") -> Ran:
    """An answer with a part of the neurons cached."""
    settings = {
        "num_workers": workers, "num_npu_threads": 0, "mode": FeedForwardMode(mode),
        "ffn_resident": share, "num_ctx": 256, "hot_clusters": (2,),
    }  # fmt: skip
    with LocalEngine(model, **settings) as engine:
        bundles = engine.layout.bundles
        assert bundles is not None and bundles.cold_slots
        assert not any(layer.rows_are.passes_through for layer in bundles.layers)
        reads = engine.arena.neuron_reads(engine.layout.at("boards.reads"))
        before = engine.cache().counters()
        answer = engine.generate(prompt, NUM_TOKENS)
        after = engine.cache().counters()
        counted = int(reads.reads), int(reads.bytes_read)
    assert after.late == before.late
    misses = after.misses - before.misses
    return Ran([*prompt, *answer.tokens[-NUM_TOKENS:]], after.hits - before.hits, misses, *counted,
               bundles)  # fmt: skip


def tiny_model(folder: Path, name: str) -> Path:
    """Random weights in bundles."""
    model = folder / "tiny.ncf"
    source = write_tiny_gguf(folder / "tiny.gguf", sparse_models(6)[name])
    convert(source, model, layout=Layout.BUNDLES)
    return model


def random_prompt() -> list[int]:
    prompt: list[int] = np.random.default_rng(3).integers(3, 90, PROMPT_TOKENS).tolist()
    return prompt


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("name", sparse_models(1))
def test_recording_gives_the_engines_hits_and_reads(
    tmp_path: Path, name: str, share: float
) -> None:
    model = tiny_model(tmp_path, name)
    engine = ran(model, random_prompt(), share)
    figures = engine.recorded(model, tmp_path)
    assert engine.misses > 0
    assert figures["miss_rate"] == engine.misses / (engine.hits + engine.misses)
    assert figures["reads_per_token"] == engine.reads / (NUM_TOKENS - 1)
    assert figures["bytes_per_token"] == engine.bytes / (NUM_TOKENS - 1)


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("mode", ["exact", "predicted"])
def test_model_files_give_them_by_the_engines_own_plan(
    tmp_path: Path, mode: str, share: float
) -> None:
    """In predicted mode with a predictor that names what exact mode computes."""
    model = tiny_model(tmp_path, "drelu")
    write_oracle(model)
    engine = ran(model, random_prompt(), share, mode=mode)
    make_profile(model, engine.tokens, None, record=tmp_path / "text.trace")
    script = load_script(write_page(tmp_path, mode, share))
    run = SimulatedRun(script, None, DeviceModel.of_profile(make_device(), 8 << 30))
    assert run.engine.cold_slots == engine.bundles.cold_slots
    assert run.engine.pinned_neurons == engine.bundles.pinned_neurons
    assert (run.engine.pinned_neurons > 0) == (mode == "predicted")
    figures = run.play()
    assert figures["reads_per_token"] == engine.reads / (NUM_TOKENS - 1)
    assert figures["bytes_per_token"] == engine.bytes / (NUM_TOKENS - 1)


def write_page(folder: Path, mode: str, share: float) -> Path:
    """A scenario of the tiny model's file, which the engine above ran."""
    path = folder / "ran.toml"
    path.write_text(
        'name = "ran"\n[device]\nprofile = "here"\n[model]\nfile = "tiny.ncf"\n'
        f'[activity]\ntrace = "text.trace"\n[engine]\nmode = "{mode}"\npolicy = "pipeline"\n'
        f"ffn_resident = {share}\ncontext = 256\nmax_sequences = 1\nhot_shares = [0.2]\n"
        f"[[requests]]\nprompt_tokens = {PROMPT_TOKENS}\noutput_tokens = {NUM_TOKENS}\n"
    )
    return path


@pytest.fixture(scope="module")
def real_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not DRELU.exists():
        pytest.skip(NO_DRELU)
    path = tmp_path_factory.mktemp("drelu") / "drelu.ncf"
    convert(DRELU, path, layout=Layout.BUNDLES)
    return path


@pytest.mark.parametrize("workers", [1, 2])
def test_real_text_gives_the_same(real_model: Path, tmp_path: Path, workers: int) -> None:
    tokenizer = Tokenizer.from_metadata(read_header(DRELU).metadata)
    prompt = tokenizer.encode(TEXT.read_text())[:PROMPT_TOKENS]
    engine = ran(real_model, prompt, 0.8, workers)
    figures = engine.recorded(real_model, tmp_path)
    rate = engine.misses / (engine.hits + engine.misses)
    print(f"engine misses {rate:.6f}, simulated {figures['miss_rate']:.6f}")
    bound = 0.0 if workers == 1 else OF_WORKERS
    assert figures["miss_rate"] == pytest.approx(rate, abs=bound, rel=0)
    bytes_per_token = engine.bytes / (NUM_TOKENS - 1)
    assert figures["bytes_per_token"] == pytest.approx(bytes_per_token, rel=10 * bound, abs=0)
