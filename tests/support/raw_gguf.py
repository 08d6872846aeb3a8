"""GGUF headers byte by byte, so that tests can write ones that no writer would."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

U32_TYPE, F32_TYPE, STRING_TYPE, ARRAY_TYPE, U64_TYPE = 4, 6, 8, 9, 10


def u32(value: int) -> bytes:
    """Little-endian 32-bit."""
    return struct.pack("<I", value)


def u64(value: int) -> bytes:
    """Little-endian 64-bit."""
    return struct.pack("<Q", value)


def text(value: str | bytes, length: int | None = None) -> bytes:
    """A string, with another length than its own when asked."""
    raw = value.encode() if isinstance(value, str) else value
    return u64(len(raw) if length is None else length) + raw


def key(name: str | bytes, type_id: int, payload: bytes) -> bytes:
    """One metadata entry."""
    return text(name) + u32(type_id) + payload


def array(type_id: int, count: int, payload: bytes = b"") -> bytes:
    """The payload of an array value."""
    return u32(type_id) + u64(count) + payload


def tensor(
    name: str | bytes,
    dims: Sequence[int] = (32, 2),
    type_id: int = 0,
    offset: int = 0,
    num_dims: int | None = None,
) -> bytes:
    """One row of the tensor table; dims innermost first, as in the file."""
    count = len(dims) if num_dims is None else num_dims
    return text(name) + u32(count) + b"".join(map(u64, dims)) + u32(type_id) + u64(offset)


@dataclass(slots=True)
class RawGguf:
    """The parts of a file, each free to be wrong; `fields` remembers where each part ends."""

    keys: list[bytes] = field(
        default_factory=lambda: [
            key("general.architecture", STRING_TYPE, text("llama")),
            key("numbers", ARRAY_TYPE, array(F32_TYPE, 2, struct.pack("<2f", 1.0, 2.0))),
            key("words", ARRAY_TYPE, array(STRING_TYPE, 2, text("one") + text(b"\xff\x00"))),
        ]
    )
    tensors: list[bytes] = field(
        default_factory=lambda: [tensor("first"), tensor("second", offset=256)]
    )
    data_bytes: int = 512
    magic: bytes = b"GGUF"
    version: int = 3
    num_keys: int | None = None
    num_tensors: int | None = None
    alignment: int = 32

    def parts(self) -> list[bytes]:
        """Every field group up to the data, in order."""
        num_tensors = len(self.tensors) if self.num_tensors is None else self.num_tensors
        num_keys = len(self.keys) if self.num_keys is None else self.num_keys
        counts = [u64(num_tensors), u64(num_keys)]
        return [self.magic, u32(self.version), *counts, *self.keys, *self.tensors]

    def header(self) -> bytes:
        """Everything before the padding."""
        return b"".join(self.parts())

    def build(self) -> bytes:
        """The whole file."""
        header = self.header()
        return header + bytes(-len(header) % self.alignment) + bytes(self.data_bytes)
