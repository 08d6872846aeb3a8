"""Names a GGUF by its content, without reading all of it.

The key covers the size, the whole header and three pages of every tensor: its first, middle and
last. Another model, another quantisation, a fine-tune or a transfer that broke off changes one of
them. An edit of a few weights in between would not show, so whoever keeps something made from a
file compares the time of its last change as well (`polyneuron.model.model_cache`).
"""

from __future__ import annotations

import hashlib
import os

from polyneuron.errors import FormatError
from polyneuron.io.gguf_file import GgufHeader

SAMPLE_BYTES = 4096
READ_BYTES = 1 << 20


def content_key(header: GgufHeader) -> str:
    """The key as 64 hexadecimal digits."""
    digest = hashlib.sha256(f"gguf {header.file_bytes} {header.data_offset}\n".encode())
    fd = os.open(header.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        for start in range(0, header.data_offset, READ_BYTES):
            digest.update(_read(fd, start, min(READ_BYTES, header.data_offset - start)))
        for tensor in header.tensors:
            count = min(SAMPLE_BYTES, tensor.num_bytes)
            rest = tensor.num_bytes - count
            for place in dict.fromkeys((0, rest // 2, rest)):
                digest.update(_read(fd, tensor.offset + place, count))
        if header.file_bytes < header.data_offset:
            raise FormatError(f"{header.path}: no data behind the header; fetch it again")
    finally:
        os.close(fd)
    return digest.hexdigest()


def _read(fd: int, offset: int, num_bytes: int) -> bytes:
    return os.pread(fd, num_bytes, offset)
