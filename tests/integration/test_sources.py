"""Models in several files on the actors: a folder and parts run as the one GGUF does."""

from __future__ import annotations

from pathlib import Path

import pytest

from polyneuron.errors import DeviceError, PolyneuronError
from tests.support.engines import CONFIG, GREEDY, PROMPT, open_engine
from tests.support.hf_folders import write_hf_folder
from tests.support.local_engine import LocalEngine
from tests.support.parted_models import split_gguf
from tests.support.powerinfer_files import write_pwri_model
from tests.support.tiny_gguf import TinyModel, random_weights, write_tiny_gguf

pytestmark = pytest.mark.ray

MODEL = TinyModel(family="bamboo", d_model=128, d_ff=256, head_dim=32, tied_head=False)


def write_source(folder: Path, kind: str) -> Path:
    """The model in files of that kind."""
    if kind == "folder":
        return write_hf_folder(folder / "hf", MODEL.spec(), random_weights(MODEL))
    if kind == "parts":
        return split_gguf(folder, MODEL)
    return write_pwri_model(folder / "m.powerinfer.gguf", MODEL)


@pytest.mark.parametrize("kind", ["folder", "parts", "powerinfer"])
def test_tokens_are_those_of_one_gguf(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    gguf = write_tiny_gguf(tmp_path / "whole.gguf", MODEL)
    with LocalEngine(gguf, num_ctx=CONFIG.num_ctx) as local:
        expected = local.generate(PROMPT, 20).tokens
    source = write_source(tmp_path, kind)
    with open_engine(source, num_ctx=256) as engine:
        found = engine.generate(PROMPT, max_tokens=20, sampling=GREEDY, ignore_eos=True)
        line = engine.mode().line()
    assert found.tokens == expected
    assert ("buffered reads (several files)" in line) == (kind != "powerinfer")


def test_shard_that_is_lost_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the look at headers and the reading of weights."""
    from polyneuron.actors import launch

    source = write_source(tmp_path, "folder")
    shard, original = source / "model-00002-of-00003.safetensors", launch.load

    def lose(*arguments: object) -> object:
        shard.unlink()
        return original(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(launch, "load", lose)
    with pytest.raises(PolyneuronError) as caught:
        open_engine(source, num_ctx=256)
    assert isinstance(caught.value, DeviceError)
    assert f"{shard}: cannot be opened" in str(caught.value)
