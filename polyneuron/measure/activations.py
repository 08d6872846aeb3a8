"""How many neurons a text activates, layer by layer.

Every token is computed alone, by a decode step in exact mode: what is counted is what a decode step
has to have at hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

from polyneuron.config import EngineConfig, FeedForwardMode
from polyneuron.errors import ConfigError
from polyneuron.io.ncf_format import Layout
from polyneuron.io_report import LayerActivity
from polyneuron.planning.source import ModelSource

if TYPE_CHECKING:
    from polyneuron.engine import Engine

DEFAULT_NUM_TOKENS = 256
SAMPLE_TEXT = """\
The river rises in the hills behind the old mill, runs past three villages and reaches the sea at
a small harbour where fishing boats are still repaired by hand. In spring the water is high and
brown; by the end of August a child can cross it with dry knees. Every few years somebody proposes
a bridge, and every time the council decides that the ferry is good enough.

"How long have you worked here?" asked the visitor, who had missed the last crossing.
"Since I was twelve," said the ferryman. "My mother had the boat before me. She used to say that
there are two kinds of people: those who wait, and those who walk eleven miles to the next town."

To measure how fast a stream flows, you need a stopwatch, a tape and an orange. First, mark two
points on the bank, ten metres apart. Second, throw the orange in above the first mark. Third,
count the seconds until it passes the second one. Divide the distance by the time: ten metres in
eight seconds is 1.25 metres per second. Repeat it five times and take the mean.

def mean(values):
    if not values:
        raise ValueError("no values")
    return sum(values) / len(values)

The same idea works for traffic, for queues and for rumours. What is counted has to be chosen
before counting begins, or the answer will be whatever one hoped for.
"""
"""Prose, speech, an instruction and a few lines of code: a little of what models are asked for."""


@dataclass(frozen=True, slots=True)
class Activations:
    """What a text activated."""

    num_tokens: int
    layers: tuple[LayerActivity, ...]

    @property
    def gated_share(self) -> float:
        """Mean over layers; as of one layer."""
        return fmean(layer.gated_share for layer in self.layers)

    @property
    def active_share(self) -> float:
        """Mean over layers; as of one layer."""
        return fmean(layer.active_share for layer in self.layers)


def check_countable(source: ModelSource) -> None:
    """Raise ConfigError when no neuron of a model is ever left out, or none can be."""
    if not source.is_sparse:
        raise ConfigError(
            f"{source.path}: {source.spec.feed_forward.name.lower()} activations are never "
            f"exactly zero: every neuron is active, there is nothing to count"
        )
    if source.can_stream and source.manifest.layout is not Layout.BUNDLES:
        raise ConfigError(
            f"{source.path} keeps its feed-forward weights as tiles, which are computed whole: "
            f"give the GGUF it was made of, or convert that with --layout bundles"
        )


def counting_config(num_tokens: int) -> EngineConfig:
    """The engine for a text of so many tokens: one token a step."""
    return EngineConfig(
        num_ctx=num_tokens,
        max_tokens=1,
        max_sequences=1,
        max_logit_rows=1,
        mode=FeedForwardMode.EXACT,
    )


def count_activations(engine: Engine, tokens: Sequence[int]) -> Activations:
    """Run the tokens through a fresh engine of `counting_config`."""
    engine.score(tokens, len(tokens) - 1)  # computes all of them and generates none
    return Activations(len(tokens), tuple(engine.activity()))
