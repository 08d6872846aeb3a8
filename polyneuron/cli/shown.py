"""Facts about model files as JSON and people can take them."""

import sys
from collections.abc import Mapping
from dataclasses import asdict
from enum import Enum
from typing import Any

import numpy as np
from rich.console import Console

from polyneuron.config import KvType
from polyneuron.errors import ConfigError
from polyneuron.model.block import LLAMA
from polyneuron.model.spec import ModelSpec
from polyneuron.planning.attention import check_kv_type, kv_position_bytes


def result_console(plain_width: int) -> Console:
    """Where tables go: standard output, `plain_width` columns wide where that is no terminal.

    Text is printed as it stands, whatever it holds.
    """
    width = None if sys.stdout.isatty() else plain_width
    return Console(file=sys.stdout, width=width, highlight=False, markup=False, emoji=False)


def plain(values: dict[str, Any]) -> dict[str, Any]:
    """Enums by name, and nested parts alike: what JSON can hold."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            found[key] = plain(value)
        else:
            found[key] = value.name.lower() if isinstance(value, Enum) else value
    return found


def tokenizer_facts(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """What there is to say about a vocabulary in a line or two."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    merges = metadata.get("tokenizer.ggml.merges")
    found = {
        key: metadata.get(f"tokenizer.ggml.{key}")
        for key in ("model", "pre", "bos_token_id", "eos_token_id", "add_bos_token")
    }
    return {
        **{
            key: None if isinstance(value, np.ndarray | list) else value
            for key, value in found.items()
        },
        "num_tokens": len(tokens) if isinstance(tokens, list) else None,
        "num_merges": len(merges) if isinstance(merges, list) else None,
        "has_chat_template": "tokenizer.chat_template" in metadata,
    }


def shown(value: object) -> str:
    """A value as text that no terminal or encoding stumbles over."""
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if text.isprintable() else ascii(text)[1:-1]


def amount(num_bytes: int | None) -> str:
    """Bytes for people; `-` where they are not known."""
    if num_bytes is None:
        return "-"
    if num_bytes < 1 << 20:
        return f"{num_bytes / 2**10:,.1f} KiB"
    return f"{num_bytes / 2**20:,.2f} MiB"


def rope_text(rope: dict[str, Any]) -> str:
    """A rotary embedding in one line; of frequency factors only how many."""
    set_parts = {key: value for key, value in rope.items() if value not in (None, ())}
    long = set_parts.pop("long", {})
    set_parts |= {key: value for key, value in long.items() if not key.endswith("factors")}
    factors = set_parts.pop("frequency_factors", ()) or long.get("long_factors", ())
    text = ", ".join(f"{key} {value}" for key, value in set_parts.items())
    return text + (f", {len(factors)} frequency factors" if factors else "")


def block_text(block: dict[str, Any]) -> str:
    """In what a model's layers depart from Llama's, in one line."""
    usual = plain(asdict(LLAMA))
    found = [f"{key} {shown(value)}" for key, value in block.items() if value != usual[key]]
    return ", ".join(found) or "as llama"


def hyper_text(key: str, value: Any) -> object:
    """A hyper-parameter for a table: nested ones in one line."""
    texts = {"rope": rope_text, "block": block_text}
    return texts[key](value) if key in texts else value


def kv_bytes(spec: ModelSpec) -> dict[str, int]:
    """Bytes of one position's keys and values, by the types that this model's heads allow."""
    found = {}
    for kv_type in KvType:
        try:
            check_kv_type(spec, kv_type)
        except ConfigError:
            continue
        found[str(kv_type)] = kv_position_bytes(spec, kv_type)
    return found


def kv_text(position_bytes: Mapping[str, int] | None) -> str:
    """The same in one line."""
    each = [f"{amount(num)} as {kv_type}" for kv_type, num in (position_bytes or {}).items()]
    return f"{', '.join(each)} a position" if each else "-"
