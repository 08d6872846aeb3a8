"""Small simulated engines and scripts for tests: everything has a default."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from polyneuron.scenarios.activity import Activity
from polyneuron.scenarios.device_model import DeviceModel
from polyneuron.scenarios.model_shape import ModelShape
from polyneuron.scenarios.script import Script, load_script, read_toml

ROOT = Path(__file__).resolve().parents[2]
SCENARIOS = ROOT / "scenarios"

TINY_MODEL = """
[model]
name = "tiny"
layers = 3
hidden = 256
neurons = 512
[model.bytes]
row = 128
scales = 16
slot = 512
bundle = 512
first_read = 256
second_read = 256
attention = 100000
embedding = 100000
head = 100000
predictors = 100000
resident = 0
kv_token = 1000
[model.activity]
active = 0.15
skew = 4.0
overlap = 0.6
burst = 0.6
gate = 0.8
"""
EXPERTS = """
[model]
name = "tiny-experts"
layers = 3
hidden = 256
neurons = 256
experts = 4
experts_used = 2
""" + TINY_MODEL.partition("neurons = 512\n")[2].replace(
    "gate = 0.8", "gate = 0.8\nexpert_overlap = 0.3\nexpert_skew = 0.2"
)


def device(name: str = "oneplus12") -> DeviceModel:
    """A device of the package."""
    path = SCENARIOS / "devices" / f"{name}.toml"
    return DeviceModel.from_table(read_toml(path), path.name)


def shape(name: str = "bamboo-7b") -> ModelShape:
    """A model of the package."""
    path = SCENARIOS / "models" / f"{name}.toml"
    return ModelShape.from_table(read_toml(path), path.name)


def activity(**changes: float) -> Activity:
    """Statistics of a sparse model."""
    usual = {"active": 0.15, "skew": 4.0, "overlap": 0.6, "burst": 0.0, "gate": 0.8}
    return Activity(**{**usual, **changes})


def write_script(
    folder: Path, *, model: str = TINY_MODEL, policy: str = "powerinfer2", engine: str = "",
    requests: str = "prompt_tokens = 16\noutput_tokens = 24", extra: str = "", seed: int = 1,
    profile: str = "oneplus12",
) -> Path:  # fmt: skip
    """A scenario of a tiny model."""
    path = folder / "tried.toml"
    engine = engine or "ffn_resident = 0.5"
    path.write_text(
        f'name = "tried"\nplayers = ["simulate"]\nseed = {seed}\n[device]\n'
        f'profile = "{profile}"\n{model}\n[engine]\n'
        f'policy = "{policy}"\ncontext = 256\n{engine}\n[[requests]]\n{requests}\n{extra}\n'
    )
    return path


def script(folder: Path, **changes: Any) -> Script:
    """The same, read."""
    return load_script(write_script(folder, **changes))
