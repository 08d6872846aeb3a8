"""How many neurons of each layer a text activates, for `polyneuron inspect --activations`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from polyneuron.cli.perplexity import read_text
from polyneuron.cli.progress import LoadProgress
from polyneuron.cli.shown import result_console
from polyneuron.errors import ConfigError
from polyneuron.measure.activations import (
    DEFAULT_NUM_TOKENS,
    SAMPLE_TEXT,
    Activations,
    check_countable,
    count_activations,
    counting_config,
)
from polyneuron.model.tokenizer import Tokenizer
from polyneuron.planning.source import ModelSource, open_source

PLAIN_WIDTH = 100


def show_activations(path: Path, text: str | None, num_tokens: int | None, as_json: bool) -> None:
    """Run a text, or the built-in one, and print what it activates."""
    source = open_source(path)
    check_countable(source)
    tokens = text_tokens(source, text, num_tokens)
    from polyneuron.engine import Engine

    with (
        LoadProgress("reading weights") as progress,
        LoadProgress("converting") as converting,
        Engine(
            str(path), counting_config(len(tokens)), on_load=progress, on_convert=converting
        ) as engine,
    ):
        for bar in (progress, converting):
            bar.stop()
        print(engine.mode().line(), file=sys.stderr, flush=True)
        found = count_activations(engine, tokens)
    if as_json:
        sys.stdout.write(json.dumps(as_object(path, found)) + "\n")
        return
    console = result_console(PLAIN_WIDTH)
    console.print(activation_table(found))
    for line in legend(found):
        console.print(line, soft_wrap=True)


def text_tokens(source: ModelSource, text: str | None, num_tokens: int | None) -> list[int]:
    """The first tokens of a file's text or of the built-in one, at most 256 unless told."""
    wanted = DEFAULT_NUM_TOKENS if num_tokens is None else num_tokens
    if wanted < 1:
        raise ConfigError(f"-n {wanted}: give 1 or more")
    most = source.spec.context_length
    if num_tokens is not None and wanted > most:
        raise ConfigError(f"-n {wanted}: the model was trained for {most} positions; give fewer")
    content = SAMPLE_TEXT if text is None else read_text(text, "--text")
    tokenizer = Tokenizer.from_metadata(source.metadata, source.path.name)
    tokens = tokenizer.encode(content, parse_special=False)[: min(wanted, most)]
    if not content.strip() or not tokens:
        raise ConfigError(f"--text {text}: the text is empty")
    return tokens


def activation_table(found: Activations) -> Table:
    """A row for each layer, the means below."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_footer=True)
    table.add_column("layer", justify="right", footer="mean")
    shares = (("gated", found.gated_share), ("active", found.active_share))
    for heading, mean in shares:
        table.add_column(heading, justify="right", footer=percent(mean))
    for index, layer in enumerate(found.layers):
        table.add_row(str(index), percent(layer.gated_share), percent(layer.active_share))
    return table


def legend(found: Activations) -> list[str]:
    """What the shares are of."""
    return [
        f"of each layer's neurons, mean over {found.num_tokens} tokens",
        "gated: the value that decides is above zero, so the neuron's other rows are needed",
        "active: the product that meets its down row is not zero",
    ]


def percent(share: float) -> str:
    """A share for people."""
    return f"{100 * share:.1f} %"


def as_object(path: Path, found: Activations) -> dict[str, Any]:
    """The same as data; shares from 0 to 1."""
    return {
        "file": str(path),
        "tokens": found.num_tokens,
        "gated_share": found.gated_share,
        "active_share": found.active_share,
        "layers": [
            {
                "layer": index,
                "gated_share": layer.gated_share,
                "active_share": layer.active_share,
            }
            for index, layer in enumerate(found.layers)
        ],
    }
