"""Writes a neuron-cluster file piece by piece; its head, with all checksums, comes last."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from polyneuron.errors import FormatError
from polyneuron.io.file_kind import NCF_MAGIC
from polyneuron.io.ncf_format import (
    HEADER,
    HEADER_BYTES,
    PAGE_BYTES,
    VERSION,
    NcfManifest,
    NcfSection,
    round_up,
)
from polyneuron.io.ncf_manifest import encode_manifest
from polyneuron.io.ncf_reader import read_ncf
from polyneuron.io.piece_writer import PieceWriter
from polyneuron.kernels.checksum import crc32c


@dataclass(frozen=True, slots=True)
class NcfPlan:
    """A manifest with checksums and errors still zero, and where the data begin."""

    manifest: NcfManifest
    data_offset: int
    file_bytes: int

    def key(self, recipe: str) -> bytes:
        """Names what will be written; `recipe` says what else decides how it is cut into pieces."""
        packed = encode_manifest(self.manifest, self.data_offset)
        return hashlib.sha256(packed + recipe.encode()).digest()


def laid_out(manifest: NcfManifest) -> NcfPlan:
    """The file of a manifest: its sections one behind another, whatever offsets they have now.

    Their checksums become zeros.
    """
    placed, end = [], 0
    for section in manifest.sections:
        sums = np.zeros(section.num_extents, np.uint32)
        placed.append(replace(section, offset=end, checksums=sums))
        end += section.num_bytes
    packed = encode_manifest(replace(manifest, sections=tuple(placed)), 0)
    data_offset = round_up(HEADER_BYTES + len(packed), PAGE_BYTES)
    sections = tuple(replace(s, offset=data_offset + s.offset) for s in placed)
    return NcfPlan(replace(manifest, sections=sections), data_offset, data_offset + end)


def is_planned(output: Path, plan: NcfPlan) -> bool:
    """Whether a file is what a plan would give, as far as its head tells."""
    try:
        manifest = stripped(read_ncf(output).manifest)
        place = (plan.data_offset, plan.file_bytes)
        return encode_head(manifest, *place) == encode_head(plan.manifest, *place)
    except (FormatError, ValueError):
        return False


class ExtentSums:
    """Checksums of all sections' extents, of bytes that come in the order of the file."""

    def __init__(self, sections: tuple[NcfSection, ...]) -> None:
        self._sections = sections
        self._lengths = [
            section.extent(index)[1] for section in sections for index in range(section.num_extents)
        ]
        self._sums: list[int] = []
        self._crc = 0
        self._left = self._lengths[0] if self._lengths else 0

    def add(self, data: memoryview) -> None:
        """The next bytes."""
        while data:
            part = data[: self._left]
            self._crc = crc32c(part, self._crc)
            self._left -= len(part)
            data = data[len(part) :]
            if self._left == 0:
                self._sums.append(self._crc)
                self._crc = 0
                done = len(self._sums)
                self._left = self._lengths[done] if done < len(self._lengths) else 0

    def mark(self) -> tuple[int, int, int]:
        """A place to go back to."""
        return len(self._sums), self._crc, self._left

    def back_to(self, mark: tuple[int, int, int]) -> None:
        """Forget what was added since."""
        num_sums, self._crc, self._left = mark
        del self._sums[num_sums:]

    def finished(self) -> tuple[NcfSection, ...]:
        """The sections with their checksums."""
        if len(self._sums) != len(self._lengths):
            raise ValueError(f"{len(self._sums)} of {len(self._lengths)} extents were written")
        sections, at = [], 0
        for section in self._sections:
            sums = np.array(self._sums[at : at + section.num_extents], np.uint32)
            sections.append(replace(section, checksums=sums))
            at += section.num_extents
        return tuple(sections)


class NcfWriter(PieceWriter):
    """Takes the pieces of a planned file; `recipe` says what else decides how it is cut."""

    def __init__(
        self,
        output: Path,
        plan: NcfPlan,
        recipe: str,
        on_wait: Callable[[], None] = lambda: None,
    ) -> None:
        self.plan = plan
        self._extent_sums = ExtentSums(plan.manifest.sections)
        data = (plan.data_offset, plan.file_bytes)
        super().__init__(output, data, plan.key(recipe), on_wait, self._extent_sums)

    def finish(self) -> None:
        """Write the head and give the file its name."""
        manifest = self._finished_manifest()
        head = encode_head(manifest, self.plan.data_offset, self.plan.file_bytes)
        self._seal(self.plan.file_bytes, head)

    def _finished_manifest(self) -> NcfManifest:
        tensors = list(self.plan.manifest.tensors)
        for index, error in self.errors.items():
            tensors[index] = replace(
                tensors[index], max_abs_error=error.max_abs, rms_error=error.relative_rms
            )
        sections = self._extent_sums.finished()
        return replace(self.plan.manifest, sections=sections, tensors=tuple(tensors))


def stripped(manifest: NcfManifest) -> NcfManifest:
    """The manifest as it was planned: without checksums and errors."""
    return replace(
        manifest,
        sections=tuple(
            replace(section, checksums=np.zeros_like(section.checksums))
            for section in manifest.sections
        ),
        tensors=tuple(
            replace(tensor, max_abs_error=0.0, rms_error=0.0) for tensor in manifest.tensors
        ),
    )


def encode_head(manifest: NcfManifest, data_offset: int, file_bytes: int) -> bytes:
    """Header, manifest and zeros up to the data."""
    packed = encode_manifest(manifest, data_offset)
    body = packed.ljust(data_offset - HEADER.size - 4, b"\0")
    header = HEADER.pack(NCF_MAGIC, VERSION, len(packed), data_offset, file_bytes, crc32c(body))
    head = header + crc32c(header).to_bytes(4, "little") + body
    if len(head) != data_offset:
        raise ValueError(f"the head takes {len(head)} bytes, {data_offset} were planned")
    return head
