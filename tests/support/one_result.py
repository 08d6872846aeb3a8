"""What a model gives, as bytes: the same wherever its rows lie, whoever computes them, and when."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from polyneuron.config import FeedForwardMode
from polyneuron.kernels import isa
from tests.support.local_engine import LocalEngine, LocalResult

PROMPT = [3, 14, 15, 92, 65, 35, 89, 79, 32]
NUM_TOKENS = 6


def run(engine: LocalEngine) -> list[bytes]:
    """Logits of every generated token; a second request meets a warm cache."""
    first = engine.generate(PROMPT, NUM_TOKENS)
    second = engine.generate(PROMPT[::-1], 3)
    return rows_of(first) + rows_of(second)


def logits_of(path: Path, **settings: object) -> list[bytes]:
    """`run` of a model opened with these settings."""
    with LocalEngine(path, **settings) as engine:
        return run(engine)


def predicted_logits_of(path: Path, **settings: object) -> list[bytes]:
    """`logits_of` in predicted mode unless told otherwise."""
    return logits_of(path, **{"mode": FeedForwardMode.PREDICTED} | settings)


def logits_on(isa_name: str, path: Path, **settings: object) -> list[bytes]:
    """`logits_of` on an instruction set; skips the test where this CPU has it not."""
    if isa_name not in isa.supported():
        pytest.skip(f"this CPU has no {isa_name}")
    try:
        return logits_of(path, isa_name=isa_name, **settings)
    finally:
        isa.select(None)


def assert_together_as_alone(engine: LocalEngine, prompts: Sequence[Sequence[int]]) -> None:
    """Sequences of one batch get what each gets alone."""
    together = engine.run_all([engine.request(prompt, NUM_TOKENS) for prompt in prompts])
    alone = [engine.generate(prompt, NUM_TOKENS) for prompt in prompts]
    assert [rows_of(result) for result in together] == [rows_of(result) for result in alone]


def rows_of(result: LocalResult) -> list[bytes]:
    """A result's logits, a token each."""
    return [row.tobytes() for row in result.logits]
