"""An answer of real actors with a real model, recorded and simulated: the same hits and reads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from polyneuron import Engine, EngineConfig
from polyneuron.completion import Completion
from polyneuron.config import FeedForwardMode
from polyneuron.io.activation_trace import read_trace
from polyneuron.io.gguf_file import read_header
from polyneuron.io.ncf_format import Layout
from polyneuron.model.convert import convert
from polyneuron.model.tokenizer import Tokenizer
from polyneuron.profiling.profile import make_profile
from polyneuron.scenarios.device_model import DeviceModel
from polyneuron.scenarios.result import Figures
from polyneuron.scenarios.script import load_script
from polyneuron.scenarios.simulation import SimulatedRun
from tests.support.local_engine import GREEDY
from tests.support.made_up_device import make_device
from tests.support.models import DRELU, NO_DRELU

pytestmark = [pytest.mark.ray, pytest.mark.skipif(not DRELU.exists(), reason=NO_DRELU)]

TEXT = Path(__file__).resolve().parents[1] / "data" / "text" / "genesis_1_12.txt"
PROMPT_TOKENS, NUM_TOKENS = 24, 48
SHARE = 0.6
TRIES = 3
OF_WORKERS = 0.002
"""Of all uses: two workers look tasks up in whatever order they come to them."""
MOST_READS_AHEAD = 8
"""Three stage buffers of two reads, and one at work: after a prompt the reader fills them for the
next one, and chance tells which of that is counted."""
PAGE = f"""
name = "ran"
[device]
profile = "here"
[model]
file = "drelu.ncf"
[activity]
trace = "text.trace"
[engine]
mode = "exact"
policy = "pipeline"
ffn_resident = {SHARE}
context = 256
max_sequences = 1
[[requests]]
prompt_tokens = {PROMPT_TOKENS}
output_tokens = {NUM_TOKENS}
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("drelu") / "drelu.ncf"
    convert(DRELU, path, layout=Layout.BUNDLES)
    return path


def answered(model: Path, prompt: list[int], workers: int) -> Completion:
    config = EngineConfig(
        num_ctx=256, num_workers=workers, num_npu_threads=0, max_sequences=1, deterministic=True
    )
    with Engine(str(model), config, ffn_resident=SHARE, mode=FeedForwardMode.EXACT) as engine:
        return engine.generate(prompt, max_tokens=NUM_TOKENS, sampling=GREEDY, ignore_eos=True)


def simulated(model: Path, tokens: list[int]) -> Figures:
    """The same by the engine's own plan; the device's speed plays no part."""
    make_profile(model, tokens, None, record=model.parent / "text.trace")
    page = model.parent / "ran.toml"
    page.write_text(PAGE)
    device = DeviceModel.of_profile(make_device(), 8 << 30)
    return SimulatedRun(load_script(page), None, device).play()


def needed(model: Path) -> int:
    """Neurons that the decode steps of the recorded answer use."""
    bits = read_trace(model.parent / "text.trace").bits
    decoded = bits[:, PROMPT_TOKENS : PROMPT_TOKENS + NUM_TOKENS - 1]
    return int(np.unpackbits(np.ascontiguousarray(decoded).view(np.uint8)).sum())


@pytest.mark.parametrize("workers", [1, 2])
def test_simulation_reads_what_the_actors_read(model: Path, workers: int) -> None:
    """On a busy machine a step may be late and computed again: then it is asked again."""
    tokenizer = Tokenizer.from_metadata(read_header(DRELU).metadata)
    prompt = tokenizer.encode(TEXT.read_text())[:PROMPT_TOKENS]
    for _ in range(TRIES):
        io = (answer := answered(model, prompt, workers)).io
        figures = simulated(model, [*prompt, *answer.tokens])
        if io.decode.hits + io.decode.misses == needed(model):
            break
    print(f"actors hit {io.hit_rate:.6f}, simulated {figures['hit_rate']:.6f}")
    bound = 0.0 if workers == 1 else OF_WORKERS
    assert io.decode.hits + io.decode.misses == needed(model)
    assert io.hit_rate is not None and 0.5 < io.hit_rate < 0.95
    assert figures["hit_rate"] == pytest.approx(io.hit_rate, abs=bound + 1e-12, rel=0)
    assert io.reads_per_token is not None
    steps = NUM_TOKENS - 1
    more = round(steps * (io.reads_per_token - figures["reads_per_token"]))
    by_chance = 10 * bound * steps * io.reads_per_token
    assert -by_chance <= more <= by_chance + MOST_READS_AHEAD
