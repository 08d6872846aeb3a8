"""Gemma's vocabulary: SPM with ids and specials of its own, runs of spaces and lines as tokens."""

from typing import Any

import numpy as np

from polyneuron.model.tokenizer import Tokenizer

CONTROL, USER, NORMAL, BYTE, UNKNOWN = 3, 4, 1, 6, 2
ROWS = (
    ("<pad>", CONTROL), ("<eos>", CONTROL), ("<bos>", CONTROL), ("<unk>", UNKNOWN),
    ("<start_of_turn>", CONTROL), ("<end_of_turn>", CONTROL),
    ("\n", USER), ("\n\n", USER), ("  ", USER), ("   ", USER), ("<h1>", USER),
    *((f"<0x{byte:02X}>", BYTE) for byte in range(256)),
    *((piece, NORMAL) for piece in ("a", "b", "▁", "▁a", "ab", "▁ab")),
)  # fmt: skip


def gemma(**changes: Any) -> Tokenizer:
    """As Gemma's converter writes it: no space before a text, a beginning always."""
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [text for text, _ in ROWS],
        "tokenizer.ggml.token_type": np.array([kind for _, kind in ROWS], np.int32),
        "tokenizer.ggml.scores": np.array([-float(i) for i in range(len(ROWS))], np.float32),
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": False,
        "tokenizer.ggml.add_space_prefix": False,
    }
    return Tokenizer.from_metadata(metadata | changes)


def texts(tokenizer: Tokenizer, text: str, **how: Any) -> list[str]:
    return [tokenizer.token_text(i) for i in tokenizer.encode(text, **how)]


def test_specials_have_the_files_ids() -> None:
    tokenizer = gemma()
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.add_bos) == (2, 1, True)
    assert tokenizer.end_ids == {1, 5}  # a turn's end ends an answer


def test_nothing_is_put_before_a_text() -> None:
    assert texts(gemma(), "ab a") == ["<bos>", "ab", "▁a"]


def test_runs_of_spaces_and_lines_are_tokens() -> None:
    """The longest run first, also where control tokens are not looked for."""
    expected = ["a", "   ", "  ", "b", "\n\n", "\n", "<h1>"]
    assert texts(gemma(), "a     b\n\n\n<h1>", add_bos=False) == expected
    assert texts(gemma(), "a     b\n\n\n<h1>", add_bos=False, parse_special=False) == expected


def test_turns_are_tokens_in_prompts_and_text_in_messages() -> None:
    turn = "<start_of_turn>ab\na<end_of_turn>"
    marked = ["<start_of_turn>", "ab", "\n", "a", "<end_of_turn>"]
    assert texts(gemma(), turn, add_bos=False) == marked
    plain = gemma().encode(turn, add_bos=False, parse_special=False)
    assert not any(gemma().is_control(i) for i in plain)
    assert gemma().decode(plain) == turn


def test_other_characters_become_bytes() -> None:
    assert texts(gemma(), "é", add_bos=False) == ["<0xC3>", "<0xA9>"]
