"""Model files: sizes that add up to what the paper says."""

from pathlib import Path

import pytest

from polyneuron.errors import ConfigError
from polyneuron.scenarios.model_shape import ModelShape
from polyneuron.scenarios.script import read_toml
from tests.support.simulated import SCENARIOS, shape

FILES = sorted((SCENARIOS / "models").glob("*.toml"))
GIB = 1 << 30


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_file_is_whole(path: Path) -> None:
    table = read_toml(path)
    model = ModelShape.from_table(table, path.name)
    assert model.name == path.stem
    assert len(table["source"]) > 20 and len(table["bytes"]["source"]) > 20
    assert len(table["activity"]["source"]) > 20
    assert model.first_read + model.second_read >= model.slot


def test_mixtral_adds_up_to_the_papers_breakdown() -> None:
    # PAPER 3.4: 1 GB beside feed forward, 2.6 GB predictors, 2.7 GB scales, 0.3 GB buffers.
    model = shape("turbosparse-mixtral-47b")
    assert model.predictors == pytest.approx(2.6 * GIB, rel=0.01)
    assert model.resident == pytest.approx(3.0 * GIB, rel=0.01)
    others = model.other_bytes - model.resident + 512 * model.kv_token
    assert others == pytest.approx(1.0 * GIB, rel=0.1)
    assert model.ffn_slots_bytes == pytest.approx(21.0 * GIB, rel=0.01)


def test_bamboo_bundles_are_the_papers() -> None:
    model = shape("bamboo-7b")
    assert model.neuron_bytes == 7680 and model.bundle == 8192
    assert (model.first_read, model.second_read) == (4096, 4096)


def test_synth_shape_needs_no_file() -> None:
    model = ModelShape.from_table({"shape": "bamboo-7b", "layers": 4, "neurons": 1024}, "x")
    assert (model.layers, model.neurons, model.hidden) == (4, 1024, 4096)
    assert model.second_read == 0
    assert model.bundle % 512 == 0


@pytest.mark.parametrize(
    ("table", "complaint"),
    [
        ({"layers": 0, "hidden": 1, "neurons": 1}, "layers"),
        ({"layers": 1, "hidden": 64, "neurons": 64}, "bytes.row: missing"),
        ({"layers": 1, "hidden": 64, "neurons": 64, "neuron": 1}, "did you mean neurons"),
        ({"bytes": 3}, "give a table"),
    ],
)
def test_slips_are_named(table: dict, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        ModelShape.from_table(table, "model.toml")
