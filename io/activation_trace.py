"""Recorded activations: the neurons that each token of a text needs, layer by layer.

docs/PROFILE.md has the format: a head, then a block for each layer, a bit for each token and
neuron, every part with its checksum.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from polyneuron.errors import ChecksumError, FormatError, UnsupportedError
from polyneuron.io.file_kind import TRACE_MAGIC, check_regular_file
from polyneuron.io.ncf_fields import Fields
from polyneuron.io.packed_arrays import pack_arrays, unpack_arrays
from polyneuron.io.whole_file import write_whole_pieces
from polyneuron.kernels.checksum import crc32c

VERSION = 1
HEADER = struct.Struct("<8sIIQ")
"""Magic, version, CRC-32C of the head that follows, its bytes."""
BLOCK_CRC = struct.Struct("<I")
"""Before each layer's block."""
WORD_NEURONS = 64
MAX_HEAD_BYTES = 1 << 24
MAX_LAYERS = 1 << 12
MAX_NEURONS = 1 << 16
MAX_TOKENS = 1 << 26
PLAIN_FIELDS = (
    "model_key", "text_key", "num_layers", "num_neurons", "num_tokens", "task_neurons",
)  # fmt: skip
CURE = "record it anew with polyneuron profile --record"

Words = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class TraceHead:
    """What a recording is of."""

    model_key: str
    """`predictor_file.model_key` of the model file: neurons are in the order of its bundles."""
    text_key: str
    """SHA-256 of the tokens."""
    num_layers: int
    num_neurons: int
    """Of a layer."""
    num_tokens: int
    task_neurons: int = 0
    """So many neurons the engine looks up together, in the order of the file; 0: not known."""
    starts: tuple[int, ...] = (0,)
    """Tokens at which a sequence begins, without those before it in its context."""

    @property
    def num_words(self) -> int:
        """Of one token in one layer."""
        return -(-self.num_neurons // WORD_NEURONS)

    @property
    def block_bytes(self) -> int:
        """One layer's bits."""
        return self.num_tokens * self.num_words * 8


@dataclass(frozen=True, slots=True, eq=False)
class ActivationTrace:
    """A recording in memory."""

    head: TraceHead
    bits: Words
    """(layers, tokens, words): neuron n is bit n % 64 of word n // 64; 1 where it is needed."""


def needed_words(is_needed: NDArray[np.bool_]) -> Words:
    """(tokens, neurons) of truth -> (tokens, words) of bits; the last word is filled with 0."""
    num_words = -(-is_needed.shape[1] // WORD_NEURONS)
    packed = np.zeros((len(is_needed), num_words * 8), np.uint8)
    bits = np.packbits(is_needed, axis=1, bitorder="little")
    packed[:, : bits.shape[1]] = bits
    return packed.view("<u8")


def trace_bytes(head: TraceHead) -> int:
    """The size of a recording's file."""
    blocks = head.num_layers * (BLOCK_CRC.size + head.block_bytes)
    return HEADER.size + len(_packed(head)) + blocks


def write_trace(path: Path, head: TraceHead, blocks: Iterable[bytes]) -> None:
    """Write or replace a recording, at once or not at all; `blocks`: each layer's words.

    DeviceError names the file.
    """
    packed = _packed(head)

    def pieces() -> Iterator[bytes]:
        yield HEADER.pack(TRACE_MAGIC, VERSION, crc32c(packed), len(packed)) + packed
        for block in blocks:
            if len(block) != head.block_bytes:
                raise ValueError(f"a block of {len(block)} bytes, not of {head.block_bytes}")
            yield BLOCK_CRC.pack(crc32c(block))
            yield block

    write_whole_pieces(path, pieces())


def read_trace(path: Path) -> ActivationTrace:
    """A whole recording; FormatError, or ChecksumError, names the file and the cure."""
    check_regular_file(path, CURE)
    try:
        with path.open("rb") as file:
            head = _read_head(path, file)
            _check_size(path, file, head)
            bits = np.empty((head.num_layers, head.num_tokens, head.num_words), "<u8")
            for layer, block in enumerate(bits):
                _read_block(path, file, layer, block)
    except OSError as error:
        raise FormatError(f"{path}: {error.strerror or error}; {CURE}") from None
    beyond = bits[:, :, -1] >> np.uint64((head.num_neurons - 1) % WORD_NEURONS)
    if np.any(beyond > 1):
        raise FormatError(f"{path}: it has bits of neurons that there are not: damaged; {CURE}")
    return ActivationTrace(head, bits)


def _packed(head: TraceHead) -> bytes:
    plain = {name: getattr(head, name) for name in PLAIN_FIELDS}
    starts = np.array(head.starts, np.uint32)
    return pack_arrays({**plain, "num_sequences": len(starts), "starts": starts})


def _read_head(path: Path, file: BufferedReader) -> TraceHead:
    raw = file.read(HEADER.size)
    if raw[: len(TRACE_MAGIC)] != TRACE_MAGIC or len(raw) < HEADER.size:
        raise FormatError(f"{path}: not a recording of activations; {CURE}")
    _, version, checksum, num_bytes = HEADER.unpack(raw)
    if version != VERSION:
        known = f"this reads {VERSION}"
        raise UnsupportedError(f"{path}: version {version} of recordings; {known}; {CURE}")
    packed = file.read(min(num_bytes, MAX_HEAD_BYTES))
    if len(packed) != num_bytes or crc32c(packed) != checksum:
        raise ChecksumError(
            f"{path}: cut off or damaged: the checksum of its head does not match; {CURE}"
        )
    fields = Fields(str(path), "the recording's head", unpack_arrays(path, packed), CURE)
    num_sequences = fields.count("num_sequences", MAX_TOKENS, least=1)
    return TraceHead(
        model_key=fields.text("model_key"),
        text_key=fields.text("text_key"),
        num_layers=fields.count("num_layers", MAX_LAYERS, least=1),
        num_neurons=fields.count("num_neurons", MAX_NEURONS, least=1),
        num_tokens=fields.count("num_tokens", MAX_TOKENS, least=1),
        task_neurons=fields.count("task_neurons", MAX_NEURONS),
        starts=tuple(int(at) for at in fields.array("starts", "<u4", (num_sequences,))),
    )


def _check_size(path: Path, file: BufferedReader, head: TraceHead) -> None:
    expected = file.tell() + head.num_layers * (BLOCK_CRC.size + head.block_bytes)
    size = os.fstat(file.fileno()).st_size
    if size != expected:
        what = "cut off" if size < expected else "something follows its end"
        raise ChecksumError(
            f"{path}: {size:,} bytes, by its head there should be {expected:,}: {what}; {CURE}"
        )


def _read_block(path: Path, file: BufferedReader, layer: int, block: Words) -> None:
    checksum = file.read(BLOCK_CRC.size)
    view = block.data.cast("B")
    count = file.readinto(view)
    if count != len(view) or checksum != BLOCK_CRC.pack(crc32c(view)):
        raise ChecksumError(
            f"{path}: damaged: the checksum of layer {layer} does not match; {CURE}"
        )
