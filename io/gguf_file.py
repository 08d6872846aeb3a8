"""Our own bounded reader of GGUF headers: metadata and the tensor table, never tensor data.

The `gguf` package's reader builds one numpy view per vocabulary string and trusts its input; this
one maps the file, walks the header once and checks every count, product and offset first.
"""

import mmap
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyneuron.errors import FormatError, UnsupportedError
from polyneuron.io.file_kind import (
    GGUF_MAGIC,
    HEAD_BYTES,
    PWRI_MAGIC,
    check_gguf_magic,
    check_regular_file,
)
from polyneuron.io.ggml_types import SUPPORTED_NAMES, why_unsupported
from polyneuron.io.gguf_tensors import GgufTensor, place_tensors, read_table
from polyneuron.io.gguf_values import U32, U64, GgufReader, quoted, quoted_value
from polyneuron.io.model_files import FilesReader, ModelFiles

__all__ = ["GgufHeader", "GgufTensor", "check_supported", "read_header", "read_vector"]

GGUF, POWERINFER = "gguf", "powerinfer"
"""Formats of files with a header of this kind."""
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 17
MAX_METADATA_BYTES = 256 << 20  # ten times the largest vocabulary seen
MAX_VECTOR_BYTES = 1 << 16
MIN_KEY_BYTES = 8 + 4 + 1
MIN_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8


@dataclass(frozen=True, slots=True, eq=False)
class GgufHeader:
    """What a GGUF says before its tensor data."""

    path: Path
    version: int
    metadata: dict[str, Any] = field(repr=False)
    tensors: tuple[GgufTensor, ...] = field(repr=False)
    alignment: int
    data_offset: int
    file_bytes: int
    by_name: dict[str, GgufTensor] = field(repr=False)
    files: ModelFiles = field(repr=False)
    """Where the tensors' offsets lie; in a header of one file they are places in it."""
    format: str = GGUF
    """Of the files: GGUF, POWERINFER, or what a header was made of that is in no file."""

    def tensor(self, name: str) -> GgufTensor:
        """The tensor of that name, or FormatError naming file and tensor."""
        found = self.by_name.get(name)
        if found is None:
            raise FormatError(f"{self.path}: tensor {quoted(name)} is missing")
        return found


def read_header(path: Path | str, magics: tuple[bytes, ...] = (GGUF_MAGIC,)) -> GgufHeader:
    """Read and check the header of a GGUF; FormatError in one line when it is anything else.

    `magics` are the first bytes it may have.
    """
    path = Path(path)
    check_regular_file(path)
    try:
        with path.open("rb") as file:
            check_gguf_magic(path, file.read(HEAD_BYTES), magics)
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
                return _parse(path, GgufReader(str(path), view))
    except OSError as error:
        raise FormatError(f"{path}: {error.strerror or error}") from None


def check_supported(header: GgufHeader) -> None:
    """UnsupportedError when the model holds a tensor type that is not read."""
    for tensor in header.tensors:
        reason = why_unsupported(tensor.type_id)
        if reason is not None:
            raise UnsupportedError(
                f"{header.path}: tensor {quoted(tensor.name)} has type {reason}; "
                f"supported: {SUPPORTED_NAMES}; give a Q4_K_M, Q8_0 or BF16 file of the same model"
            )


def _parse(path: Path, reader: GgufReader) -> GgufHeader:
    reader.position = 4
    version = _read_version(reader)
    num_tensors, num_keys = reader.scalar(U64), reader.scalar(U64)
    for count, limit, min_bytes, what in (
        (num_keys, MAX_KEYS, MIN_KEY_BYTES, "metadata keys"),
        (num_tensors, MAX_TENSORS, MIN_TENSOR_BYTES, "tensors"),
    ):
        if count > limit or count * min_bytes > reader.num_left:
            reader.fail(
                f"the header claims {count:,} {what}, more than {limit:,} or than the file's "
                f"{reader.num_bytes:,} bytes can hold; damaged or cut off"
            )
    metadata = _read_metadata(reader, num_keys)
    alignment = _alignment(reader, metadata)
    rows = read_table(reader, num_tensors)
    data_offset = -(-reader.position // alignment) * alignment
    tensors = place_tensors(reader, rows, data_offset, alignment)
    return GgufHeader(
        path=path,
        version=version,
        metadata=metadata,
        tensors=tensors,
        alignment=alignment,
        data_offset=data_offset,
        file_bytes=reader.num_bytes,
        by_name={tensor.name: tensor for tensor in tensors},
        files=ModelFiles.of_file(path, reader.num_bytes),
        format=POWERINFER if reader.view[:4] == PWRI_MAGIC else GGUF,
    )


def _read_version(reader: GgufReader) -> int:
    version: int = reader.scalar(U32)
    if version & 0xFFFF == 0 and version:
        reader.fail("a big-endian GGUF; convert it to little-endian with gguf_convert_endian.py")
    if version not in VERSIONS:
        age = "newer" if version > max(VERSIONS) else "older"
        reader.fail(f"GGUF version {version} is {age} than the supported ones, 2 and 3")
    return version


def _read_metadata(reader: GgufReader, num_keys: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for index in range(num_keys):
        reader.place = f"metadata key {index} of {num_keys}"
        key = reader.string()
        if key in metadata:
            reader.fail(f"metadata key {quoted(key)} appears twice; damaged header")
        reader.place = f"metadata key {quoted(key)}"
        metadata[key] = reader.value()
        if reader.position > MAX_METADATA_BYTES:
            limit = MAX_METADATA_BYTES >> 20
            reader.fail(f"more than {limit} MiB of metadata; damaged header")
    return metadata


def _alignment(reader: GgufReader, metadata: dict[str, Any]) -> int:
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    is_power = isinstance(alignment, int) and alignment >= 8 and alignment & (alignment - 1) == 0
    if not is_power:
        shown = quoted_value(alignment)
        reader.fail(f"general.alignment is {shown}; it must be a power of two of at least 8")
    return int(alignment)


def read_vector(header: GgufHeader, tensor: GgufTensor) -> NDArray[np.float32]:
    """The values of a small F32 vector that belongs to the hyper-parameters (rope_freqs)."""
    if tensor.type_id != 0 or len(tensor.shape) != 1 or tensor.num_bytes > MAX_VECTOR_BYTES:
        raise FormatError(
            f"{header.path}: tensor {quoted(tensor.name)} is {tensor.type_name} of shape "
            f"{tensor.shape}; a short F32 vector is expected"
        )
    raw = np.empty(tensor.num_bytes, np.uint8)
    with FilesReader(header.files) as reader:
        reader.read(tensor.offset, raw)
    return raw.view("<f4").astype(np.float32)
