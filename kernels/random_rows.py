"""Random rows by number: the same key and row give the same bits, in any order and company."""

import numpy as np
import numpy.typing as npt

from polyneuron.kernels._kernels import ffi, lib
from polyneuron.kernels.buffers import read_pointer

Bytes = npt.NDArray[np.uint8]
RowIds = npt.NDArray[np.uint32]

WORD_BYTES = 8
MAX_KEY = (1 << 64) - 1


def fill_random_rows(out: Bytes, key: int, row_ids: RowIds) -> None:
    """Rows `row_ids` (num_rows) of the stream `key`, 0 to MAX_KEY, into out (num_rows, row_bytes).

    row_bytes is a multiple of 8; rows may lie any number of bytes apart. Another row_bytes makes
    another stream.
    """
    if out.dtype != np.uint8 or out.ndim != 2 or out.shape[1] % WORD_BYTES:
        raise ValueError(f"out: {out.dtype} {out.shape}, needs uint8 rows of whole 8-byte words")
    if out.strides[1] != 1 or out.strides[0] < out.shape[1] or not out.flags.writeable:
        raise ValueError("out: needs writeable rows of consecutive bytes")
    ids = read_pointer("row_ids", row_ids, np.uint32, (len(out),))
    start = ffi.cast("void *", out.ctypes.data)
    lib.random_rows(start, out.strides[0], ids, len(out), out.shape[1] // WORD_BYTES, key)


def random_rows(key: int, row_ids: RowIds, row_bytes: int) -> Bytes:
    """The same rows as a new array (num_rows, row_bytes)."""
    out = np.empty((len(row_ids), row_bytes), np.uint8)
    fill_random_rows(out, key, row_ids)
    return out


def random_bytes(key: int, num_bytes: int) -> Bytes:
    """The beginning of a stream: its first row, cut to (num_bytes)."""
    row_bytes = -(-num_bytes // WORD_BYTES) * WORD_BYTES
    return random_rows(key, np.zeros(1, np.uint32), row_bytes)[0, :num_bytes]
