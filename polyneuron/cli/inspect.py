"""`polyneuron inspect`: what a GGUF holds and what each of its tensors will become."""

import dataclasses
import json
import sys
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from polyneuron.cli import options
from polyneuron.errors import FormatError
from polyneuron.io.ggml_types import why_unsupported
from polyneuron.io.gguf_file import GgufHeader, GgufTensor, check_supported, read_header
from polyneuron.io.pack import is_lossless, packed_bytes, storage_type
from polyneuron.model.architecture import describe
from polyneuron.model.locate import locate_model

PLAIN_WIDTH = 120


@dataclass(frozen=True, slots=True)
class TensorRow:
    """One tensor as it is in the file and as it will be stored; None where it cannot be."""

    name: str
    type: str
    storage: str | None
    is_lossless: bool | None
    shape: tuple[int, ...]
    file_bytes: int
    stored_bytes: int | None


@dataclass(frozen=True, slots=True)
class Inspection:
    """All that `inspect` shows."""

    file: str
    file_bytes: int
    gguf_version: int
    architecture: str | None
    name: str | None
    problem: str | None
    """Why this version cannot run the file; None when it can."""
    hyper_parameters: dict[str, Any] | None
    tokenizer: dict[str, Any]
    tensors: tuple[TensorRow, ...]
    num_parameters: int
    tensor_bytes: int
    stored_bytes: int | None


def inspect_file(path: Path) -> Inspection:
    """Read a GGUF header; a well-formed file that cannot be run is described all the same."""
    header = read_header(path)
    spec, problem = None, None
    try:
        check_supported(header)
        spec = describe(header)
    except FormatError as error:
        problem = str(error)
    rows = tuple(_tensor_row(tensor) for tensor in header.tensors)
    stored = [row.stored_bytes for row in rows if row.stored_bytes is not None]
    return Inspection(
        file=str(path),
        file_bytes=header.file_bytes,
        gguf_version=header.version,
        architecture=_text(header, "general.architecture"),
        name=_text(header, "general.name"),
        problem=problem,
        hyper_parameters=_plain(dataclasses.asdict(spec)) if spec else None,
        tokenizer=_tokenizer(header),
        tensors=rows,
        num_parameters=sum(tensor.num_rows * tensor.num_cols for tensor in header.tensors),
        tensor_bytes=sum(tensor.num_bytes for tensor in header.tensors),
        stored_bytes=sum(stored) if len(stored) == len(rows) else None,
    )


def inspect(
    file: Annotated[str, typer.Argument(help="a .gguf file, or the word smollm2")],
    as_json: options.Json = False,
) -> None:
    """Show what a GGUF holds and what each of its tensors will become."""
    inspection = inspect_file(locate_model(file))
    if as_json:
        sys.stdout.write(json.dumps(dataclasses.asdict(inspection)) + "\n")
        return
    width = None if sys.stdout.isatty() else PLAIN_WIDTH
    console = Console(file=sys.stdout, width=width, highlight=False, markup=False, emoji=False)
    console.print(_summary(inspection))
    console.print(_tensor_table(inspection))
    if inspection.problem is not None:
        console.print(f"cannot be run: {_shown(inspection.problem)}", soft_wrap=True)


def _tensor_row(tensor: GgufTensor) -> TensorRow:
    readable = why_unsupported(tensor.type_id) is None
    storage = storage_type(tensor) if readable else None
    fits = storage is not None and not (storage.is_quantised and tensor.num_cols % 32)
    return TensorRow(
        name=tensor.name,
        type=tensor.type_name,
        storage=storage.name.lower() if storage is not None else None,
        is_lossless=is_lossless(tensor, storage) if storage is not None else None,
        shape=tensor.shape,
        file_bytes=tensor.num_bytes,
        stored_bytes=packed_bytes(tensor, storage) if storage is not None and fits else None,
    )


def _text(header: GgufHeader, key: str) -> str | None:
    value = header.metadata.get(key)
    return value if isinstance(value, str) else None


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """Enums by name, and nested parts alike: what JSON can hold."""
    plain: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            plain[key] = _plain(value)
        else:
            plain[key] = value.name.lower() if isinstance(value, Enum) else value
    return plain


def _tokenizer(header: GgufHeader) -> dict[str, Any]:
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    merges = header.metadata.get("tokenizer.ggml.merges")
    found = {
        key: header.metadata.get(f"tokenizer.ggml.{key}")
        for key in ("model", "pre", "bos_token_id", "eos_token_id", "add_bos_token")
    }
    return {
        **{
            key: None if isinstance(value, np.ndarray | list) else value
            for key, value in found.items()
        },
        "num_tokens": len(tokens) if isinstance(tokens, list) else None,
        "num_merges": len(merges) if isinstance(merges, list) else None,
        "has_chat_template": "tokenizer.chat_template" in header.metadata,
    }


def _shown(value: object) -> str:
    """A value as text that no terminal or encoding stumbles over."""
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if text.isprintable() else ascii(text)[1:-1]


def _amount(num_bytes: int | None) -> str:
    if num_bytes is None:
        return "-"
    if num_bytes < 1 << 20:
        return f"{num_bytes / 2**10:,.1f} KiB"
    return f"{num_bytes / 2**20:,.2f} MiB"


def _summary(inspection: Inspection) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    rows: list[tuple[str, object]] = [
        ("file", inspection.file),
        ("size", f"{_amount(inspection.file_bytes)}, GGUF version {inspection.gguf_version}"),
        ("architecture", inspection.architecture or "-"),
        ("name", inspection.name or "-"),
        ("parameters", f"{inspection.num_parameters:,}"),
    ]
    for key, value in (inspection.hyper_parameters or {}).items():
        if key not in ("family", "name"):
            rows.append((key, _rope(value) if key == "rope" else value))
    rows += [(f"tokenizer.{key}", value) for key, value in inspection.tokenizer.items()]
    for label, value in rows:
        table.add_row(Text(label), Text("-" if value is None else _shown(value)))
    return table


def _rope(rope: dict[str, Any]) -> str:
    set_parts = {key: value for key, value in rope.items() if value not in (None, ())}
    factors = set_parts.pop("frequency_factors", ())
    text = ", ".join(f"{key} {value}" for key, value in set_parts.items())
    return text + (f", {len(factors)} frequency factors" if factors else "")


def _tensor_table(inspection: Inspection) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_footer=True)
    total = f"{len(inspection.tensors)} tensors"
    table.add_column("tensor", footer=Text(total), overflow="fold")
    table.add_column("type")
    table.add_column("stored as")
    table.add_column("shape", justify="right")
    file_total, stored_total = inspection.tensor_bytes, inspection.stored_bytes
    table.add_column("in file", justify="right", footer=Text(_amount(file_total)))
    table.add_column("in memory", justify="right", footer=Text(_amount(stored_total)))
    for row in inspection.tensors:
        lossy = "" if row.is_lossless in (True, None) else " (rounded)"
        table.add_row(
            Text(_shown(row.name)),
            row.type,
            Text("not supported" if row.storage is None else row.storage + lossy),
            " x ".join(str(count) for count in row.shape),
            _amount(row.file_bytes),
            _amount(row.stored_bytes),
        )
    return table
