"""Text is cut as the `tokenizers` library does by the whole of a tokenizer.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Peer

from polyneuron.errors import FormatError, UnsupportedError
from polyneuron.model.hf_tokenizer import tokenizer_metadata
from polyneuron.model.tokenizer import Tokenizer
from tests.support.tiny_tokenizer import bpe_vocabulary

TEXTS = (
    "", " ", "hello world", "  hello   world  ", "the\nworld\n\n and 123",
    "Größe \u4e2d\u6587 \U0001f600",
    "<s>the world</s>", "a<|end|> b <|end|>c", "<|end|>  the", "the<tool>world", "the <tool> x",
    "<s> <s>in", "<0x0A> and <unk>", "\u2581the",
)  # fmt: skip
PIECES = (
    "\u2581t",
    "he",
    "\u2581the",
    "in",
    "\u2581w",
    "or",
    "\u2581wor",
    "ld",
    "\u2581world",
    "\u2581\u2581",
)
PAIRS = (
    ("\u2581", "t"), ("h", "e"), ("\u2581t", "he"), ("i", "n"), ("\u2581", "w"), ("o", "r"),
    ("\u2581w", "or"), ("l", "d"), ("\u2581wor", "ld"), ("\u2581", "\u2581"),
)  # fmt: skip


def spm_like(step: str) -> Peer:
    """A Llama vocabulary: bytes to fall back on, and a space put before text by `step`."""
    head = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens = [*head, "\u2581", *"abcdefghijklmnopqrstuvwxyz", *PIECES]
    vocab = {text: index for index, text in enumerate(tokens)}
    model = models.BPE(
        vocab=vocab, merges=list(PAIRS), unk_token="<unk>", byte_fallback=True, fuse_unk=True
    )
    peer = Peer(model)
    if step == "normalizer":
        peer.normalizer = normalizers.Sequence(
            [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
        )
    else:
        peer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=step, split=False)
    peer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    peer.add_special_tokens([AddedToken(text, normalized=False) for text in head[:3]])
    peer.add_special_tokens([AddedToken("<|end|>", normalized=False, rstrip=True)])
    peer.add_tokens([AddedToken("<tool>", normalized=False, lstrip=True)])
    peer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return peer


def byte_level(ignore_merges: bool = False) -> Peer:
    """A vocabulary over bytes that cuts as Llama 3 does; `<|end|>` is an ordinary entry as well."""
    tiny = bpe_vocabulary()
    vocab = {text: index for index, text in enumerate(tiny.tokens)}
    pairs = [tuple(merge.split(" ")) for merge in tiny.merges]
    peer = Peer(models.BPE(vocab=vocab, merges=pairs, ignore_merges=ignore_merges))
    peer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}{1,3}| ?\p{L}+|\s+|[^\s\p{L}\p{N}]+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    peer.decoder = decoders.ByteLevel()
    peer.add_special_tokens([AddedToken(text) for text in tiny.tokens[:3]])
    peer.add_special_tokens([AddedToken(text) for text in ("<s>", "</s>", "<|end|>")])
    return peer


PEERS = {
    "normalizer": lambda: spm_like("normalizer"),
    "always": lambda: spm_like("always"),
    "first": lambda: spm_like("first"),
    "never": lambda: spm_like("never"),
    "bytes": byte_level,
    "whole words": lambda: byte_level(ignore_merges=True),
}


def load(folder: Path, described: dict[str, Any], **settings: Any) -> Tokenizer:
    """A tokenizer of a folder with this tokenizer.json."""
    (folder / "tokenizer.json").write_text(json.dumps(described))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return Tokenizer.from_metadata(tokenizer_metadata(folder, {}, 400), "m")


@pytest.mark.parametrize("name", PEERS)
class TestAsThePeer:
    def test_ids_are_the_peers(self, tmp_path: Path, name: str) -> None:
        peer = PEERS[name]()
        found = load(tmp_path, json.loads(peer.to_str()), bos_token="<s>", eos_token="</s>")
        for text in TEXTS:
            expected = peer.encode(text, add_special_tokens=False).ids
            assert found.encode(text, add_bos=False) == expected, text
            assert found.encode(text) == peer.encode(text).ids

    def test_content_never_becomes_a_control_token(self, tmp_path: Path, name: str) -> None:
        found = load(tmp_path, json.loads(PEERS[name]().to_str()))
        for text in ("<s>", "x</s>", "<|end|>", "<|im_end|> y"):
            assert not any(map(found.is_control, found.encode(text, parse_special=False)))

    def test_bytes_come_back(self, tmp_path: Path, name: str) -> None:
        found = load(tmp_path, json.loads(PEERS[name]().to_str()), add_bos_token=False)
        for text in ("hello world", "Größe \u4e2d\u6587 \U0001f600\n"):
            assert found.decode(found.encode(text)).removeprefix(" ") == text


class TestSettings:
    def test_settings_outrank_the_description(self, tmp_path: Path) -> None:
        described = json.loads(spm_like("normalizer").to_str())
        assert load(tmp_path, described, bos_token="<s>").add_bos
        assert not load(tmp_path, described, bos_token="<s>", add_bos_token=False).add_bos
        plain = json.loads(byte_level().to_str())
        assert not load(tmp_path, plain, bos_token="<s>").add_bos
        assert load(tmp_path, plain, bos_token="<s>", add_bos_token=True).add_bos

    def test_every_end_ends(self, tmp_path: Path) -> None:
        (tmp_path / "tokenizer.json").write_text(byte_level().to_str())
        (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 301, 9999]}')
        found = Tokenizer.from_metadata(tokenizer_metadata(tmp_path, {"eos_token_id": 300}, 400))
        assert {2, 300, 301} <= found.end_ids
        assert found.eos_id == 2

    def test_template_of_several_is_the_default(self, tmp_path: Path) -> None:
        (tmp_path / "tokenizer.json").write_text(byte_level().to_str())
        templates = [{"name": "tool_use", "template": "a"}, {"name": "default", "template": "b"}]
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
        assert tokenizer_metadata(tmp_path, {}, 400)["tokenizer.chat_template"] == "b"


class TestRefusals:
    @pytest.mark.parametrize(
        ("files", "expected"),
        [
            ({}, "tokenizer.json is missing; fetch it"),
            ({"tokenizer.model": ""}, "has tokenizer.model and no tokenizer.json; make it with"),
            ({"vocab.json": ""}, "has vocab.json and no tokenizer.json"),
            ({"tokenizer.json": "{"}, "no JSON object, or cut off"),
            ({"tokenizer.json": "{}"}, "its model is 'None'; supported: BPE"),
            ({"tokenizer.json": '{"model": {"type": "BPE"}}'}, "has no vocabulary"),
            ({"tokenizer.json": '{"model": {"type": "Unigram", "vocab": []}}'}, "is 'Unigram'"),
            ({"tokenizer.json": '{"model": {"vocab": {"a": "b"}}}'}, "has no text or no id"),
            ({"tokenizer.json": '{"model": {"vocab": {"a": -1}}}'}, "token ids outside 0"),
            ({"tokenizer.json": '{"model": {"vocab": {"a": 9}}}'}, "has 10 tokens for the 3 rows"),
            ({"tokenizer.json": '{"model": {"vocab": {"a": 1}}}'}, "cannot be used"),
        ],
    )
    def test_refusal_names_the_file(
        self, tmp_path: Path, files: dict[str, str], expected: str
    ) -> None:
        for name, text in files.items():
            (tmp_path / name).write_text(text)
        with pytest.raises(FormatError) as caught:
            tokenizer_metadata(tmp_path, {}, 3)
        message = str(caught.value)
        assert expected in message and str(tmp_path) in message and "\n" not in message

    def test_description_in_a_model_file_is_checked(self) -> None:
        for text in ("{", "[]", 3, "{}"):
            with pytest.raises(FormatError, match=r"m: tokenizer\.huggingface\.json: no descr"):
                Tokenizer.from_metadata({"tokenizer.huggingface.json": text}, "m")

    def test_unigram_is_unsupported(self, tmp_path: Path) -> None:
        (tmp_path / "tokenizer.json").write_text('{"model": {"type": "WordPiece", "vocab": {}}}')
        with pytest.raises(UnsupportedError, match="'WordPiece'"):
            tokenizer_metadata(tmp_path, {}, 3)
