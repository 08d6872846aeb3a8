"""The tensor table of a GGUF header: names, types, shapes and checked places in the file."""

import math
from dataclasses import dataclass

from polyneuron.io.ggml_types import GGML_TYPES, type_name
from polyneuron.io.gguf_values import U32, U64, GgufReader, quoted

MAX_DIMS = 4
MAX_VALUES = 1 << 48  # of one tensor

TableRow = tuple[str, int, tuple[int, ...], int]
"""Name, type, row-major shape, offset in the data section."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One row of the tensor table; `shape` is row-major, `offset` counts from the file's start."""

    name: str
    type_id: int
    shape: tuple[int, ...]
    offset: int
    num_bytes: int
    """Of a type this version does not know: the room up to the next tensor."""
    is_turned: bool = False
    """Whether the file's rows are this matrix's columns; `row_bytes` are not theirs then."""

    @property
    def type_name(self) -> str:
        """Name of the ggml type."""
        return type_name(self.type_id)

    @property
    def num_cols(self) -> int:
        """Values in a row: the innermost dimension."""
        return self.shape[-1]

    @property
    def num_rows(self) -> int:
        """Rows of `num_cols` values; 1 for a vector."""
        return math.prod(self.shape[:-1])

    @property
    def row_bytes(self) -> int:
        """Bytes of one row; rows follow each other without gaps."""
        return self.num_bytes // self.num_rows


def read_table(reader: GgufReader, num_tensors: int) -> list[TableRow]:
    """Name, type, row-major shape and relative offset of each tensor."""
    rows = []
    names: set[str] = set()
    for index in range(num_tensors):
        reader.place = f"tensor entry {index} of {num_tensors}"
        name = reader.string()
        if name in names:
            reader.fail(f"tensor {quoted(name)} appears twice; damaged header")
        names.add(name)
        reader.place = f"the entry of tensor {quoted(name)}"
        num_dims = reader.scalar(U32)
        if not 1 <= num_dims <= MAX_DIMS:
            reader.fail(
                f"tensor {quoted(name)} has {num_dims} dimensions; 1 to {MAX_DIMS} expected"
            )
        shape = tuple(reader.scalar(U64) for _ in range(num_dims))[::-1]
        if math.prod(shape) > MAX_VALUES or min(shape) == 0:
            reader.fail(f"tensor {quoted(name)} has the impossible shape {shape}; damaged header")
        rows.append((name, reader.scalar(U32), shape, reader.scalar(U64)))
    return rows


def place_tensors(
    reader: GgufReader,
    rows: list[TableRow],
    data_offset: int,
    alignment: int,
) -> tuple[GgufTensor, ...]:
    """Absolute offsets and byte counts, checked for alignment, overlap and the file's end."""
    by_offset = sorted(range(len(rows)), key=lambda index: rows[index][3])
    tensors: dict[int, GgufTensor] = {}
    end, previous = data_offset, ""
    for rank, index in enumerate(by_offset):
        name, type_id, shape, relative = rows[index]
        offset = data_offset + relative
        if relative % alignment:
            reader.fail(f"tensor {quoted(name)} lies at {relative}, not a multiple of {alignment}")
        if offset < end:
            reader.fail(f"tensors {quoted(previous)} and {quoted(name)} overlap; damaged header")
        num_bytes = _tensor_bytes(reader, name, type_id, shape)
        if num_bytes is None:
            is_last = rank + 1 == len(by_offset)
            following = reader.num_bytes - data_offset if is_last else rows[by_offset[rank + 1]][3]
            num_bytes = max(following - relative, 0)
        tensors[index] = GgufTensor(name, type_id, shape, offset, num_bytes)
        end, previous = offset + num_bytes, name
    if tensors and end > reader.num_bytes:
        num_missing = end - reader.num_bytes
        reader.fail(
            f"{num_missing:,} bytes are missing: tensor {quoted(previous)} ends at byte {end:,}, "
            f"the file at {reader.num_bytes:,}; fetch it again"
        )
    return tuple(tensors[index] for index in range(len(rows)))


def _tensor_bytes(
    reader: GgufReader, name: str, type_id: int, shape: tuple[int, ...]
) -> int | None:
    """Bytes of a tensor, or None when the type's block size is not known."""
    known = GGML_TYPES.get(type_id)
    if known is None:
        return None
    if shape[-1] % known.block_values:
        reader.fail(
            f"tensor {quoted(name)} has rows of {shape[-1]} values, not a multiple of the "
            f"{known.block_values} that a {known.name} block holds"
        )
    return math.prod(shape) // known.block_values * known.block_bytes
