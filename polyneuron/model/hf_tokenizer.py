"""A checkpoint's tokenizer files as metadata, under the keys that a GGUF has for them.

The text of tokenizer.json itself is kept (`tokenizer.huggingface.json`, a key of GGUF's own): it
says how text is cut, so nothing has to be guessed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from polyneuron.errors import FormatError, UnsupportedError
from polyneuron.io.gguf_values import quoted
from polyneuron.io.json_file import read_json, read_text
from polyneuron.model.json_tokenizer import JSON_KEY, begins_with, token_table
from polyneuron.model.vocabulary import END_IDS_KEY, TokenType

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja",
    "chat_template.json",
)  # fmt: skip
MAX_ROWS = 1 << 24


def tokenizer_metadata(folder: Path, config: Mapping[str, Any], num_rows: int) -> dict[str, Any]:
    """Keys `tokenizer.*`; `num_rows` of the embedding, which may have more than there are tokens.

    FormatError in one line that names the file and the cure.
    """
    path = folder / "tokenizer.json"
    if not path.exists():
        raise _missing(folder)
    described = read_json(path)
    settings = _optional_json(folder / "tokenizer_config.json")
    generation = _optional_json(folder / "generation_config.json")
    tokens, types = token_table(described, str(path))
    if len(tokens) > num_rows:
        raise FormatError(
            f"{path}: has {len(tokens)} tokens for the {num_rows} rows of the embedding; files of "
            "two models? fetch them again"
        )
    extra = range(len(tokens), min(num_rows, MAX_ROWS))  # rows that no text leads to
    found: dict[str, Any] = {
        JSON_KEY: json.dumps(described, ensure_ascii=False, separators=(",", ":")),
        "tokenizer.ggml.tokens": tokens + [f"[PAD{index}]" for index in extra],
        "tokenizer.ggml.token_type": np.array(
            types + [int(TokenType.UNUSED)] * len(extra), np.int32
        ),
    }
    ids = {text: index for index, text in enumerate(tokens)}
    bos = _special(settings, "bos_token", ids, config.get("bos_token_id"))
    ends = _end_ids(settings, generation, config, ids, num_rows)
    if bos is not None and 0 <= bos < num_rows:
        found["tokenizer.ggml.bos_token_id"] = bos
    if ends:
        found["tokenizer.ggml.eos_token_id"] = ends[0]
        found[END_IDS_KEY] = np.array(ends, np.int32)
    told = settings.get("add_bos_token")
    adds = told if isinstance(told, bool) else begins_with(described, str(path)) == bos
    found["tokenizer.ggml.add_bos_token"] = bos is not None and adds
    template = _chat_template(folder, settings)
    return found | ({"tokenizer.chat_template": template} if template else {})


def _missing(folder: Path) -> FormatError:
    other = next((n for n in ("tokenizer.model", "vocab.json") if (folder / n).exists()), None)
    if other is None:
        return FormatError(f"{folder}: tokenizer.json is missing; fetch it into the same folder")
    return UnsupportedError(
        f"{folder}: has {other} and no tokenizer.json; make it with transformers: "
        "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
    )


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _text_of(token: Any) -> str | None:
    """A token in tokenizer_config.json: its text, or an object with it."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _special(
    settings: Mapping[str, Any], key: str, ids: Mapping[str, int], fallback: Any
) -> int | None:
    """The id of a token by its name in tokenizer_config.json, else as the model's config has it."""
    text = _text_of(settings.get(key))
    if text is not None and text in ids:
        return ids[text]
    if isinstance(fallback, list):
        fallback = fallback[0] if fallback else None
    return fallback if isinstance(fallback, int) and not isinstance(fallback, bool) else None


def _end_ids(
    settings: Mapping[str, Any],
    generation: Mapping[str, Any],
    config: Mapping[str, Any],
    ids: Mapping[str, int],
    num_rows: int,
) -> list[int]:
    """All tokens that end an answer, the tokenizer's own first; ids of other models left out."""
    own = _special(settings, "eos_token", ids, None)
    ends: list[Any] = [own]
    for values in (generation, config):
        told = values.get("eos_token_id")
        ends += told if isinstance(told, list) else [told]
    whole = [i for i in ends if isinstance(i, int) and not isinstance(i, bool)]
    return list(dict.fromkeys(i for i in whole if 0 <= i < num_rows))


def _chat_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """The template's own file, else that of tokenizer_config.json; of several the default one."""
    file = folder / "chat_template.jinja"
    if file.exists():
        return read_text(file)
    told = _optional_json(folder / "chat_template.json").get(
        "chat_template", settings.get("chat_template")
    )
    if isinstance(told, list):
        named = {t.get("name"): t.get("template") for t in told if isinstance(t, Mapping)}
        told = named.get("default", next(iter(named.values()), None))
    if told is None or isinstance(told, str):
        return told
    raise FormatError(
        f"{folder / 'tokenizer_config.json'}: chat_template is {quoted(type(told).__name__)}, a "
        "string is expected; fetch it again"
    )
