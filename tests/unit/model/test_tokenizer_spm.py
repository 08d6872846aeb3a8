"""SentencePiece vocabularies: merging by score, byte fallback, the space before a text."""

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyneuron.errors import FormatError
from polyneuron.model.tokenizer import Tokenizer
from tests.support.vocabularies import golden, spm_metadata

SPM = Tokenizer.from_metadata(spm_metadata())
PLAIN = Tokenizer.from_metadata(
    spm_metadata(
        **{"tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.add_bos_token": False}
    )
)


def test_texts_give_llama_cpp_tokens() -> None:
    for text, tokens, plain in golden("spm_texts")["cases"]:
        assert SPM.encode(text) == tokens, text
        assert SPM.encode(text, add_bos=False, parse_special=False) == plain, text


def test_bos_and_eos_have_the_family_ids() -> None:
    assert (SPM.bos_id, SPM.eos_id, SPM.add_bos) == (1, 2, True)
    assert SPM.end_ids >= {2}


def test_space_prefix_comes_after_special_tokens_too() -> None:
    assert SPM.decode(SPM.encode("a</s>a")) == "<s> a</s> a"
    assert PLAIN.decode(PLAIN.encode("a</s>a")) == "a</s>a"


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\u2581")))
def test_decode_gives_back_the_text(text: str) -> None:
    ids = PLAIN.encode(text, parse_special=False)
    assert PLAIN.decode(ids) == text
    assert not any(map(PLAIN.is_control, ids))


def test_unknown_characters_become_bytes() -> None:
    ids = PLAIN.encode("\U0001f600")
    assert [PLAIN.token_text(i) for i in ids] == ["<0xF0>", "<0x9F>", "<0x98>", "<0x80>"]


def test_typed_byte_spelling_stays_text() -> None:
    assert PLAIN.decode(PLAIN.encode("<0x0A>")) == "<0x0A>"


def test_turns_of_phi3_take_the_space_behind_them() -> None:
    """As its tokenizer.json says; the ends that text may go on behind do not."""
    phi3 = Tokenizer.from_metadata(
        spm_metadata(**{"general.architecture": "phi3", "tokenizer.ggml.add_bos_token": False})
    )
    assert phi3.encode("</s>\n  a</s> ") == phi3.encode("</s>a</s>")
    assert SPM.encode("</s>\n  a") != SPM.encode("</s>a")
    assert phi3.encode("<s> a") != phi3.encode("<s>a")


def _by_hand(pieces: Mapping[str, float], text: str) -> list[str]:
    rows = [("<unk>", 2, 0.0), *((piece, 1, score) for piece, score in pieces.items())]
    tokenizer = Tokenizer.from_metadata(
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": [row[0] for row in rows],
            "tokenizer.ggml.token_type": [row[1] for row in rows],
            "tokenizer.ggml.scores": [row[2] for row in rows],
            "tokenizer.ggml.add_space_prefix": False,
        }
    )
    return [tokenizer.token_text(i) for i in tokenizer.encode(text, add_bos=False)]


@pytest.mark.parametrize(
    ("pieces", "text", "expected"),
    [
        ({"a": 0, "b": 0, "ab": -2, "ba": -1}, "aba", ["a", "ba"]),  # the better score first
        ({"a": 0, "aa": -1}, "aaa", ["aa", "a"]),  # the leftmost among equals
        ({"a": 0, "aa": -1, "aaa": -2}, "aaaaa", ["aa", "aaa"]),  # aa a a a, aa aa a, aa aaa
        ({"a": 0, "b": 0, "abab": 0}, "abab", ["a", "b", "a", "b"]),  # no way to a piece
        ({"a": 0}, "aza", ["a", "<unk>", "a"]),  # neither a piece nor bytes
    ],
)
def test_merging_by_hand(pieces: Mapping[str, float], text: str, expected: list[str]) -> None:
    assert _by_hand(pieces, text) == expected


def test_pieces_across_words_are_found() -> None:
    pieces = {"a": 0, "\u2581": 0, "a\u2581": -1, "a\u2581a": -2}
    assert _by_hand(pieces, "a a") == ["a\u2581a"]


def test_missing_scores_are_refused() -> None:
    with pytest.raises(FormatError, match=r"^m.gguf: tokenizer.ggml.scores has 0 entries for \d+"):
        Tokenizer.from_metadata(spm_metadata(**{"tokenizer.ggml.scores": []}), "m.gguf")
