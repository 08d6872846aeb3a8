"""A Hugging Face folder as the header of the GGUF it could be converted to.

config.json gives the metadata, safetensors the tensors, tokenizer.json the vocabulary. Weights stay
where they are: the header says at which addresses they are read (`io.model_files`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from polyneuron.errors import FormatError, UnsupportedError
from polyneuron.io.gguf_file import GgufHeader
from polyneuron.io.gguf_values import quoted, some_of
from polyneuron.io.json_file import read_json
from polyneuron.io.model_files import ModelFiles
from polyneuron.io.safetensors_file import SafetensorsFile, read_safetensors
from polyneuron.model.hf_config import (
    HfConfig,
    config_metadata,
    llama3_factors,
    long_factors,
    read_config,
    shown,
)
from polyneuron.model.hf_tensors import Found, TensorTable
from polyneuron.model.hf_tokenizer import TOKENIZER_FILES, tokenizer_metadata
from polyneuron.model.rope import ROPE_FREQS

FORMAT = "safetensors"
INDEX, WHOLE = "model.safetensors.index.json", "model.safetensors"
SHARD = re.compile(r"model-[0-9]{5}-of-([0-9]{5})\.safetensors")
PICKLES = ("*.bin", "*.pt", "*.pth")
EMBEDDING = "token_embd.weight"
MAX_NAMED = 3


def is_hf_folder(folder: Path) -> bool:
    """Whether a folder is, or should be, a checkpoint: a GGUF beside config.json is a model too."""
    if any(folder.glob("*.safetensors")) or (folder / INDEX).exists():
        return True
    names = ("config.json", "adapter_config.json")
    return any((folder / name).exists() for name in names) and not any(folder.glob("*.gguf"))


def read_hf_folder(folder: Path) -> GgufHeader:
    """The header of a checkpoint; FormatError in one line that names the file and the cure."""
    folder = folder.resolve()
    _refuse_adapter(folder)
    if not (folder / "config.json").exists():
        raise FormatError(f"{folder}: config.json is missing; fetch it into the same folder")
    config = read_config(folder)
    metadata = {
        "general.architecture": config.family.family,
        "general.name": folder.name,
        **config_metadata(config),
    }
    shards = _open_shards(folder)
    table = _tensors(config, shards)
    by_name = {tensor.name: tensor for tensor in table.tensors}
    if EMBEDDING not in by_name:
        raise FormatError(f"{folder}: no shard holds the embedding; not a language model's folder")
    metadata |= tokenizer_metadata(folder, config.values, by_name[EMBEDDING].num_rows)
    beside = [folder / name for name in ("config.json", INDEX, *TOKENIZER_FILES)]
    paths = [shard.path for shard in shards] + [path for path in beside if path.exists()]
    return GgufHeader(
        path=folder,
        version=0,
        metadata=metadata,
        tensors=tuple(table.tensors),
        alignment=1,
        data_offset=0,
        file_bytes=table.num_bytes,
        by_name=by_name,
        files=ModelFiles(tuple(table.extents), tuple(paths)),
        format=FORMAT,
    )


def _tensors(config: HfConfig, shards: Iterable[SafetensorsFile]) -> TensorTable:
    """Every tensor that the model uses, and those it would not know what to do with."""
    found = {
        name: Found(shard, name, entry) for shard in shards for name, entry in shard.tensors.items()
    }
    tied, has_head = config.values.get("tie_word_embeddings"), "lm_head.weight" in found
    if tied is True and has_head:
        del found["lm_head.weight"]  # the embedding again
    if tied is False and not has_head:
        config.fail("tie_word_embeddings is false, but no shard holds lm_head.weight; fetch them")
    table = TensorTable(config)
    table.add_all(found.values())
    if factors := llama3_factors(config):
        table.add_made(ROPE_FREQS, factors)
    for name, divisors in long_factors(config).items():
        table.add_made(name, divisors)
    return table


def _open_shards(folder: Path) -> list[SafetensorsFile]:
    """The files that make up the checkpoint, each tensor in the one that the index names."""
    index = folder / INDEX
    if index.exists():
        return _indexed(index)
    files = sorted(folder.glob("*.safetensors"))
    whole = folder / WHOLE
    if whole.exists():
        return [read_safetensors(whole)]
    numbered = [file for file in files if SHARD.fullmatch(file.name)]
    if not files:
        _refuse_pickles(folder)
        raise FormatError(f"{folder}: no *.safetensors beside config.json; fetch {WHOLE} into it")
    if len(files) == 1 and not numbered:
        return [read_safetensors(files[0])]
    raise FormatError(
        f"{folder}: {INDEX} is missing, which says what the {len(files)} files hold; fetch it into "
        "the same folder"
    )


def _indexed(index: Path) -> list[SafetensorsFile]:
    names = read_json(index).get("weight_map")
    if not isinstance(names, Mapping) or not all(isinstance(n, str) for n in names.values()):
        raise FormatError(f"{index}: has no weight_map from tensors to files; fetch it again")
    shards = sorted(set(names.values()))
    if any("/" in shard or "\0" in shard or not 0 < len(shard) <= 255 for shard in shards):
        raise FormatError(f"{index}: names files outside the folder; fetch it again")
    missing = [shard for shard in shards if not (index.parent / shard).exists()]
    if missing:
        raise FormatError(
            f"{index.parent}: of {len(shards)} shards {len(missing)} missing: "
            f"{some_of(missing, MAX_NAMED)}; fetch what is missing into the same folder"
        )
    files = {shard: read_safetensors(index.parent / shard) for shard in shards}
    for name, shard in names.items():
        if name not in files[shard].tensors:
            raise FormatError(
                f"{files[shard].path}: lacks tensor {quoted(name)}, which {INDEX} says it holds; "
                "fetch it again"
            )
    return list(files.values())


def _refuse_adapter(folder: Path) -> None:
    adapter = folder / "adapter_config.json"
    if not adapter.exists() or (folder / WHOLE).exists() or (folder / INDEX).exists():
        return
    base = read_json(adapter).get("base_model_name_or_path")
    raise UnsupportedError(
        f"{folder}: a LoRA adapter (of {shown(base)}), not a model; merge it into its base with "
        "peft's merge_and_unload and save_pretrained, and give that folder"
    )


def _refuse_pickles(folder: Path) -> None:
    pickles = sorted(file.name for pattern in PICKLES for file in folder.glob(pattern))
    if pickles:
        raise UnsupportedError(
            f"{folder}: its weights are PyTorch pickles ({pickles[0]}), which are not read since "
            "they can run code; save it once more with transformers' save_pretrained, which "
            "writes safetensors, or give a GGUF"
        )
