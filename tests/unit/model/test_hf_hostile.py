"""Whatever the small files of a folder say, it is read or refused in one line."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from polyneuron.errors import FormatError
from polyneuron.model.architecture import describe
from polyneuron.model.model_header import read_model_header
from polyneuron.model.tokenizer import Tokenizer
from tests.support.hf_folders import hf_config, write_hf_folder
from tests.support.tiny_gguf import TinyModel, random_weights

ODD: tuple[Any, ...] = (
    None, True, "x", "", -1, 0, 1.5, float("inf"), 1 << 70, [], [1], ["a", None], {}, {"a": 1},
)  # fmt: skip
FAMILIES = ("llama", "qwen3moe", "gemma3", "falcon", "opt")
"""One for each way in which rows of the table differ."""


def read(folder: Path) -> None:
    """Read all of it; only a FormatError in one line that names the folder may come of it."""
    try:
        header = read_model_header(folder)
        describe(header)
        Tokenizer.from_metadata(header.metadata, folder.name).encode("hello <|im_end|>")
    except FormatError as error:
        message = str(error)
        assert "\n" not in message
        assert str(folder) in message or folder.name in message


def numbers_of(model: TinyModel) -> dict[str, Any]:
    return hf_config(model.spec()) | {"quantization_config": None, "mlp_only_layers": []}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_key_of_config_may_be_anything(tmp_path: Path, family: str) -> None:
    model = TinyModel(family=family, d_ff=32, num_kv_heads=1 if family == "falcon" else 2)
    folder = write_hf_folder(tmp_path / "m", model.spec(), random_weights(model))
    config = json.loads((folder / "config.json").read_text())
    for key in numbers_of(model):
        for value in ODD:
            (folder / "config.json").write_text(json.dumps(config | {key: value}))
            read(folder)
    for key in config["rope_parameters"]:
        for value in ODD:
            changed = config | {"rope_parameters": {**config["rope_parameters"], key: value}}
            (folder / "config.json").write_text(json.dumps(changed))
            read(folder)


@pytest.mark.parametrize("kind", ["linear", "yarn", "llama3", "longrope"])
def test_every_key_of_scaled_ropes_may_be_anything(tmp_path: Path, kind: str) -> None:
    model = TinyModel(family="phi3" if kind == "longrope" else "llama")
    rope: dict[str, Any] = {
        "rope_type": kind, "factor": 2.0, "original_max_position_embeddings": 64,
        "low_freq_factor": 1.0, "high_freq_factor": 4.0, "beta_fast": 32, "beta_slow": 1,
        "short_factor": [1.0] * 8, "long_factor": [2.0] * 8,
    }  # fmt: skip
    folder = write_hf_folder(tmp_path / "m", model.spec(), random_weights(model))
    config = json.loads((folder / "config.json").read_text())
    for key in rope:
        for value in ODD:
            changed = config | {"rope_parameters": {**rope, key: value}}
            (folder / "config.json").write_text(json.dumps(changed))
            read(folder)


@pytest.mark.parametrize(
    "name", ["tokenizer_config.json", "generation_config.json", "model.safetensors.index.json"]
)
def test_every_key_beside_it_may_be_anything(tmp_path: Path, name: str) -> None:
    model = TinyModel()
    folder = write_hf_folder(tmp_path / "m", model.spec(), random_weights(model))
    content = json.loads((folder / name).read_text())
    for key in content:
        for value in ODD:
            (folder / name).write_text(json.dumps(content | {key: value}))
            read(folder)


@pytest.mark.parametrize(
    "place",
    [
        ("model",), ("model", "vocab"), ("model", "merges"), ("model", "unk_token"),
        ("model", "byte_fallback"), ("added_tokens",), ("added_tokens", 0),
        ("added_tokens", 0, "id"), ("added_tokens", 0, "content"), ("added_tokens", 0, "special"),
        ("added_tokens", 0, "lstrip"), ("pre_tokenizer",), ("normalizer",), ("decoder",),
        ("post_processor",),
    ],
)  # fmt: skip
def test_every_part_of_a_tokenizer_may_be_anything(
    tmp_path: Path, place: tuple[str | int, ...]
) -> None:
    model = TinyModel()
    folder = write_hf_folder(tmp_path / "m", model.spec(), random_weights(model))
    text = (folder / "tokenizer.json").read_text()
    for value in ODD:
        content = json.loads(text)
        part = content
        for step in place[:-1]:
            part = part[step]
        part[place[-1]] = value
        (folder / "tokenizer.json").write_text(json.dumps(content))
        read(folder)


def test_index_may_name_anything(tmp_path: Path) -> None:
    model = TinyModel()
    folder = write_hf_folder(tmp_path / "m", model.spec(), random_weights(model))
    for value in (*ODD, "a\0b", "x" * 5000, "config.json", "tokenizer.json"):
        index = {"weight_map": {"model.norm.weight": value}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        with contextlib.suppress(FormatError):
            read_model_header(folder)
        read(folder)
