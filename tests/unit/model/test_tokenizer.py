"""Byte-level BPE vocabularies and what is common to all."""

import functools
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyneuron.errors import FormatError, UnsupportedError
from polyneuron.model.pre_tokenizers import PRE_TOKENIZERS
from polyneuron.model.tokenizer import Tokenizer
from tests.support.tiny_tokenizer import byte_symbols
from tests.support.vocabularies import (
    bpe_metadata,
    golden,
    smollm2_metadata,
    smollm2_tokenizer,
)

TINY = Tokenizer.from_metadata(bpe_metadata())
TEXT = st.text(st.characters(exclude_categories=["Cs"]))


@functools.cache
def _bytes_without_token() -> frozenset[int]:
    """SmolLM2's vocabulary lacks a few bytes; no tokenizer can keep those."""
    tokens = set(smollm2_metadata()["tokenizer.ggml.tokens"])
    return frozenset(byte for byte, char in enumerate(byte_symbols()) if char not in tokens)


class TestSmolLM2:
    @pytest.mark.parametrize(("text", "tokens"), golden("smollm2_prompts")["cases"])
    def test_prompts_give_the_reference_tokens(self, text: str, tokens: list[int]) -> None:
        assert smollm2_tokenizer().encode(text) == tokens
        assert smollm2_tokenizer().decode(tokens) == text

    def test_texts_give_llama_cpp_tokens(self) -> None:
        tokenizer = smollm2_tokenizer()
        for text, tokens, plain in golden("smollm2_texts")["cases"]:
            assert tokenizer.encode(text) == tokens, text
            expected = tokens if plain is None else plain
            assert tokenizer.encode(text, parse_special=False) == expected, text

    @given(TEXT)
    def test_decode_gives_back_the_text(self, text: str) -> None:
        tokenizer = smollm2_tokenizer()
        kept = "".join(c for c in text if not _bytes_without_token().intersection(c.encode()))
        assert tokenizer.decode(tokenizer.encode(kept)) == kept

    def test_ends_are_those_of_llama_cpp(self) -> None:
        tokenizer = smollm2_tokenizer()
        texts = {tokenizer.token_text(i) for i in tokenizer.end_ids}
        assert texts == {"<|endoftext|>", "<|im_end|>", "<reponame>"}
        assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.add_bos) == (1, 2, False)


class TestPreTokenizers:
    @pytest.mark.parametrize("row", golden("pre_tokenizers")["kinds"], ids=lambda row: row[0])
    def test_kind_gives_llama_cpp_tokens(self, row: tuple[str, bool, list[int]]) -> None:
        name, add_bos, tokens = row
        metadata = {**smollm2_metadata(), "tokenizer.ggml.pre": name}
        del metadata["tokenizer.ggml.add_bos_token"]  # then the kind decides
        tokenizer = Tokenizer.from_metadata(metadata)
        text = golden("pre_tokenizers")["text"]
        assert tokenizer.encode(text, add_bos=False, parse_special=False) == tokens
        assert tokenizer.add_bos == add_bos

    def test_every_kind_has_a_golden_row(self) -> None:
        rows = golden("pre_tokenizers")["kinds"]
        assert {PRE_TOKENIZERS[name] for name, _, _ in rows} == set(PRE_TOKENIZERS.values())

    @pytest.mark.parametrize("name", sorted(PRE_TOKENIZERS))
    def test_every_name_keeps_all_text(self, name: str) -> None:
        tokenizer = Tokenizer.from_metadata(bpe_metadata(**{"tokenizer.ggml.pre": name}))
        text = "He's 12 345\r\n\n  ok\t\u65e5\u672c e\u0301 \U0001f600 \u00a0x  "
        assert tokenizer.decode(tokenizer.encode(text, add_bos=False)) == text

    def test_long_runs_take_no_time(self) -> None:
        for name in ("llama-bpe", "qwen2", "smollm", "tekken"):
            tokenizer = Tokenizer.from_metadata(bpe_metadata(**{"tokenizer.ggml.pre": name}))
            started = time.thread_time()
            for unit in (" ", "\n", "a", "7", "!"):
                assert len(tokenizer.encode(unit * 50_000, add_bos=False)) == 50_000
            assert time.thread_time() - started < 5


class TestSpecialTokens:
    def test_control_text_counts_only_when_asked(self) -> None:
        assert TINY.encode("<|im_end|>") == [2]
        plain = TINY.encode("<|im_end|>", parse_special=False)
        assert len(plain) == 10
        assert TINY.decode(plain) == "<|im_end|>"

    def test_user_defined_text_counts_always(self) -> None:
        assert TINY.encode("<tool>", parse_special=False) == [4]

    @given(st.text("<|>im_endX[]star tolh", max_size=60))
    def test_plain_text_never_becomes_control(self, text: str) -> None:
        ids = TINY.encode(text, parse_special=False)
        assert not any(map(TINY.is_control, ids))
        assert TINY.decode(ids) == text

    def test_word_equal_to_a_control_token_stays_plain(self) -> None:
        # llama-bpe takes a word that is a token as a whole; "END" here is control, not text.
        base = bpe_metadata(**{"tokenizer.ggml.pre": "llama-bpe"})
        base["tokenizer.ggml.tokens"][3] = "END"
        tokenizer = Tokenizer.from_metadata(base)
        assert tokenizer.encode("END", add_bos=False) == [3]
        assert len(tokenizer.encode("END", add_bos=False, parse_special=False)) == 3

    def test_longer_special_text_wins(self) -> None:
        base = bpe_metadata()
        base["tokenizer.ggml.tokens"][3] = "x<|end|>"
        assert Tokenizer.from_metadata(base).encode("x<|end|><|end|>") == [3, 0]

    def test_end_texts_count_as_control(self) -> None:
        types = [4] * 5 + [1] * 258
        tokenizer = Tokenizer.from_metadata(bpe_metadata(**{"tokenizer.ggml.token_type": types}))
        assert tokenizer.end_ids == {0, 2}
        assert tokenizer.is_control(0)
        assert not tokenizer.is_control(1)

    def test_end_keys_count(self) -> None:
        changes = {"tokenizer.ggml.eot_token_id": 3, "tokenizer.ggml.eos_token_id": 7}
        assert Tokenizer.from_metadata(bpe_metadata(**changes)).end_ids == {0, 2, 3, 7}

    def test_end_of_message_is_no_end_beside_call_and_return(self) -> None:
        base = bpe_metadata()
        base["tokenizer.ggml.tokens"][2:4] = ["<|return|>", "<|call|>"]
        assert Tokenizer.from_metadata(base).end_ids == {2, 3}

    def test_skip_special_leaves_control_out(self) -> None:
        ids = TINY.encode("a<|im_end|><tool>")
        assert TINY.decode(ids, skip_special=True) == "a<tool>"


class TestText:
    def test_merges_apply(self) -> None:
        assert [TINY.token_text(i) for i in TINY.encode("help")] == ["hel", "p"]

    def test_bos_is_added_as_the_file_says_or_as_asked(self) -> None:
        tokenizer = Tokenizer.from_metadata(bpe_metadata(**{"tokenizer.ggml.add_bos_token": True}))
        assert tokenizer.encode("hel") == [1, TINY.encode("hel")[0]]
        assert tokenizer.encode("", add_bos=True) == [1]
        assert tokenizer.encode("", add_bos=False) == []

    def test_bytes_outside_utf8_become_replacement_characters(self) -> None:
        text = b"a\xffb".decode("utf-8", "surrogateescape")
        assert TINY.decode(TINY.encode(text)) == "a\ufffdb"

    def test_byte_without_a_token_is_left_out(self) -> None:
        base = bpe_metadata()
        base["tokenizer.ggml.tokens"][5 + ord("x")] = "unused"
        tokenizer = Tokenizer.from_metadata(base)
        assert [tokenizer.token_text(i) for i in tokenizer.encode("hxe")] == ["h", "e"]

    def test_token_bytes_of_every_byte(self) -> None:
        assert b"".join(map(TINY.token_bytes, range(5, 261))) == bytes(range(256))


def test_files_of_one_vocabulary_need_not_name_their_kind() -> None:
    """PowerInfer's do not; OPT's text begins with a token of its own."""
    changes = {"tokenizer.ggml.pre": None, "tokenizer.ggml.add_bos_token": None}
    metadata = bpe_metadata() | changes
    kept = {key: value for key, value in metadata.items() if value is not None}
    for architecture, kind, begins in (("opt", "gpt-2", True), ("falcon", "falcon", False)):
        tokenizer = Tokenizer.from_metadata(kept | {"general.architecture": architecture})
        named = {"tokenizer.ggml.pre": kind, "tokenizer.ggml.add_bos_token": begins}
        assert tokenizer.add_bos is begins
        assert tokenizer.encode("a 12 b") == Tokenizer.from_metadata(kept | named).encode("a 12 b")


class TestRefusals:
    @pytest.mark.parametrize(
        ("changes", "error", "message"),
        [
            ({"model": "bert"}, UnsupportedError, "model is 'bert'; supported: gpt2"),
            ({"model": None}, UnsupportedError, "model is None"),
            ({"pre": "new-kind"}, UnsupportedError, "pre: unknown 'new-kind'; known: .*llama-bpe"),
            ({"pre": None}, UnsupportedError, "pre is missing: the file predates"),
            ({"tokens": None}, FormatError, "tokens is missing"),
            ({"tokens": []}, FormatError, "tokens is missing or empty"),
            ({"merges": None}, FormatError, "merges is missing"),
            ({"merges": ["h e", "q zz"]}, FormatError, r"merges\[1\] 'q zz': not two tokens"),
            ({"merges": ["hel"]}, FormatError, r"merges\[0\]"),
            ({"token_type": [1, 1]}, FormatError, "token_type has 2 entries for 263 tokens"),
            ({"bos_token_id": 263}, FormatError, "bos_token_id is 263, outside the 263"),
        ],
    )
    def test_refusal_names_file_and_key(
        self, changes: dict[str, Any], error: type[Exception], message: str
    ) -> None:
        base = bpe_metadata(**{f"tokenizer.ggml.{key}": value for key, value in changes.items()})
        with pytest.raises(error, match=f"^model.gguf: tokenizer.ggml.{message}"):
            Tokenizer.from_metadata(base, "model.gguf")

    def test_merge_into_a_control_token_is_left_out(self) -> None:
        base = bpe_metadata()
        base["tokenizer.ggml.token_type"][-1] = 3  # "hel"
        tokenizer = Tokenizer.from_metadata(base)
        plain = tokenizer.encode("hel", parse_special=False)
        assert [tokenizer.token_text(i) for i in plain] == ["he", "l"]


def test_large_vocabulary_loads_in_time() -> None:
    """262 k tokens and 457 k merges, as many as large models have."""
    symbols = byte_symbols()
    pairs = [a + b for a in symbols for b in symbols]
    triples = [pair + symbol for pair in pairs[:49_000] for symbol in symbols[:4]]
    merges = [f"{pair[0]} {pair[1]}" for pair in pairs]
    merges += [f"{text[:2]} {text[2]}" for text in triples]
    merges += [f"{text[0]} {text[1:]}" for text in triples]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": [*symbols, *pairs, *triples],
        "tokenizer.ggml.merges": merges,
    }
    started = time.thread_time()
    tokenizer = Tokenizer.from_metadata(metadata)
    assert time.thread_time() - started < 3
    assert tokenizer.vocab_size == 261_792
