"""From a GGUF, or a Hugging Face folder, to a neuron-cluster file."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

from polyneuron.errors import ConfigError, FormatError
from polyneuron.io.content_key import content_key
from polyneuron.io.file_device import open_device
from polyneuron.io.file_kind import is_ncf
from polyneuron.io.gguf_file import POWERINFER, GgufHeader, check_supported
from polyneuron.io.gguf_tensors import GgufTensor
from polyneuron.io.model_files import views_of
from polyneuron.io.ncf_format import Layout, NcfSource, NcfTensor
from polyneuron.io.ncf_pieces import (
    READ_BYTES,
    RECIPE,
    MadePiece,
    PieceMaker,
    cut_pieces,
    source_ranges,
)
from polyneuron.io.ncf_reader import read_ncf
from polyneuron.io.ncf_writer import NcfPlan, NcfWriter, is_planned
from polyneuron.io.output_file import OutputFile, Progress, write_output
from polyneuron.io.pack import storage_type
from polyneuron.io.piece_writer import check_free_space, check_output
from polyneuron.io.read_ahead import read_ahead
from polyneuron.kernels.quant import StorageType
from polyneuron.model.architecture import describe
from polyneuron.model.model_header import read_model_header
from polyneuron.model.ncf_plan import NeuronOrder, check_down, choose_layout, plan_gguf
from polyneuron.model.powerinfer import is_turned


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
    has_predictors: bool = False
    """The source is PowerInfer's, with predictors that are not part of the output."""


def convert(
    source: Path,
    output: Path,
    *,
    layout: Layout | None = None,
    order: NeuronOrder | None = None,
    down: StorageType | None = None,
    weights: StorageType | None = None,
    force: bool = False,
    progress: Progress = lambda done, total: None,
    on_wait: Callable[[], None] = lambda: None,
) -> ConvertReport:
    """Write `output` from `source`, or go on where an earlier run was broken off.

    `weights` is the type of matrices that the source has in floats; None: as precise as they are.
    `down` is the type of down's columns in bundles; None: `ncf_plan.down_storage` chooses. An
    output that holds something else is only replaced with `force`. `progress` gets data bytes done
    and in all; `on_wait` is called when another process is writing the same output.
    """
    header = open_source(source)
    spec = describe(header)
    chosen = choose_layout(spec, layout)
    if chosen is Layout.TILES and is_turned(header):
        raise ConfigError(
            f"--layout tiles: {source} keeps down matrices by neuron; use --layout bundles"
        )
    if down is not None:
        check_down(chosen, spec.d_model, down)
    if weights is not None and not any(_is_float_matrix(t) for t in header.tensors):
        raise ConfigError(
            f"--weights {weights.name.lower()}: {source} is quantised already and stays as it is; "
            "leave the flag out, or give a source in floats"
        )
    seen = header.files.stamp()
    origin = NcfSource(header.format, header.file_bytes, content_key(header))
    plan = plan_gguf(header, spec, chosen, origin, order, down, weights)

    def check_source() -> None:
        if header.files.stamp() != seen:
            raise FormatError(f"{source}: changed while it was converted; run it again")

    check_output(output)
    file = OutputFile(
        output,
        plan.file_bytes,
        open_writer=lambda: NcfWriter(output, plan, f"{RECIPE} {READ_BYTES}", on_wait),
        pieces=lambda first: _pieces(header, plan, first, output.parent),
        holds=lambda: is_planned(output, plan),
        check_end=check_source,
    )
    if not file.is_there(force):
        check_free_space({output: plan.file_bytes})
    written = write_output(file, force, progress)
    lossy = tuple(tensor for tensor in read_ncf(output).tensors if not tensor.is_lossless)
    return ConvertReport(
        output, chosen, plan.file_bytes, written.resumed_bytes, written.was_there, lossy,
        has_predictors=header.format == POWERINFER,
    )  # fmt: skip


def _is_float_matrix(tensor: GgufTensor) -> bool:
    return len(tensor.shape) > 1 and not storage_type(tensor).is_quantised


def open_source(source: Path) -> GgufHeader:
    """The header of what can be converted: a GGUF, all parts of one, or a folder."""
    if is_ncf(source):
        raise ConfigError(f"{source}: a neuron-cluster file already; give what it was made of")
    header = read_model_header(source)
    check_supported(header)
    return header


def _pieces(header: GgufHeader, plan: NcfPlan, first: int, spill: Path) -> Iterator[MadePiece]:
    """The pieces of a conversion, from that number on."""
    manifest, tensors = plan.manifest, header.by_name
    pieces = list(itertools.islice(cut_pieces(manifest, tensors), first, None))
    ranges = list(source_ranges(pieces, manifest, tensors))
    with ExitStack() as stack:
        if header.files.is_plain:
            ahead = read_ahead(stack.enter_context(open_device(header.path)), ranges)
        else:
            ahead = views_of(header.files, ranges)
        views = stack.enter_context(closing(ahead))
        maker = PieceMaker(header, manifest, views, spill)
        try:
            for piece in pieces:
                yield maker.make(piece)
        finally:
            maker.close()
