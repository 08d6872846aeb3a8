"""Text to token ids and back, built from the metadata of a GGUF file."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Protocol

from polyneuron.errors import FormatError, UnsupportedError
from polyneuron.model.byte_level import ByteLevelBpe
from polyneuron.model.json_tokenizer import (
    JSON_KEY,
    JsonTextModel,
    parse_description,
    stripping_tokens,
)
from polyneuron.model.pre_tokenizers import find_pre_tokenizer
from polyneuron.model.spm import ScoreMerger
from polyneuron.model.vocabulary import TokenType, Vocabulary, read_vocabulary

_SURROGATES = re.compile("[\ud800-\udfff]")  # bytes of a command line that are no UTF-8
_AS_WRITTEN = (TokenType.CONTROL, TokenType.UNKNOWN, TokenType.USER_DEFINED)


class TextModel(Protocol):
    """What differs between the families of vocabularies."""

    def encode(self, text: str, after_special: bool) -> list[int]:
        """Token ids of text without special tokens."""

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of a token that is ordinary text."""


class Tokenizer:
    """A model's vocabulary with its way of cutting text."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        model: TextModel,
        add_bos: bool,
        prefixes_once: bool = False,
    ) -> None:
        self._vocabulary = vocabulary
        self._prefixes_once = prefixes_once
        self._model = model
        self._marked_starts = _starts(vocabulary.marked)
        self.add_bos = add_bos

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any], source: str = "") -> "Tokenizer":
        """Build from `tokenizer.*`; `source` is the file's name, for error messages."""
        place = f"{source}: " if source else ""
        family = metadata.get("tokenizer.ggml.model")
        if family is None and JSON_KEY in metadata:
            return cls._described(metadata, source, place)
        if family == "gpt2":
            return cls._byte_level(metadata, source, place)
        if family == "llama":
            return cls._spm(metadata, source, place)
        raise UnsupportedError(
            f"{place}tokenizer.ggml.model is {family!r}; "
            f"supported: gpt2 (byte-level BPE), llama (SPM)"
        )

    @classmethod
    def _byte_level(cls, metadata: Mapping[str, Any], source: str, place: str) -> "Tokenizer":
        architecture = str(metadata.get("general.architecture"))
        kind = find_pre_tokenizer(metadata.get("tokenizer.ggml.pre"), place, architecture)
        vocabulary = read_vocabulary(metadata, source, (None, None))
        merges = metadata.get("tokenizer.ggml.merges")
        if merges is None:
            raise FormatError(
                f"{place}tokenizer.ggml.merges is missing: a gpt2 vocabulary needs it"
            )
        model = ByteLevelBpe(vocabulary, merges, kind)
        add_bos = bool(metadata.get("tokenizer.ggml.add_bos_token", kind.add_bos))
        return cls(vocabulary, model, add_bos)

    @classmethod
    def _described(cls, metadata: Mapping[str, Any], source: str, place: str) -> "Tokenizer":
        """Of a checkpoint, which says itself how text is cut."""
        described = parse_description(metadata[JSON_KEY], place)
        vocabulary = read_vocabulary(metadata, source, (None, None))
        vocabulary = replace(vocabulary, strips=stripping_tokens(described))
        model = JsonTextModel(described, vocabulary)
        add_bos = bool(metadata.get("tokenizer.ggml.add_bos_token", False))
        return cls(vocabulary, model, add_bos, model.prefixes_once)

    @classmethod
    def _spm(cls, metadata: Mapping[str, Any], source: str, place: str) -> "Tokenizer":
        vocabulary = read_vocabulary(metadata, source, (1, 2))
        if metadata.get("general.architecture") == "phi3":
            vocabulary = replace(vocabulary, strips=_phi3_strips(vocabulary))
        scores = [float(score) for score in metadata.get("tokenizer.ggml.scores", ())]
        if len(scores) != len(vocabulary.tokens):
            raise FormatError(
                f"{place}tokenizer.ggml.scores has {len(scores)} entries "
                f"for {len(vocabulary.tokens)} tokens"
            )
        add_space_prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
        model = ScoreMerger(vocabulary, scores, add_space_prefix)
        return cls(vocabulary, model, bool(metadata.get("tokenizer.ggml.add_bos_token", True)))

    @property
    def vocab_size(self) -> int:
        """Number of tokens."""
        return len(self._vocabulary.tokens)

    @property
    def bos_id(self) -> int | None:
        """The token that begins a text, where the model has one."""
        return self._vocabulary.bos_id

    @property
    def eos_id(self) -> int | None:
        """The token that ends a text, where the model has one."""
        return self._vocabulary.eos_id

    @property
    def end_ids(self) -> frozenset[int]:
        """All tokens that end a generation."""
        return self._vocabulary.end_ids

    @property
    def control_texts(self) -> list[str]:
        """Texts of the control tokens, longest first."""
        marked = self._vocabulary.marked
        return [text for text, i in marked.items() if self._vocabulary.is_control(i)]

    def is_control(self, token_id: int) -> bool:
        """Whether a token is a control token."""
        return self._vocabulary.is_control(token_id)

    def token_text(self, token_id: int) -> str:
        """The token as the file spells it."""
        return self._vocabulary.tokens[token_id]

    def encode(
        self, text: str, add_bos: bool | None = None, parse_special: bool = True
    ) -> list[int]:
        """Token ids of a text; without `parse_special` no part of it becomes a control token."""
        parts = self.split_special(text, parse_special)
        return self.encode_parts(parts, self.add_bos if add_bos is None else add_bos)

    def encode_parts(self, parts: Iterable[str | int], add_bos: bool) -> list[int]:
        """Token ids of plain texts and of tokens already found, in order."""
        ids = [self.bos_id] if add_bos and self.bos_id is not None else []
        after_special = True
        for part in parts:
            if isinstance(part, int):
                ids.append(part)
            else:
                ids += self._model.encode(part, after_special)
            after_special = isinstance(part, int) and not self._prefixes_once
        return ids

    def split_special(self, text: str, parse_special: bool = True) -> list[str | int]:
        """Cut a text at its special tokens: longer ones first, then from left to right.

        User-defined tokens always count, control tokens only with `parse_special`.
        """
        parts: list[str | int] = [_SURROGATES.sub("\ufffd", text)] if text else []
        for special, token_id in self._present(text):
            if parse_special or not self.is_control(token_id):
                parts = [piece for part in parts for piece in _cut(part, special, token_id)]
        return _stripped(parts, self._vocabulary.strips) if self._vocabulary.strips else parts

    def _present(self, text: str) -> list[tuple[str, int]]:
        """Special tokens that occur in the text, longest first."""
        marked = self._vocabulary.marked
        found: set[str] = set()
        for start, ends in self._marked_starts.items():
            at = text.find(start)
            while at >= 0:
                found.update(special for special in ends if text.startswith(special, at))
                at = text.find(start, at + 1)
        return [(special, token_id) for special, token_id in marked.items() if special in found]

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of one token; they may be part of a character only."""
        if self._vocabulary.types[token_id] in _AS_WRITTEN:
            return self._vocabulary.tokens[token_id].encode("utf-8", "surrogateescape")
        return self._model.token_bytes(token_id)

    def decode(self, ids: Iterable[int], skip_special: bool = False) -> str:
        """Text of tokens, bytes that are no UTF-8 replaced; `skip_special` leaves control out."""
        kept = (i for i in ids if not (skip_special and self.is_control(i)))
        return b"".join(map(self.token_bytes, kept)).decode("utf-8", "replace")


def _stripped(parts: list[str | int], strips: Mapping[int, tuple[bool, bool]]) -> list[str | int]:
    """Texts without the white space that a token beside them takes with it."""
    found: list[str | int] = []
    for index, part in enumerate(parts):
        if isinstance(part, str):
            before = parts[index - 1] if index else ""
            behind = parts[index + 1] if index + 1 < len(parts) else ""
            if isinstance(before, int) and strips.get(before, (False, False))[1]:
                part = part.lstrip()
            if isinstance(behind, int) and strips.get(behind, (False, False))[0]:
                part = part.rstrip()
        if part != "":
            found.append(part)
    return found


def _phi3_strips(vocabulary: Vocabulary) -> dict[int, tuple[bool, bool]]:
    """What Phi-3's tokenizer.json says and no GGUF does: turns take the space behind them."""
    kept = ("<unk>", "<s>", "<|endoftext|>")
    found = [i for text, i in vocabulary.marked.items() if vocabulary.is_control(i)]
    return {i: (False, True) for i in found if vocabulary.tokens[i] not in kept}


def _starts(marked: Mapping[str, int]) -> dict[str, list[str]]:
    """Group special texts by their first two characters, to look for few things in long texts."""
    starts: dict[str, list[str]] = {}
    for special in marked:
        starts.setdefault(special[:2], []).append(special)
    return starts


def _cut(part: str | int, special: str, token_id: int) -> Iterable[str | int]:
    if isinstance(part, int):
        yield part
        return
    for number, piece in enumerate(part.split(special)):
        if number:
            yield token_id
        if piece:
            yield piece
