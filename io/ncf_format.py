"""The neuron-cluster file's parts as values; docs/FORMAT.md describes it byte by byte.

A fixed header, a msgpack manifest, then sections that follow each other without gaps.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyneuron.kernels.quant import StorageType, num_tiles, row_bytes, tile_bytes

VERSION = 1
HEADER = struct.Struct("<8sI4xQQQI16x")
"""Magic, version, manifest bytes, data offset, file bytes, CRC of manifest and padding."""
HEADER_BYTES = HEADER.size + 4
"""The last four are the CRC of those before."""
PAGE_BYTES = 4096
LINE_BYTES = 64
ROW_ALIGN = 64
BUNDLE_ALIGN = 512
EXTENT_BYTES = 1 << 20
VECTOR_PAD = 32
TWO_PHASE_BYTES = 2 * PAGE_BYTES
"""A bundle of four to eight KiB takes two pages: the first has the whole gate row."""

Checksums = NDArray[np.uint32]


def round_up(value: int, step: int) -> int:
    """The next multiple of `step`."""
    return -(-value // step) * step


class Layout(StrEnum):
    """How feed-forward weights lie in a file."""

    TILES = "tiles"
    BUNDLES = "bundles"


class SectionKind(StrEnum):
    """What a section holds."""

    FIXED = "fixed"
    TILES = "tiles"
    BUNDLES = "bundles"


@dataclass(frozen=True, slots=True)
class BundleShape:
    """How one neuron's rows lie in its bundle; all bundles of a section are alike.

    Reading the first `phase0_bytes` brings the row that decides: gate, or up where there is none.
    """

    num_neurons: int
    bundle_bytes: int
    gate_offset: int | None
    up_offset: int
    down_offset: int
    phase0_bytes: int


@dataclass(frozen=True, slots=True)
class NcfTensor:
    """One tensor; in bundles `rows` are neurons, so down is (d_ff, d_model): transposed."""

    name: str
    """The GGUF tensor name it was made of."""
    layer_id: int | None
    role: str
    """The name without `blk.N.`, `.weight` and `_exps`: attn_q, ffn_down, attn_q.bias."""
    storage: StorageType | None
    """None: a float32 vector, padded with zeros to a multiple of 32."""
    rows: int
    cols: int
    section_index: int
    offset: int
    """Of its first byte, from the section's start."""
    num_bytes: int
    """Of tiles or a vector: the run of them; of rows in bundles: their sum."""
    row_stride: int
    """Bytes from one row to the next in bundles; 0 in tiles and vectors."""
    source_type: str
    max_abs_error: float = 0.0
    """Largest difference from the source's values; 0: stored without loss."""
    rms_error: float = 0.0
    """Root of the squared error over the squared values."""

    @property
    def is_lossless(self) -> bool:
        """Whether every value is the source's."""
        return self.max_abs_error == 0.0


@dataclass(frozen=True, slots=True, eq=False)
class NcfSection:
    """A run of the file that is read as a whole, or bundle by bundle."""

    name: str
    """`fixed`, or `layer.N` for a layer's feed-forward weights."""
    kind: SectionKind
    offset: int
    """From the file's start, a multiple of 4096."""
    num_bytes: int
    """A multiple of 4096."""
    checksums: Checksums = field(repr=False)
    """CRC-32C of each MiB from the section's start; the last may be shorter."""
    bundles: BundleShape | None = None
    neuron_ids: NDArray[np.uint32] | None = field(default=None, repr=False)
    """Bundle i holds neuron neuron_ids[i]; None: neuron i."""

    @property
    def layer(self) -> int:
        """The layer whose feed-forward weights these are, -1 for none."""
        found = re.match(r"layer\.(\d+)", self.name)
        return int(found[1]) if found else -1

    @property
    def num_extents(self) -> int:
        """Pieces that have a checksum of their own."""
        return -(-self.num_bytes // EXTENT_BYTES)

    def extent(self, index: int) -> tuple[int, int]:
        """Offset in the file and bytes of one extent."""
        start = index * EXTENT_BYTES
        return self.offset + start, min(EXTENT_BYTES, self.num_bytes - start)


@dataclass(frozen=True, slots=True)
class NcfSource:
    """What a file was converted from."""

    format: str
    num_bytes: int
    key: str
    """Content key: sha256 over size, header and sampled pages of every tensor."""


@dataclass(frozen=True, slots=True, eq=False)
class NcfManifest:
    """Everything a file says about itself."""

    layout: Layout
    spec: Mapping[str, Any]
    """The model as plain data; `polyneuron.model.ncf_spec` reads it."""
    metadata: Mapping[str, Any] = field(repr=False)
    """The source's keys that tokenizer and chat template are made of."""
    source: NcfSource
    sections: tuple[NcfSection, ...]
    tensors: tuple[NcfTensor, ...] = field(repr=False)


def stored_bytes(storage: StorageType | None, rows: int, cols: int) -> int:
    """Bytes of a tensor in tiles, or of a padded vector."""
    if storage is None:
        return 4 * round_up(cols, VECTOR_PAD)
    return num_tiles(rows) * tile_bytes(storage, cols)


def neuron_row_bytes(storage: StorageType, cols: int) -> int:
    """Bytes of one row in a bundle."""
    return row_bytes(storage, cols)


def bundle_shape(
    num_neurons: int, gate_bytes: int | None, up_bytes: int, down_bytes: int
) -> BundleShape:
    """Lay a bundle's rows out: gate, up, down, each at a cache line.

    Up to a page it is padded to 512 bytes and read at once. In longer ones the second row begins at
    a multiple of 512, so that what follows the row that decides can be read without it. Up to two
    pages a bundle takes two, gate in the first: reading two pages one by one costs no more than
    both, and the second is often not needed. Beyond, it is padded to 512 bytes and the first phase
    ends behind the gate.
    """
    first = gate_bytes if gate_bytes is not None else up_bytes
    up_offset, down_offset = _row_offsets(gate_bytes, up_bytes, ROW_ALIGN)
    if down_offset + down_bytes > PAGE_BYTES:
        up_offset, down_offset = _row_offsets(gate_bytes, up_bytes, BUNDLE_ALIGN)
    wanted = down_offset + down_bytes
    bundle_bytes = round_up(wanted, BUNDLE_ALIGN)
    phase0_bytes = round_up(first, BUNDLE_ALIGN)
    if wanted <= PAGE_BYTES:
        phase0_bytes = bundle_bytes
    elif wanted <= TWO_PHASE_BYTES and first <= PAGE_BYTES:
        bundle_bytes, phase0_bytes = TWO_PHASE_BYTES, PAGE_BYTES
    gate_offset = None if gate_bytes is None else 0
    return BundleShape(num_neurons, bundle_bytes, gate_offset, up_offset, down_offset, phase0_bytes)


def _row_offsets(gate_bytes: int | None, up_bytes: int, align: int) -> tuple[int, int]:
    """Where up and down begin, when the second row begins at a multiple of `align`."""
    if gate_bytes is None:
        return 0, round_up(up_bytes, align)
    up_offset = round_up(gate_bytes, align)
    return up_offset, up_offset + round_up(up_bytes, ROW_ALIGN)
