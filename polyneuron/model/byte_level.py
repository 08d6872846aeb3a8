"""Byte-level BPE: text is cut into words, words into bytes, bytes merged by rank."""

from collections.abc import Sequence

import tokenizers
from tokenizers import models, pre_tokenizers

from polyneuron.errors import FormatError
from polyneuron.model.pre_tokenizers import PreTokenizer
from polyneuron.model.vocabulary import TokenType, Vocabulary

_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
# GPT-2's spelling of bytes: printable ones are themselves, the others follow from U+0100 on.
BYTE_CHARS: dict[int, str] = {byte: chr(byte) for byte in _PRINTABLE} | {
    byte: chr(0x100 + i) for i, byte in enumerate(_OTHERS)
}
_CHAR_BYTES = {char: byte for byte, char in BYTE_CHARS.items()}


class ByteLevelBpe:
    """The merges of a `gpt2` vocabulary, applied by the `tokenizers` library."""

    def __init__(self, vocabulary: Vocabulary, merges: Sequence[str], kind: PreTokenizer) -> None:
        self._vocabulary = vocabulary
        self._size = len(vocabulary.tokens)
        model = _build_model(vocabulary, merges, kind)
        self._tokenizer = tokenizers.Tokenizer(model)
        splits = [
            pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated") for pattern in kind.patterns
        ]
        self._tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )

    def encode(self, text: str, after_special: bool) -> list[int]:
        """Token ids of plain text; it makes no difference here whether a special came before."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        if ids and max(ids) >= self._size:  # a byte this vocabulary has no token for
            ids = [token_id for token_id in ids if token_id < self._size]
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes a token that is ordinary text stands for."""
        return spelled_bytes(self._vocabulary.tokens[token_id])


def spelled_bytes(text: str) -> bytes:
    """The bytes that a token in the byte spelling stands for."""
    try:
        return bytes([_CHAR_BYTES[char] for char in text])
    except KeyError:  # not in the byte spelling: an added word, taken as it is
        return text.encode("utf-8", "surrogateescape")


def _build_model(vocabulary: Vocabulary, merges: Sequence[str], kind: PreTokenizer) -> models.BPE:
    hidden = (TokenType.CONTROL, TokenType.UNKNOWN)  # never made from plain text
    # All byte spellings are printable; what is not, text cannot reach, and the library may refuse.
    ids = {
        text: i
        for i, (text, token_type) in enumerate(
            zip(vocabulary.tokens, vocabulary.types, strict=True)
        )
        if token_type not in hidden and text.isprintable()
    }
    # Without a token for each byte the library would join the neighbours of an unknown one.
    missing = [char for char in BYTE_CHARS.values() if char not in ids]
    ids.update({char: len(vocabulary.tokens) + i for i, char in enumerate(missing)})
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    try:
        return models.BPE(vocab=ids, merges=pairs, ignore_merges=kind.ignore_merges)
    except Exception as error:  # the library raises no narrower class
        pairs = _usable_pairs(vocabulary, pairs, ids)
        if len(pairs) == len(merges):
            raise FormatError(f"{vocabulary.place}tokenizer.ggml.merges: {error}") from error
        return models.BPE(vocab=ids, merges=pairs, ignore_merges=kind.ignore_merges)


def _usable_pairs(
    vocabulary: Vocabulary, pairs: list[tuple[str, str]], ids: dict[str, int]
) -> list[tuple[str, str]]:
    """Leave out merges that would make a control token; refuse those of unknown tokens."""
    known = set(vocabulary.tokens)
    usable = []
    for number, pair in enumerate(pairs):
        if not {*pair, "".join(pair)} <= known:
            raise FormatError(
                f"{vocabulary.place}tokenizer.ggml.merges[{number}] '{' '.join(pair)}': "
                f"not two tokens of the vocabulary that make a third"
            )
        if {*pair, "".join(pair)} <= ids.keys():
            usable.append(pair)
    return usable
