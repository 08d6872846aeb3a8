"""`polyneuron inspect`: what a model file holds; of a GGUF also what each tensor will become."""

import dataclasses
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from polyneuron.cli import options
from polyneuron.cli.inspect_ncf import NcfInspection, inspect_ncf, ncf_tables
from polyneuron.cli.options import option
from polyneuron.cli.shown import (
    amount,
    hyper_text,
    kv_bytes,
    kv_text,
    plain,
    result_console,
    shown,
    tokenizer_facts,
)
from polyneuron.errors import ConfigError, FormatError
from polyneuron.io.file_kind import is_ncf
from polyneuron.io.ggml_types import why_unsupported
from polyneuron.io.gguf_file import POWERINFER, GgufHeader, GgufTensor, check_supported
from polyneuron.io.pack import is_lossless, packed_bytes, storage_type
from polyneuron.model.architecture import describe
from polyneuron.model.locate import locate_model
from polyneuron.model.model_header import read_model_header

PLAIN_WIDTH = 120
COUNTING = "Activations"


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
    format: str
    """`gguf`, `powerinfer`, or `safetensors`: a Hugging Face folder's."""
    gguf_version: int | None
    num_files: int
    architecture: str | None
    name: str | None
    problem: str | None
    """Why this version cannot run the file; None when it can."""
    hyper_parameters: dict[str, Any] | None
    kv_position_bytes: dict[str, int] | None
    """Of keys and values of one position in all layers, by the type that they may be stored as."""
    tokenizer: dict[str, Any]
    tensors: tuple[TensorRow, ...]
    num_parameters: int
    tensor_bytes: int
    stored_bytes: int | None


def inspect_file(path: Path) -> Inspection:
    """Read a GGUF header; a well-formed file that cannot be run is described all the same."""
    header = read_model_header(path)
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
        format=header.format,
        gguf_version=header.version or None,
        num_files=len({extent.path for extent in header.files.extents if extent.path}),
        architecture=_text(header, "general.architecture"),
        name=_text(header, "general.name"),
        problem=problem,
        hyper_parameters=plain(dataclasses.asdict(spec)) if spec else None,
        kv_position_bytes=kv_bytes(spec) if spec else None,
        tokenizer=tokenizer_facts(header.metadata),
        tensors=rows,
        num_parameters=sum(tensor.num_rows * tensor.num_cols for tensor in header.tensors),
        tensor_bytes=sum(tensor.num_bytes for tensor in header.tensors),
        stored_bytes=sum(stored) if len(stored) == len(rows) else None,
    )


def inspect(
    file: Annotated[
        str, typer.Argument(help="a .gguf or .ncf file, a folder, or the word smollm2")
    ],
    activations: Annotated[
        bool,
        option("--activations", panel=COUNTING, text="run a text: active neurons of each layer"),
    ] = False,
    text: Annotated[
        str | None, option("--text", panel=COUNTING, text="its file, -: stdin; else a short one")
    ] = None,
    num_tokens: Annotated[
        int | None, option("--tokens", "-n", panel=COUNTING, text="its first ones; else 256")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Show what a model file holds; of a GGUF also what each of its tensors will become."""
    path = locate_model(file)
    if activations:
        from polyneuron.cli.inspect_activations import show_activations

        show_activations(path, text, num_tokens, as_json)
    elif text is not None or num_tokens is not None:
        flag = "-n" if text is None else "--text"
        raise ConfigError(f"{flag} belongs to --activations: give that too, or leave it out")
    else:
        show_file(path, as_json)


def show_file(path: Path, as_json: bool) -> None:
    """Print what the file holds."""
    inspection = inspect_ncf(path) if is_ncf(path) else inspect_file(path)
    if as_json:
        sys.stdout.write(json.dumps(dataclasses.asdict(inspection)) + "\n")
        return
    console = result_console(PLAIN_WIDTH)
    if isinstance(inspection, NcfInspection):
        tables = ncf_tables(inspection)
    else:
        tables = [_summary(inspection), _tensor_table(inspection)]
    for table in tables:
        console.print(table)
    if inspection.problem is not None:
        console.print(f"cannot be run: {shown(inspection.problem)}", soft_wrap=True)


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


def _summary(inspection: Inspection) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    rows: list[tuple[str, object]] = [
        ("file", inspection.file),
        ("size", f"{amount(inspection.file_bytes)}, {_kind(inspection)}"),
        ("architecture", inspection.architecture or "-"),
        ("name", inspection.name or "-"),
        ("parameters", f"{inspection.num_parameters:,}"),
    ]
    for key, value in (inspection.hyper_parameters or {}).items():
        if key not in ("family", "name"):
            rows.append((key, hyper_text(key, value)))
    rows.append(("KV cache", kv_text(inspection.kv_position_bytes)))
    rows += [(f"tokenizer.{key}", value) for key, value in inspection.tokenizer.items()]
    for label, value in rows:
        table.add_row(Text(label), Text("-" if value is None else shown(value)))
    return table


def _kind(inspection: Inspection) -> str:
    version = inspection.gguf_version
    kind = f"GGUF version {version}" if version else "Hugging Face folder"
    kind = f"PowerInfer {kind}" if inspection.format == POWERINFER else kind
    return kind if inspection.num_files == 1 else f"{kind} in {inspection.num_files} files"


def _tensor_table(inspection: Inspection) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_footer=True)
    total = f"{len(inspection.tensors)} tensors"
    table.add_column("tensor", footer=Text(total), overflow="fold")
    table.add_column("type")
    table.add_column("stored as")
    table.add_column("shape", justify="right")
    file_total, stored_total = inspection.tensor_bytes, inspection.stored_bytes
    table.add_column("in file", justify="right", footer=Text(amount(file_total)))
    table.add_column("in memory", justify="right", footer=Text(amount(stored_total)))
    for row in inspection.tensors:
        lossy = "" if row.is_lossless in (True, None) else " (rounded)"
        table.add_row(
            Text(shown(row.name)),
            row.type,
            Text("not supported" if row.storage is None else row.storage + lossy),
            " x ".join(str(count) for count in row.shape),
            amount(row.file_bytes),
            amount(row.stored_bytes),
        )
    return table
