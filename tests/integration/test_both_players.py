"""One scenario of one file by both players: the simulator reads what the real engine reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from polyneuron.scenarios.device_model import DeviceModel
from polyneuron.scenarios.replay import replay
from polyneuron.scenarios.script import load_script
from polyneuron.scenarios.simulation import SimulatedRun
from tests.support.made_up_device import make_device
from tests.support.sparse_files import write_sparse_file

pytestmark = pytest.mark.ray

PAGE = """
name = "both"
[device]
profile = "here"
[model]
file = "sparse.ncf"
[engine]
mode = "{mode}"
ffn_resident = 0.5
context = 512
max_sequences = {sequences}
hot_shares = [{hot}]
[replay]
workers = 1
npu_threads = 0
[[requests]]
prompt_tokens = 16
output_tokens = 160
count = {sequences}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("models")
    write_sparse_file(found)
    return found


@pytest.mark.parametrize(
    ("mode", "sequences", "hot"),
    [("predicted", 1, 0.0), ("predicted", 2, 0.125), ("exact", 1, 0.0)],
)
def test_both_read_and_hit_alike(folder: Path, mode: str, sequences: int, hot: float) -> None:
    path = folder / "both.toml"
    path.write_text(PAGE.format(mode=mode, sequences=sequences, hot=hot))
    script = load_script(path)
    real = replay(script, None)
    device = DeviceModel.of_profile(make_device(), 8 << 30)
    model = SimulatedRun(script, None, device).play()
    assert model["tokens"] == real["tokens"] == 160 * sequences
    for name in ("reads_per_token", "bytes_per_token"):
        assert real[name]
        assert model[name] == pytest.approx(real[name], rel=0.2), name
    assert model["hit_rate"] == pytest.approx(real["hit_rate"], abs=0.03)
