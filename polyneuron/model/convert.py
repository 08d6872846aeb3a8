"""From a GGUF to a neuron-cluster file."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from polyneuron.errors import ConfigError, FormatError, UnsupportedError
from polyneuron.io.content_key import content_key
from polyneuron.io.file_device import open_device
from polyneuron.io.file_kind import is_ncf
from polyneuron.io.gguf_file import GgufHeader, check_supported, read_header
from polyneuron.io.ncf_format import Layout, NcfSource, NcfTensor
from polyneuron.io.ncf_pieces import READ_BYTES, RECIPE, PieceMaker, cut_pieces, source_ranges
from polyneuron.io.ncf_reader import read_ncf
from polyneuron.io.ncf_writer import (
    NcfPlan,
    NcfWriter,
    check_free_space,
    encode_head,
    journal_path,
    partial_path,
    stripped,
)
from polyneuron.io.read_ahead import read_ahead
from polyneuron.io.write_journal import remove_stale
from polyneuron.model.architecture import describe
from polyneuron.model.ncf_plan import NeuronOrder, choose_layout, plan_gguf

SOURCES = "a GGUF in one file (F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K to Q6_K)"

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class ConvertReport:
    """What a conversion came to."""

    output: Path
    layout: Layout
    file_bytes: int
    resumed_bytes: int
    """Taken over from a run that was broken off; all of them when the file was there already."""
    was_there: bool
    """The output held this very conversion before."""
    lossy: tuple[NcfTensor, ...]
    """Tensors whose values changed."""


def convert(
    source: Path,
    output: Path,
    *,
    layout: Layout | None = None,
    order: NeuronOrder | None = None,
    force: bool = False,
    progress: Progress = lambda done, total: None,
    on_wait: Callable[[], None] = lambda: None,
) -> ConvertReport:
    """Write `output` from `source`, or go on where an earlier run was broken off.

    An output that holds something else is only replaced with `force`. `progress` gets data bytes
    done and in all; `on_wait` is called when another process is writing the same output.
    """
    header = open_source(source)
    spec = describe(header)
    chosen = choose_layout(spec, layout)
    seen = os.stat(source)
    origin = NcfSource("gguf", header.file_bytes, content_key(header))
    plan = plan_gguf(header, spec, chosen, origin, order)
    _check_output(output)
    if output.exists() and not force:
        return _existing(output, plan)
    check_free_space(output, plan.file_bytes)
    with NcfWriter(output, plan, f"{RECIPE} {READ_BYTES}", on_wait) as writer:
        if output.exists() and not force:  # made by another process while this one waited
            writer.give_up()
            return _existing(output, plan)
        writer.resume(progress)
        resumed = writer.num_bytes
        _write_pieces(header, plan, writer, progress)
        now = os.stat(source)
        if (now.st_size, now.st_mtime_ns) != (seen.st_size, seen.st_mtime_ns):
            writer.give_up()
            raise FormatError(f"{source}: changed while it was converted; run it again")
        writer.finish()
    return _report(output, plan, resumed, was_there=False)


def open_source(source: Path) -> GgufHeader:
    """The header of a file that can be converted; UnsupportedError names what can be."""
    if source.is_dir():
        raise UnsupportedError(f"{source}: a folder; convert reads {SOURCES}")
    if is_ncf(source):
        raise ConfigError(f"{source}: a neuron-cluster file already; give what it was made of")
    try:
        header = read_header(source)
        check_supported(header)
    except UnsupportedError as error:
        raise UnsupportedError(f"{error}; convert reads {SOURCES}") from None
    return header


def _check_output(output: Path) -> None:
    if output.is_dir():
        raise ConfigError(f"{output}: a folder; give the name of the file to write")
    if not output.parent.is_dir():
        raise ConfigError(f"{output.parent}: no such folder; make it first")


def _existing(output: Path, plan: NcfPlan) -> ConvertReport:
    """The report of an output that is this conversion already; ConfigError when it is not."""
    try:
        manifest = stripped(read_ncf(output).manifest)
        is_same = encode_head(manifest, plan.data_offset, plan.file_bytes) == encode_head(
            plan.manifest, plan.data_offset, plan.file_bytes
        )
    except (FormatError, ValueError):
        is_same = False
    if not is_same:
        raise ConfigError(
            f"{output}: exists and holds something else; give another name, or --force to "
            "replace it"
        )
    remove_stale(journal_path(output), partial_path(output))
    return _report(output, plan, plan.file_bytes - plan.data_offset, was_there=True)


def _write_pieces(header: GgufHeader, plan: NcfPlan, writer: NcfWriter, progress: Progress) -> None:
    total = plan.file_bytes - plan.data_offset
    manifest, tensors = plan.manifest, header.by_name
    pieces = list(itertools.islice(cut_pieces(manifest, tensors), writer.num_pieces, None))
    ranges = list(source_ranges(pieces, manifest, tensors))
    with open_device(header.path) as device, closing(read_ahead(device, ranges)) as views:
        maker = PieceMaker(header, manifest, views, writer.output.parent)
        try:
            for piece in pieces:
                made = maker.make(piece)
                writer.write_piece(made.data, made.errors)
                progress(writer.num_bytes, total)
        finally:
            maker.close()


def _report(output: Path, plan: NcfPlan, resumed: int, *, was_there: bool) -> ConvertReport:
    tensors = read_ncf(output).tensors
    lossy = tuple(tensor for tensor in tensors if not tensor.is_lossless)
    return ConvertReport(output, plan.manifest.layout, plan.file_bytes, resumed, was_there, lossy)
