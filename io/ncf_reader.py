"""Reads a neuron-cluster file's head, checked, and verifies its sections."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from polyneuron.errors import ChecksumError, FormatError, UnsupportedError
from polyneuron.io.block_device import ByteRange
from polyneuron.io.file_device import open_device
from polyneuron.io.file_kind import NCF_MAGIC, check_regular_file
from polyneuron.io.gguf_values import quoted
from polyneuron.io.ncf_format import (
    EXTENT_BYTES,
    HEADER,
    HEADER_BYTES,
    PAGE_BYTES,
    VERSION,
    NcfManifest,
    NcfSection,
    NcfTensor,
    round_up,
)
from polyneuron.io.ncf_manifest import MAX_MANIFEST_BYTES, decode_manifest
from polyneuron.io.read_ahead import read_ahead
from polyneuron.kernels.checksum import crc32c

CHECK_EXTENTS = 8  # read at once
CURE = "fetch or convert it again"


@dataclass(frozen=True, slots=True, eq=False)
class NcfFile:
    """What a neuron-cluster file says before its weights."""

    path: Path
    version: int
    data_offset: int
    file_bytes: int
    manifest: NcfManifest = field(repr=False)
    by_name: dict[str, NcfTensor] = field(repr=False)

    @property
    def metadata(self) -> dict[str, Any]:
        """Keys as a GGUF has them, for `Tokenizer.from_metadata` and `ChatTemplate`."""
        return dict(self.manifest.metadata)

    @property
    def sections(self) -> tuple[NcfSection, ...]:
        """All sections, in the order of the file."""
        return self.manifest.sections

    @property
    def tensors(self) -> tuple[NcfTensor, ...]:
        """All tensors, in the order of the file."""
        return self.manifest.tensors

    def tensor(self, name: str) -> NcfTensor:
        """The tensor of that name, or FormatError naming file and tensor."""
        found = self.by_name.get(name)
        if found is None:
            raise FormatError(f"{self.path}: tensor {quoted(name)} is missing")
        return found

    def section(self, name: str) -> NcfSection:
        """The section of that name, or FormatError naming file and section."""
        for section in self.sections:
            if section.name == name:
                return section
        raise FormatError(f"{self.path}: section {quoted(name)} is missing")

    def layer_section(self, layer_id: int) -> NcfSection:
        """The feed-forward weights of a layer."""
        return self.section(f"layer.{layer_id}")

    def tensors_of(self, section: NcfSection) -> tuple[NcfTensor, ...]:
        """The tensors of a section, by offset."""
        index = self.sections.index(section)
        return tuple(tensor for tensor in self.tensors if tensor.section_index == index)

    def file_offset(self, tensor: NcfTensor) -> int:
        """Where in the file a tensor's first byte is."""
        return self.sections[tensor.section_index].offset + tensor.offset

    def check_extents(self, section: NcfSection, first_extent: int, data: memoryview) -> None:
        """Compare bytes just read from a section, from one of its extents on, with its checksums.

        Only extents that `data` holds to their end are looked at; ChecksumError names the place.
        """
        position, index = 0, first_extent
        while index < section.num_extents:
            offset, num_bytes = section.extent(index)
            if position + num_bytes > len(data):
                return
            if crc32c(data[position : position + num_bytes]) != int(section.checksums[index]):
                raise ChecksumError(
                    f"{self.path}: section {section.name}, bytes {offset} to {offset + num_bytes}: "
                    f"checksum does not match: the file is damaged; {CURE}"
                )
            position, index = position + num_bytes, index + 1

    def check(self, name: str, progress: Callable[[int], None] = lambda num_bytes: None) -> None:
        """Read a section whole and compare it with its checksums; `progress` gets bytes read."""
        section = self.section(name)
        span = CHECK_EXTENTS * EXTENT_BYTES
        starts = range(0, section.num_bytes, span)
        ranges = [
            ByteRange(section.offset + start, min(span, section.num_bytes - start))
            for start in starts
        ]
        with open_device(self.path) as device, closing(read_ahead(device, ranges)) as views:
            for start, view in zip(starts, views, strict=True):
                self.check_extents(section, start // EXTENT_BYTES, view)
                progress(len(view))

    def check_all(self, progress: Callable[[int], None] = lambda num_bytes: None) -> None:
        """Check every section; the head was checked when it was read."""
        for section in self.sections:
            self.check(section.name, progress)


def read_ncf(path: Path | str) -> NcfFile:
    """Read and check header and manifest; FormatError in one line when they are anything else."""
    path = Path(path)
    check_regular_file(path)
    try:
        with path.open("rb") as file:
            return _read(path, file)
    except OSError as error:
        raise FormatError(f"{path}: {error.strerror or error}") from None


def _read(path: Path, file: BinaryIO) -> NcfFile:
    found_bytes = os.fstat(file.fileno()).st_size
    manifest_bytes, data_offset, file_bytes, manifest_crc = _header(path, file.read(HEADER_BYTES))
    if found_bytes != file_bytes:
        more = "missing: it was cut off" if found_bytes < file_bytes else "too many"
        raise FormatError(
            f"{path}: {abs(file_bytes - found_bytes):,} of {file_bytes:,} bytes are {more}; {CURE}"
        )
    if manifest_bytes > MAX_MANIFEST_BYTES:
        raise FormatError(f"{path}: a manifest of {manifest_bytes:,} bytes; damaged header")
    if data_offset != round_up(HEADER_BYTES + manifest_bytes, PAGE_BYTES):
        raise FormatError(f"{path}: its data begin at {data_offset:,}; damaged header")
    head = file.read(data_offset - HEADER_BYTES)
    if crc32c(head) != manifest_crc:
        raise ChecksumError(f"{path}: the manifest's checksum does not match: damaged; {CURE}")
    packed = head[:manifest_bytes]
    manifest = decode_manifest(str(path), packed, data_offset, file_bytes)
    by_name = {tensor.name: tensor for tensor in manifest.tensors}
    return NcfFile(path, VERSION, data_offset, file_bytes, manifest, by_name)


def _header(path: Path, raw: bytes) -> tuple[int, int, int, int]:
    """Manifest bytes, data offset, file bytes and the manifest's checksum."""
    if raw[: len(NCF_MAGIC)] != NCF_MAGIC[: len(raw)]:
        raise FormatError(f"{path}: not a neuron-cluster file: it starts with {raw[:8]!r}")
    if len(raw) < HEADER_BYTES:
        raise FormatError(f"{path}: cut off inside the header, at byte {len(raw)}; {CURE}")
    _, version, manifest_bytes, data_offset, file_bytes, manifest_crc = HEADER.unpack(
        raw[: HEADER.size]
    )
    if crc32c(raw[: HEADER.size]) != int.from_bytes(raw[HEADER.size :], "little"):
        raise ChecksumError(f"{path}: the header's checksum does not match: damaged; {CURE}")
    if version != VERSION:
        raise UnsupportedError(
            f"{path}: neuron-cluster file version {version}; this program reads {VERSION}; "
            "convert it again"
        )
    return manifest_bytes, data_offset, file_bytes, manifest_crc
