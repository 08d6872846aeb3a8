"""GGUFs that are not run: what each is, and what would work, as a table.

Families that are not supported and are language models like others need no row: the list of those
supported says what would work.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polyneuron.errors import UnsupportedError
from polyneuron.io.gguf_values import quoted, quoted_value


@dataclass(frozen=True, slots=True)
class NotRun:
    """A kind of model that `general.type` or `general.architecture` tells."""

    what: str
    cure: str
    """What to give instead; a model of another kind is one of a supported family."""
    types: frozenset[str] = frozenset()
    architectures: frozenset[str] = frozenset()


TEXT_MODEL = "give a model that generates text"

KINDS = (
    NotRun(
        "a LoRA adapter, not a model",
        "merge it into its base with llama-export-lora, and give the result",
        types=frozenset({"adapter"}),
    ),
    NotRun(
        "a multimodal projector, no language model",
        "give the model's own file",
        types=frozenset({"mmproj", "vision", "projector"}),
        architectures=frozenset({"clip"}),
    ),
    NotRun(
        "an importance matrix, not a model",
        "give the model it was measured on",
        types=frozenset({"imatrix"}),
    ),
    NotRun(
        "an embedding model, which gives vectors and no text",
        TEXT_MODEL,
        architectures=frozenset(
            {
                "bert", "nomic-bert", "nomic-bert-moe", "jina-bert-v2", "jina-bert-v3", "neo-bert",
                "modern-bert", "eurobert", "gemma-embedding", "t5encoder",
            }
        ),
    ),
    NotRun(
        "an encoder-decoder model",
        "give a decoder-only model",
        architectures=frozenset({"t5", "bart", "whisper"}),
    ),
    NotRun(
        "a recurrent or hybrid model: its layers keep a state instead of keys and values",
        "give a transformer with attention in every layer",
        architectures=frozenset(
            {
                "mamba", "mamba2", "rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7", "jamba", "falcon-h1",
                "granitehybrid", "nemotron_h", "nemotron_h_moe", "lfm2", "lfm2moe", "plamo2",
                "qwen3next", "kimi-linear", "qwen35", "qwen35moe",
            }
        ),
    ),
    NotRun(
        "a diffusion language model, which does not write from left to right",
        "give one that does",
        architectures=frozenset({"dream", "llada", "llada-moe", "rnd1"}),
    ),
    NotRun(
        "an image or video model",
        TEXT_MODEL,
        architectures=frozenset(
            {
                "flux", "sd1", "sdxl", "sd3", "aura", "ltxv", "hyvid", "wan", "hidream", "cosmos",
                "lumina2", "qwen_image",
            }
        ),
    ),
    NotRun(
        "a speech model", TEXT_MODEL, architectures=frozenset({"wavtokenizer-dec", "csm", "moshi"})
    ),
)  # fmt: skip


def refuse_kind(path: Path, metadata: Mapping[str, Any], supported: str) -> None:
    """UnsupportedError for a file that is no language model of the common kind."""
    kind, architecture = metadata.get("general.type"), metadata.get("general.architecture")
    if not architecture and "imatrix.datasets" in metadata:
        kind = "imatrix"
    for row in KINDS:
        if kind in row.types:
            raise UnsupportedError(f"{path}: {row.what}; {row.cure}")
        if architecture in row.architectures:
            families = "" if row.types else f", of a supported family: {supported}"
            raise UnsupportedError(
                f"{path}: {row.what} (architecture {quoted(str(architecture))}); {row.cure}"
                f"{families}"
            )


def refuse_pooling(path: Path, metadata: Mapping[str, Any], architecture: str) -> None:
    """UnsupportedError for a text model that was trained on to give vectors or ranks."""
    pooling = metadata.get(f"{architecture}.pooling_type", 0)
    if pooling != 0:
        raise UnsupportedError(
            f"{path}: an embedding or ranking model ({architecture}.pooling_type = "
            f"{quoted_value(pooling)}), which gives no text; {TEXT_MODEL}"
        )
