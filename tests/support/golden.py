"""Greedy continuations of SmolLM2 by llama.cpp, and what a float32 forward pass says of them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from polyneuron.model.tokenizer import Tokenizer

DATA = Path(__file__).resolve().parents[1] / "data" / "golden"
REFERENCE = DATA / "smollm2_reference.npz"
PEER = DATA / "smollm2_peer.npz"
TOP = 5

F32 = NDArray[np.float32]
Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class GoldenCase:
    """One prompt, its greedy continuation and the five likeliest tokens of some of its steps."""

    prompt: str
    prompt_tokens: list[int]
    tokens: list[int]
    stop: str
    steps: Ids
    """Index in `tokens` of each record."""
    top_ids: Ids
    """(records, 5), likeliest first."""
    top_logprobs: F32

    @property
    def history(self) -> Ids:
        """Prompt and continuation: what the model is fed, teacher-forced."""
        return np.array(self.prompt_tokens + self.tokens, dtype=np.int64)

    @property
    def positions(self) -> Ids:
        """Of each record: the position whose logits give it."""
        return self.steps + len(self.prompt_tokens) - 1


def recorded_steps(tokenizer: Tokenizer, tokens: list[int], num_records: int) -> list[int]:
    """Which tokens have a record: all, or those that complete a character.

    The program that made the file keeps no record of a token after which bytes of an unfinished
    character are left.
    """
    if num_records == len(tokens):
        return list(range(len(tokens)))
    held, steps = b"", []
    for step, token_id in enumerate(tokens):
        held += tokenizer.token_bytes(token_id)
        try:
            held.decode()
        except UnicodeDecodeError:
            continue
        held = b""
        steps.append(step)
    return steps


def read_golden(tokenizer: Tokenizer) -> list[GoldenCase]:
    """All cases of smollm2_greedy.json."""
    cases = []
    for case in json.loads((DATA / "smollm2_greedy.json").read_text())["cases"]:
        records = np.array(case["top_logprobs"])
        steps = recorded_steps(tokenizer, case["tokens"], len(records))
        assert len(steps) == len(records)
        cases.append(
            GoldenCase(
                prompt=case["prompt"],
                prompt_tokens=case["prompt_tokens"],
                tokens=case["tokens"],
                stop=case["stop"],
                steps=np.array(steps),
                top_ids=records[..., 0].astype(np.int64),
                top_logprobs=records[..., 1].astype(np.float32),
            )
        )
    return cases


def log_probabilities(logits: NDArray[np.floating]) -> NDArray[np.float64]:
    """Natural logarithms of the probabilities of every row."""
    rows = logits.astype(np.float64)
    rows -= rows.max(axis=-1, keepdims=True)
    shifted: NDArray[np.float64] = rows - np.log(np.exp(rows).sum(axis=-1, keepdims=True))
    return shifted


def at_ids(logits: NDArray[np.floating], case: GoldenCase) -> F32:
    """Log-probabilities (records, 5) of the golden's tokens, from logits of every position."""
    rows = log_probabilities(logits[case.positions])
    return np.take_along_axis(rows, case.top_ids, axis=1).astype(np.float32)
