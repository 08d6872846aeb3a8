"""What a neuron-cluster file holds, for `polyneuron inspect`."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from polyneuron.cli.shown import (
    amount,
    hyper_text,
    kv_bytes,
    kv_text,
    plain,
    shown,
    tokenizer_facts,
)
from polyneuron.errors import FormatError
from polyneuron.io.ncf_format import NcfSection
from polyneuron.io.ncf_reader import NcfFile, read_ncf
from polyneuron.model.ncf_spec import spec_of


@dataclass(frozen=True, slots=True)
class SectionRow:
    """One section; `bundle` is None where it holds no bundles."""

    name: str
    kind: str
    offset: int
    num_bytes: int
    num_extents: int
    bundle: dict[str, Any] | None
    is_ordered: bool
    """Whether its neurons lie in an order of their own, hottest first."""


@dataclass(frozen=True, slots=True)
class StoredRow:
    """One tensor as it is stored."""

    name: str
    source_type: str
    storage: str
    shape: tuple[int, int]
    """As stored: down in bundles has a row for each neuron."""
    section: str
    num_bytes: int
    is_lossless: bool
    max_abs_error: float
    rms_error: float


@dataclass(frozen=True, slots=True)
class NcfInspection:
    """All that `inspect` shows."""

    file: str
    file_bytes: int
    ncf_version: int
    layout: str
    architecture: str | None
    name: str | None
    problem: str | None
    """Why this version cannot run the file; None when it can."""
    hyper_parameters: dict[str, Any] | None
    kv_position_bytes: dict[str, int] | None
    """Of keys and values of one position in all layers, by the type that they may be stored as."""
    tokenizer: dict[str, Any]
    source: dict[str, Any]
    sections: tuple[SectionRow, ...]
    tensors: tuple[StoredRow, ...]
    num_parameters: int


def inspect_ncf(path: Path) -> NcfInspection:
    """Read header and manifest; no weights are read."""
    ncf = read_ncf(path)
    spec, problem = None, None
    try:
        spec = spec_of(ncf)
    except FormatError as error:
        problem = str(error)
    return NcfInspection(
        file=str(path),
        file_bytes=ncf.file_bytes,
        ncf_version=ncf.version,
        layout=str(ncf.manifest.layout),
        architecture=spec.family if spec else None,
        name=spec.name if spec else None,
        problem=problem,
        hyper_parameters=plain(dataclasses.asdict(spec)) if spec else None,
        kv_position_bytes=kv_bytes(spec) if spec else None,
        tokenizer=tokenizer_facts(ncf.metadata),
        source=dataclasses.asdict(ncf.manifest.source),
        sections=tuple(_section_row(section) for section in ncf.sections),
        tensors=_stored_rows(ncf),
        num_parameters=sum(tensor.rows * tensor.cols for tensor in ncf.tensors),
    )


def _section_row(section: NcfSection) -> SectionRow:
    return SectionRow(
        name=section.name,
        kind=str(section.kind),
        offset=section.offset,
        num_bytes=section.num_bytes,
        num_extents=section.num_extents,
        bundle=dataclasses.asdict(section.bundles) if section.bundles else None,
        is_ordered=section.neuron_ids is not None,
    )


def _stored_rows(ncf: NcfFile) -> tuple[StoredRow, ...]:
    return tuple(
        StoredRow(
            name=tensor.name,
            source_type=tensor.source_type,
            storage="f32" if tensor.storage is None else tensor.storage.name.lower(),
            shape=(tensor.rows, tensor.cols),
            section=ncf.sections[tensor.section_index].name,
            num_bytes=tensor.num_bytes,
            is_lossless=tensor.is_lossless,
            max_abs_error=tensor.max_abs_error,
            rms_error=tensor.rms_error,
        )
        for tensor in ncf.tensors
    )


def ncf_tables(inspection: NcfInspection) -> list[Table]:
    """Summary, sections, tensors."""
    return [_summary(inspection), _sections(inspection), _tensors(inspection)]


def _summary(inspection: NcfInspection) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    size = f"{amount(inspection.file_bytes)}, neuron-cluster file version {inspection.ncf_version}"
    rows: list[tuple[str, object]] = [
        ("file", inspection.file),
        ("size", size),
        ("layout", inspection.layout),
        ("architecture", inspection.architecture or "-"),
        ("name", inspection.name or "-"),
        ("parameters", f"{inspection.num_parameters:,}"),
        ("source", f"{inspection.source['format']}, {amount(inspection.source['num_bytes'])}"),
        ("source key", inspection.source["key"]),
    ]
    for key, value in (inspection.hyper_parameters or {}).items():
        if key not in ("family", "name"):
            rows.append((key, hyper_text(key, value)))
    rows.append(("KV cache", kv_text(inspection.kv_position_bytes)))
    rows += [(f"tokenizer.{key}", value) for key, value in inspection.tokenizer.items()]
    for label, value in rows:
        table.add_row(Text(label), Text("-" if value is None else shown(value)))
    return table


def _sections(inspection: NcfInspection) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("section", "kind", "neurons", "bundle", "first phase", "order"):
        table.add_column(heading)
    for heading in ("offset", "size"):
        table.add_column(heading, justify="right")
    for row in inspection.sections:
        bundle = row.bundle or {}
        table.add_row(
            Text(shown(row.name)),
            row.kind,
            f"{bundle['num_neurons']:,}" if bundle else "-",
            f"{bundle['bundle_bytes']:,} B" if bundle else "-",
            f"{bundle['phase0_bytes']:,} B" if bundle else "-",
            ("own" if row.is_ordered else "model's") if bundle else "-",
            f"{row.offset:,}",
            amount(row.num_bytes),
        )
    return table


def _tensors(inspection: NcfInspection) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_footer=True)
    table.add_column("tensor", footer=Text(f"{len(inspection.tensors)} tensors"), overflow="fold")
    for heading in ("source", "stored as", "section"):
        table.add_column(heading)
    table.add_column("shape", justify="right")
    total = amount(sum(row.num_bytes for row in inspection.tensors))
    table.add_column("size", justify="right", footer=Text(total))
    table.add_column("rms error", justify="right")
    for row in inspection.tensors:
        table.add_row(
            Text(shown(row.name)),
            shown(row.source_type),
            row.storage,
            Text(shown(row.section)),
            f"{row.shape[0]} x {row.shape[1]}",
            amount(row.num_bytes),
            "none" if row.is_lossless else f"{100 * row.rms_error:.2g} %",
        )
    return table
