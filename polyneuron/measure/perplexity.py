"""Perplexity as llama-perplexity counts it.

The text is cut into chunks of one context; the second half of each is scored, so that every scored
token has at least half a context before it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from polyneuron.errors import ConfigError

MIN_CTX = 4  # so that the second half has a token to predict
MIN_CHUNKS = 2  # llama-perplexity asks for as many

Score = Callable[[Sequence[int], int], Sequence[float]]
"""Tokens and `first` to log-probabilities of tokens first+1, first+2, … given all before each."""


@dataclass(slots=True)
class Perplexity:
    """A running figure over scored tokens."""

    num_chunks: int = 0
    num_tokens: int = 0
    """Tokens scored."""
    nll_sum: float = 0.0
    nll_square_sum: float = 0.0

    def add(self, log_probs: Iterable[float]) -> None:
        """Take one chunk's log-probabilities."""
        for log_prob in log_probs:
            self.num_tokens += 1
            self.nll_sum -= log_prob
            self.nll_square_sum += log_prob * log_prob
        self.num_chunks += 1

    @property
    def ppl(self) -> float:
        """exp of the mean negative log-probability."""
        try:
            return math.exp(self.nll_sum / self.num_tokens)
        except OverflowError:
            return math.inf

    @property
    def stderr(self) -> float | None:
        """Standard error of `ppl`; None while it cannot be told."""
        if self.num_tokens < 2:
            return None
        mean = self.nll_sum / self.num_tokens
        variance = self.nll_square_sum / self.num_tokens - mean * mean
        return self.ppl * math.sqrt(max(0.0, variance) / (self.num_tokens - 1))


def chunks_of(tokens: Sequence[int], num_ctx: int, bos_id: int | None) -> list[list[int]]:
    """Whole chunks of one context each; `bos_id` takes the place of each one's first token."""
    if num_ctx < MIN_CTX:
        raise ConfigError(f"-c {num_ctx}: perplexity needs a context of at least {MIN_CTX}")
    needed = MIN_CHUNKS * num_ctx
    if len(tokens) < needed:
        raise ConfigError(
            f"the text has {len(tokens)} tokens, a context of {num_ctx} needs at least {needed}: "
            f"give a longer text with -f or a smaller context with -c"
        )
    ends = range(num_ctx, len(tokens) + 1, num_ctx)
    chunks = [list(tokens[end - num_ctx : end]) for end in ends]
    if bos_id is not None:
        for chunk in chunks:
            chunk[0] = bos_id
    return chunks


def measure(score: Score, chunks: Iterable[Sequence[int]]) -> Iterator[Perplexity]:
    """Score chunk after chunk; gives the running figure (one object) after each."""
    total = Perplexity()
    for chunk in chunks:
        first = len(chunk) // 2
        total.add(score(chunk, first))
        yield total
