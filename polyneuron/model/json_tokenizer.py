"""Tokenizers that a tokenizer.json describes, run by the `tokenizers` library as it says.

Added tokens are taken out of the description: which parts of a text may be control tokens is
decided before, since the content of a chat message never may (`tokenizer.Tokenizer`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import tokenizers

from polyneuron.errors import FormatError, UnsupportedError
from polyneuron.io.gguf_values import quoted
from polyneuron.model.byte_level import spelled_bytes
from polyneuron.model.vocabulary import TokenType, Vocabulary

JSON_KEY = "tokenizer.huggingface.json"
SPACE = "\u2581"
BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")
MAX_ID = 1 << 24
PROBE = "a"


class JsonTextModel:
    """Plain text to ids by a description without added tokens, and ids to bytes by its decoder."""

    def __init__(self, described: Mapping[str, Any], vocabulary: Vocabulary) -> None:
        place = vocabulary.place
        plain = _without_specials(described, vocabulary)
        self._tokenizer = _build(plain, place)
        self.prefixes_once = any(
            part.get("prepend_scheme") == "first" for part in _parts(plain["pre_tokenizer"])
        )
        """Whether only the beginning of all text, and not what follows a special token, gets a
        space put before."""
        self._inside = self._tokenizer
        if self.prefixes_once:
            step = _never_prefixing(plain["pre_tokenizer"])
            self._inside = _build({**plain, "pre_tokenizer": step}, place)
        self._is_byte_level = _is_byte_level(described)
        self._vocabulary = vocabulary

    def encode(self, text: str, after_special: bool) -> list[int]:
        """Token ids of plain text; `after_special`: a space may have to be put before."""
        tokenizer = self._tokenizer if after_special else self._inside
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes a token that is ordinary text stands for."""
        text = self._vocabulary.tokens[token_id]
        if self._vocabulary.types[token_id] == TokenType.BYTE:
            return bytes([int(text[3:5], 16)])
        if self._is_byte_level:
            return spelled_bytes(text)
        return text.replace(SPACE, " ").encode("utf-8", "surrogateescape")


def token_table(described: Mapping[str, Any], place: str) -> tuple[list[str], list[int]]:
    """Texts and types of all tokens by id; ids without a token are filled with unused ones.

    Raises UnsupportedError naming the kind of tokenizer, FormatError when it is damaged.
    """
    model = described.get("model")
    kind = model.get("type", "BPE") if isinstance(model, Mapping) else None
    vocab = model.get("vocab") if isinstance(model, Mapping) else None
    if kind != "BPE":
        raise UnsupportedError(
            f"{place}: its model is {quoted(str(kind))}; supported: BPE, byte-level or with byte "
            "fallback"
        )
    added = described.get("added_tokens") or []
    if not isinstance(vocab, Mapping) or not isinstance(added, list):
        raise FormatError(f"{place}: has no vocabulary; fetch it again")
    try:
        ids = {int(index): str(text) for text, index in vocab.items()}
        ids |= {int(token["id"]): str(token["content"]) for token in added}
        special = {int(token["id"]): bool(token["special"]) for token in added}
    except (KeyError, TypeError, ValueError, OverflowError):
        raise FormatError(f"{place}: a token has no text or no id; fetch it again") from None
    if not ids or min(ids) < 0 or max(ids) >= MAX_ID:
        raise FormatError(f"{place}: token ids outside 0 to {MAX_ID}; fetch it again")
    assert isinstance(model, Mapping)  # else it has no vocabulary
    unknown, has_bytes = model.get("unk_token"), bool(model.get("byte_fallback"))
    tokens = [ids.get(index, f"[PAD{index}]") for index in range(max(ids) + 1)]
    types = []
    for index, text in enumerate(tokens):
        if index not in ids:
            types.append(TokenType.UNUSED)
        elif text == unknown:
            types.append(TokenType.UNKNOWN)
        elif index in special:
            types.append(TokenType.CONTROL if special[index] else TokenType.USER_DEFINED)
        else:
            is_byte = has_bytes and BYTE_TOKEN.fullmatch(text)
            types.append(TokenType.BYTE if is_byte else TokenType.NORMAL)
    return tokens, [int(token_type) for token_type in types]


def begins_with(described: Mapping[str, Any], place: str) -> int | None:
    """The token that the description puts before every text; None without one."""
    tokenizer = _build(described, place)
    plain = tokenizer.encode(PROBE, add_special_tokens=False).ids
    full = tokenizer.encode(PROBE, add_special_tokens=True).ids
    return int(full[0]) if len(full) > len(plain) and full[: len(plain)] != plain else None


def stripping_tokens(described: Mapping[str, Any]) -> dict[int, tuple[bool, bool]]:
    """Added tokens that take the white space before or behind them with them."""
    return {
        int(token["id"]): (bool(token.get("lstrip")), bool(token.get("rstrip")))
        for token in described.get("added_tokens") or []
        if token.get("lstrip") or token.get("rstrip")
    }


def parse_description(text: Any, place: str) -> dict[str, Any]:
    """The description that a model file carries; FormatError naming the file."""
    try:
        found = json.loads(text) if isinstance(text, str) else None
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or not isinstance(found.get("model"), dict):
        raise FormatError(f"{place}{JSON_KEY}: no description of a tokenizer; convert it again")
    return found


def _build(described: Mapping[str, Any], place: str) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_str(json.dumps(described))
    except Exception as error:  # the library raises no narrower class
        where = f"{place}: " if place and not place.endswith(": ") else place
        raise FormatError(f"{where}tokenizer.json cannot be used: {error}") from error


def _without_specials(described: Mapping[str, Any], vocabulary: Vocabulary) -> dict[str, Any]:
    """The description without added tokens, and without control tokens that text could become."""
    model = dict(described["model"])
    kinds = dict(zip(vocabulary.tokens, vocabulary.types, strict=True))
    control = {text for text, kind in kinds.items() if kind == TokenType.CONTROL}
    vocab = {text: index for text, index in model["vocab"].items() if text not in control}
    model["vocab"] = vocab
    model["merges"] = _usable(model.get("merges"), vocab, vocabulary.place)
    return {
        "version": described.get("version", "1.0"),
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": described.get("normalizer"),
        "pre_tokenizer": described.get("pre_tokenizer"),
        "post_processor": None,
        "decoder": None,
        "model": model,
    }


def _usable(merges: Any, vocab: Mapping[str, int], place: str) -> list[Any]:
    """The merges, each a pair or two words in one string, that make a token that is left."""
    found = []
    for merge in merges if isinstance(merges, list) else []:
        pair = merge.split(" ", 1) if isinstance(merge, str) else merge
        if not isinstance(pair, list) or [type(part) for part in pair] != [str, str]:
            raise FormatError(f"{place}tokenizer.json: a merge is no pair of texts; fetch it again")
        if {*pair, "".join(pair)} <= vocab.keys():
            found.append(merge)
    return found


def _is_byte_level(described: Mapping[str, Any]) -> bool:
    parts = [*_parts(described.get("decoder")), *_parts(described.get("pre_tokenizer"))]
    return any(part.get("type") == "ByteLevel" for part in parts)


def _never_prefixing(step: Any) -> Any:
    """The same step for text that others stand before."""
    if isinstance(step, list):
        return [_never_prefixing(part) for part in step]
    if not isinstance(step, Mapping):
        return step
    changed = {key: _never_prefixing(value) for key, value in step.items()}
    return changed | ({"prepend_scheme": "never"} if "prepend_scheme" in step else {})


def _parts(step: Any) -> Iterator[Mapping[str, Any]]:
    """A step of the description, and the steps it is a sequence of."""
    if isinstance(step, Mapping):
        yield step
        for name in ("pretokenizers", "normalizers", "decoders"):
            for part in step.get(name) or []:
                yield from _parts(part)
