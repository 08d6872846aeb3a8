"""A model file as the engine sees it: description, metadata, and what to read where."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polyneuron.errors import UnsupportedError
from polyneuron.io.file_kind import is_ncf
from polyneuron.io.gguf_file import GgufHeader, check_supported, read_header
from polyneuron.io.ncf_format import Layout, NcfManifest, NcfSource
from polyneuron.io.ncf_reader import read_ncf
from polyneuron.io.section_reader import SectionRead
from polyneuron.io.weight_reader import WeightRead
from polyneuron.model.architecture import describe
from polyneuron.model.ncf_plan import plan_gguf
from polyneuron.model.ncf_spec import spec_of
from polyneuron.model.spec import ModelSpec
from polyneuron.planning.layout import ArenaLayout

Reads = list[WeightRead] | list[SectionRead]


@dataclass(frozen=True, slots=True, eq=False)
class ModelSource:
    """One model file; a GGUF is laid out as the neuron-cluster file it would become."""

    path: Path
    spec: ModelSpec
    metadata: Mapping[str, Any]
    manifest: NcfManifest
    header: GgufHeader | None
    """Of a GGUF: its tensors are packed while they are read, so it can only be resident."""

    @property
    def can_stream(self) -> bool:
        """Whether layers lie in the file as they lie in memory."""
        return self.header is None

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights as stored in memory."""
        return sum(tensor.num_bytes for tensor in self.manifest.tensors)

    def reads(self, layout: ArenaLayout) -> Reads:
        """What must be read before the first step, and to where."""
        if self.header is None:
            return [SectionRead(place.section, place.offset) for place in layout.resident]
        return [
            WeightRead(self.header.tensor(name), place.storage, place.offset, place.num_bytes)
            for name, place in layout.weights.items()
        ]


def open_source(path: Path) -> ModelSource:
    """Open a GGUF or a neuron-cluster file; nothing but its head is read."""
    if is_ncf(path):
        ncf = read_ncf(path)
        if ncf.manifest.layout is not Layout.TILES:
            raise UnsupportedError(
                f"{path}: its feed-forward weights are stored as bundles, which this version "
                f"cannot run; convert the model with --layout tiles"
            )
        return ModelSource(path, spec_of(ncf), ncf.metadata, ncf.manifest, None)
    header = read_header(path)
    check_supported(header)
    spec = describe(header)
    plan = plan_gguf(header, spec, Layout.TILES, NcfSource("gguf", header.file_bytes, ""))
    return ModelSource(path, spec, header.metadata, plan.manifest, header)
