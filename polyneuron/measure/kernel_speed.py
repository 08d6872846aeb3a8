"""Speed of kernels over weights that lie as in the arena, in bytes a second of several threads.

Memory like the arena's (shared, in small pages) is read by a plain sequential loop, by
`matmul_tiles`, by `dot_rows` over packed rows in order ("rows"), and by `dot_rows` and `axpy_rows`
over rows with random ids. "fetch" reads the bytes of the same rows as float32 products, which cost
next to no arithmetic: what the memory gives to scattered rows at all. Speeds count the bytes of
tiles and rows over the processor time of the threads that ran.
"""

from __future__ import annotations

import itertools
import mmap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from polyneuron.kernels import quant
from polyneuron.kernels._kernels import ffi
from polyneuron.kernels.isa import library
from polyneuron.kernels.quant import StorageType, row_bytes, tile_bytes

if TYPE_CHECKING:
    from polyneuron.kernels._kernels import CData

Bytes = npt.NDArray[np.uint8]
Run = Callable[[], int]  # one call of a kernel; the bytes it read

# Of 4096 columns: a 4-bit up and down row, a 4-bit and an 8-bit one, and bundles of whole pages
STRIDES = (4608, 7168, 8192)
SLICE_BYTES = 1 << 20
TILES_A_CALL = 8
MIB = 1 << 20


def arena_like_memory(num_bytes: int) -> Bytes:
    """Shared memory where every two bytes are an ordinary half: no infinity, nothing subnormal."""
    memory = np.frombuffer(mmap.mmap(-1, num_bytes), np.uint8)
    rng = np.random.default_rng(1)
    for part in np.split(memory.view(np.uint64), range(1 << 17, num_bytes // 8, 1 << 17)):
        part[:] = rng.integers(0, 1 << 63, part.size, np.uint64)
        part &= np.uint64(0xAFFFAFFFAFFFAFFF)
        part |= np.uint64(0x2000200020002000)
    return memory


@dataclass(slots=True)
class Reader:
    """One thread's part of the memory and its buffers."""

    storage: StorageType
    cols: int
    rows_a_call: int
    memory: Bytes
    strides: Sequence[int] = STRIDES
    at: int = 0
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(2))

    def _next(self, num_bytes: int) -> Bytes:
        self.at = self.at if self.at + num_bytes <= self.memory.size else 0
        part = self.memory[self.at : self.at + num_bytes]
        self.at += num_bytes
        return part

    def read(self) -> int:
        """Look at each byte of the next slice."""
        self._next(SLICE_BYTES).max()
        return SLICE_BYTES

    def _id_lists(self, stride: int) -> Iterator[CData]:
        """All rows in random order, a call's share at a time, again and again."""
        ids = self.rng.permutation(self.memory.size // stride).astype(np.uint32)
        num_lists = ids.size // self.rows_a_call
        lists = ids[: num_lists * self.rows_a_call].reshape(num_lists, self.rows_a_call)
        return itertools.cycle([ffi.from_buffer("uint32_t[]", row) for row in lists])

    def _in_order(self, stride: int) -> Iterator[CData]:
        """All rows one after another, a call's share at a time, again and again."""
        num_lists = self.memory.size // stride // self.rows_a_call
        ids = np.arange(num_lists * self.rows_a_call, dtype=np.uint32)
        lists = ids.reshape(num_lists, self.rows_a_call)
        return itertools.cycle([ffi.from_buffer("uint32_t[]", row) for row in lists])

    def runs(self) -> Iterator[tuple[str, Run]]:
        """Name and call of each row of the table; tiles come first. Not every type has rows."""
        yield "tiles", self.tiles(1)
        yield "read", self.read
        if self.storage.is_for_weights:
            yield from self._row_runs()

    def _row_runs(self) -> Iterator[tuple[str, Run]]:
        lib, x = library(), np.linspace(-1, 1, self.cols, dtype=np.float32)
        acts = quant.quantize_acts(x) if self.storage.is_quantised else x
        out = np.zeros(self.cols, np.float32)
        dots = np.empty(self.rows_a_call, np.float32)
        coef = np.full(self.rows_a_call, 1e-3, np.float32)
        inputs, target = ffi.from_buffer(acts), ffi.from_buffer("float[]", out)
        results, factors = ffi.from_buffer("float[]", dots), ffi.from_buffer("float[]", coef)
        memory, row_size = ffi.from_buffer(self.memory), row_bytes(self.storage, self.cols)
        floats = ffi.from_buffer("float[]", np.ones(row_size // 4, np.float32))
        rows_bytes = self.rows_a_call * row_size

        def fetch(stride: int, id_lists: Iterator[CData]) -> int:
            where = (memory, stride, next(id_lists))
            count = self.rows_a_call
            lib.dot_rows(StorageType.F32, results, *where, count, row_size // 4, floats)
            return rows_bytes

        def dot(stride: int, id_lists: Iterator[CData]) -> int:
            where = (memory, stride, next(id_lists))
            lib.dot_rows(self.storage, results, *where, self.rows_a_call, self.cols, inputs)
            return rows_bytes

        def axpy(stride: int, id_lists: Iterator[CData]) -> int:
            where = (memory, stride, next(id_lists))
            lib.axpy_rows(self.storage, target, *where, factors, self.rows_a_call, self.cols)
            return rows_bytes

        yield "rows", partial(dot, row_size, self._in_order(row_size))
        for stride in self.strides:
            if stride >= row_size:
                for name, call in (("fetch", fetch), ("dot", dot), ("axpy", axpy)):
                    yield f"{name} {stride}", partial(call, stride, self._id_lists(stride))

    def tiles(self, tokens: int) -> Run:
        """Tiles one after another by so many rows of activations."""
        x = np.linspace(-1, 1, tokens * self.cols, dtype=np.float32).reshape(tokens, self.cols)
        acts = quant.quantize_acts(x) if self.storage.is_quantised else x
        out = np.zeros((tokens, quant.TILE_ROWS * TILES_A_CALL), np.float32)
        lib, inputs, target = library(), ffi.from_buffer(acts), ffi.from_buffer("float[]", out)
        num_bytes = TILES_A_CALL * tile_bytes(self.storage, self.cols)

        def run() -> int:
            weights = ffi.from_buffer(self._next(num_bytes))
            kind, num = self.storage, TILES_A_CALL
            stride = quant.TILE_ROWS * num
            lib.matmul_tiles(kind, target, stride, weights, num, self.cols, inputs, tokens)
            return num_bytes

        return run

    def attention(self, head_dim: int, num_queries: int, positions: int) -> Run:
        """Queries that share a KV head over its keys and values, other ones in each call."""
        num_blocks = positions // quant.KV_BLOCK_TOKENS
        block_bytes = quant.kv_block_bytes(head_dim)
        queries = np.linspace(-1, 1, num_queries * head_dim, dtype=np.float32)
        out, table = np.empty_like(queries), np.arange(num_blocks, dtype=np.int32)
        scratch = np.empty(num_queries * positions, np.float32)
        lib, target, order = library(), ffi.from_buffer("float[]", out), ffi.from_buffer(table)
        ask, room = ffi.from_buffer("float[]", queries), ffi.from_buffer("float[]", scratch)
        blocks, scale = ffi.cast("int32_t *", order), head_dim**-0.5

        def run() -> int:
            kv = ffi.from_buffer("uint8_t[]", self._next(num_blocks * block_bytes))
            lib.attention_heads(
                quant.StorageType.F16, target, ask, num_queries, head_dim, kv, blocks,
                block_bytes, 0, positions, scale, 0.0, room,
            )  # fmt: skip
            return num_blocks * block_bytes

        return run


def bytes_per_s(runs: list[Run], seconds: float) -> float:
    """Speed of the same call on several threads, each over the time it ran."""
    speeds: list[float] = []
    barrier = threading.Barrier(len(runs))

    def repeat(run: Run) -> None:
        barrier.wait()
        start, num_bytes = time.thread_time(), 0
        while (spent := time.thread_time() - start) < seconds or not num_bytes:
            num_bytes += run()
        speeds.append(num_bytes / max(spent, 1e-9))

    threads = [threading.Thread(target=repeat, args=(run,)) for run in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(speeds)
