"""Names a GGUF by its content, without reading all of it.

The key covers the size, the whole header and three pages of every tensor: its first, middle and
last. Another model, another quantisation, a fine-tune or a transfer that broke off changes one of
them. An edit of a few weights in between would not show, so whoever keeps something made from a
file compares the time of its last change as well (`polyneuron.model.model_cache`).
"""

from __future__ import annotations

import hashlib

import numpy as np

from polyneuron.errors import FormatError
from polyneuron.io.gguf_file import GgufHeader
from polyneuron.io.model_files import FilesReader

SAMPLE_BYTES = 4096
READ_BYTES = 1 << 20


def content_key(header: GgufHeader) -> str:
    """The key as 64 hexadecimal digits."""
    if header.file_bytes < header.data_offset:
        raise FormatError(f"{header.path}: no data behind the header; fetch it again")
    digest = hashlib.sha256(f"gguf {header.file_bytes} {header.data_offset}\n".encode())
    with FilesReader(header.files) as reader:
        if header.files.is_plain:
            for start in range(0, header.data_offset, READ_BYTES):
                count = min(READ_BYTES, header.data_offset - start)
                digest.update(_read(reader, start, count))
        else:
            _add_meaning(digest, header)
        for tensor in header.tensors:
            count = min(SAMPLE_BYTES, tensor.num_bytes)
            rest = tensor.num_bytes - count
            for place in dict.fromkeys((0, rest // 2, rest)):
                digest.update(_read(reader, tensor.offset + place, count))
    return digest.hexdigest()


def _add_meaning(digest: hashlib._Hash, header: GgufHeader) -> None:
    """What several files say before their tensors, however they are spelled and cut."""
    for key, value in sorted(header.metadata.items()):
        plain = value.tobytes() if isinstance(value, np.ndarray) else value
        digest.update(repr((key, plain)).encode("utf-8", "surrogatepass"))
    for tensor in header.tensors:
        digest.update(repr((tensor.name, tensor.type_id, tensor.shape)).encode())


def _read(reader: FilesReader, address: int, num_bytes: int) -> memoryview:
    out = np.empty(num_bytes, np.uint8)
    reader.read(address, out)
    return out.data
