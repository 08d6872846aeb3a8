"""The vocabulary of a model as its file's metadata states it, checked."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from typing import Any

from polyneuron.errors import FormatError


class TokenType(IntEnum):
    """Values of `tokenizer.ggml.token_type`."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


# Tokens that end a generation by their text, as llama.cpp knows them; they count as control.
END_TEXTS = frozenset(
    [
        "<|eot_id|>",
        "<|eom_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|flush|>",
        "<|calls|>",
        "<end_of_turn>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<end_of_utterance>",
        "<EOT>",
        "_<EOT>",
        "[EOT]",
        "[EOS]",
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
        # ends of a fill-in-the-middle part: padding, next repository, next file
        "<|fim_pad|>",
        "<fim-pad>",
        "<fim_pad>",
        "<PAD>",
        "<|fim_repo|>",
        "<|repo_name|>",
        "<fim-repo>",
        "<REPO>",
        "<reponame>",
        "<|file_sep|>",
    ]
)
END_IDS_KEY = "tokenizer.end_token_ids"
"""Every token that ends a generation, of checkpoints, which may name several."""
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_MARKED = (TokenType.CONTROL, TokenType.UNKNOWN, TokenType.USER_DEFINED)


@dataclass(frozen=True)
class Vocabulary:
    """Texts, types and special ids; `place` starts every error message with the file's name."""

    place: str
    tokens: list[str]  # byte-level or SPM spelling; bytes that are no UTF-8 are surrogate-escaped
    types: list[int]
    bos_id: int | None
    end_ids: frozenset[int]
    eos_id: int | None
    strips: Mapping[int, tuple[bool, bool]] = field(default_factory=dict)
    """Marked tokens that take the white space before, or behind, them with them."""

    @cached_property
    def marked(self) -> dict[str, int]:
        """Tokens that are looked for in text as a whole (text -> id), longest first."""
        found = {
            self.tokens[i]: i
            for i, kind in enumerate(self.types)
            if kind in _MARKED and self.tokens[i]
        }
        return dict(sorted(found.items(), key=lambda item: -len(item[0].encode(errors="replace"))))

    def is_control(self, token_id: int) -> bool:
        """Whether a token is a control (or the unknown) token, never the text of a user."""
        return self.types[token_id] in (TokenType.CONTROL, TokenType.UNKNOWN)


def read_vocabulary(
    metadata: Mapping[str, Any], source: str, default_ids: tuple[int | None, int | None]
) -> Vocabulary:
    """Check the `tokenizer.ggml.*` arrays; `default_ids` are (bos, eos) when the file has none."""
    place = f"{source}: " if source else ""
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise FormatError(f"{place}tokenizer.ggml.tokens is missing or empty: no vocabulary")
    types = [int(kind) for kind in metadata.get("tokenizer.ggml.token_type", ())]
    types = types or [int(TokenType.NORMAL)] * len(tokens)
    if len(types) != len(tokens):
        raise FormatError(
            f"{place}tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens"
        )
    end_ids = {i for i, text in enumerate(tokens) if text in END_TEXTS and types[i] != 1}
    texts = {tokens[i] for i in end_ids}
    if {"<|return|>", "<|call|>"} <= texts:  # there <|end|> closes a message, not the answer
        end_ids = {i for i in end_ids if tokens[i] != "<|end|>"}
    for i in end_ids:  # some converters leave them user-defined
        types[i] = int(TokenType.CONTROL)
    named = {key: _special_id(metadata, key, len(tokens), place) for key in _END_KEYS}
    if named["eos_token_id"] is None and default_ids[1] is not None:
        named["eos_token_id"] = default_ids[1] if default_ids[1] < len(tokens) else None
    bos_id = _special_id(metadata, "bos_token_id", len(tokens), place)
    if bos_id is None and default_ids[0] is not None and default_ids[0] < len(tokens):
        bos_id = default_ids[0]
    end_ids.update(i for i in named.values() if i is not None)
    end_ids.update(i for i in map(int, metadata.get(END_IDS_KEY, ())) if 0 <= i < len(tokens))
    return Vocabulary(place, tokens, types, bos_id, frozenset(end_ids), named["eos_token_id"])


def _special_id(metadata: Mapping[str, Any], key: str, size: int, place: str) -> int | None:
    value = metadata.get(f"tokenizer.ggml.{key}")
    if value is None:
        return None
    if not 0 <= int(value) < size:
        raise FormatError(f"{place}tokenizer.ggml.{key} is {value}, outside the {size} tokens")
    return int(value)
