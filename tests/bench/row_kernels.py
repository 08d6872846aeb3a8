"""Products with scattered rows beside those with tiles: `python -m tests.bench.row_kernels`.

Memory like the arena's (shared, in small pages) is read in turn by a plain sequential loop, by
matmul_tiles, and by dot_rows and axpy_rows over rows with random ids. Speeds count the bytes of
tiles and rows over the time the threads ran, medians over the rounds; percentages are medians of
each round's ratio to tiles.
"""

from __future__ import annotations

import argparse
import itertools
import mmap
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from polyneuron.kernels import isa, quant
from polyneuron.kernels._kernels import ffi, lib
from polyneuron.kernels.quant import StorageType, row_bytes, tile_bytes

if TYPE_CHECKING:
    from polyneuron.kernels._kernels import CData

Bytes = npt.NDArray[np.uint8]
Run = Callable[[], int]  # one call of a kernel; the bytes it read

STRIDES = (5120, 8192)
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

    def runs(self) -> Iterator[tuple[str, Run]]:
        """Name and call of each row of the table; tiles come first."""
        x = np.linspace(-1, 1, self.cols, dtype=np.float32)
        acts = quant.quantize_acts(x) if self.storage.is_quantised else x
        out = np.zeros(max(self.cols, 32 * TILES_A_CALL), np.float32)
        dots = np.empty(self.rows_a_call, np.float32)
        coef = np.full(self.rows_a_call, 1e-3, np.float32)
        inputs, target = ffi.from_buffer(acts), ffi.from_buffer("float[]", out)
        results, factors = ffi.from_buffer("float[]", dots), ffi.from_buffer("float[]", coef)
        memory = ffi.from_buffer(self.memory)
        num_bytes = TILES_A_CALL * tile_bytes(self.storage, self.cols)
        rows_bytes = self.rows_a_call * row_bytes(self.storage, self.cols)

        def tiles() -> int:
            weights = ffi.from_buffer(self._next(num_bytes))
            kind, num = self.storage, TILES_A_CALL
            lib.matmul_tiles(kind, target, 32 * num, weights, num, self.cols, inputs, 1)
            return num_bytes

        def dot(stride: int, id_lists: Iterator[CData]) -> int:
            where = (memory, stride, next(id_lists))
            lib.dot_rows(self.storage, results, *where, self.rows_a_call, self.cols, inputs)
            return rows_bytes

        def axpy(stride: int, id_lists: Iterator[CData]) -> int:
            where = (memory, stride, next(id_lists))
            lib.axpy_rows(self.storage, target, *where, factors, self.rows_a_call, self.cols)
            return rows_bytes

        yield "tiles", tiles
        yield "read", self.read
        for stride in STRIDES:
            if stride >= row_bytes(self.storage, self.cols):
                yield f"dot {stride}", partial(dot, stride, self._id_lists(stride))
                yield f"axpy {stride}", partial(axpy, stride, self._id_lists(stride))


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


def measure(readers: list[Reader], rounds: int, seconds: float) -> dict[str, list[float]]:
    """Name -> bytes a second of each round."""
    by_reader = [dict(reader.runs()) for reader in readers]
    speeds: dict[str, list[float]] = {name: [] for name in by_reader[0]}
    for _ in range(rounds):
        for name, figures in speeds.items():
            figures.append(bytes_per_s([runs[name] for runs in by_reader], seconds))
    return speeds


def table_row(speeds: dict[str, list[float]]) -> str:
    """Medians in GB/s, and their share of tiles."""
    cells = []
    for name, figures in speeds.items():
        ratios = [a / b for a, b in zip(figures, speeds["tiles"], strict=True)]
        speed = statistics.median(figures) / 1e9
        cells.append(f"{name} {speed:.1f} ({statistics.median(ratios):.0%})")
    return ", ".join(cells)


def main(arguments: list[str] | None = None) -> None:
    """Print one line a storage type and number of threads."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--types", nargs="+", default=["q4", "q8"])
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--columns", type=int, default=4096)
    parser.add_argument("--rows", type=int, default=1024, help="rows a call")
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=0.1)
    options = parser.parse_args(arguments)
    memory = arena_like_memory(options.mib * MIB)
    print(f"{isa.active()}, {options.columns} columns, {options.rows} rows a call, GB/s:")
    for name in options.types:
        storage = StorageType[name.upper()]
        for num_threads in options.threads:
            share = memory.size // num_threads // 4096 * 4096
            readers = [
                Reader(storage, options.columns, options.rows, memory[i * share : (i + 1) * share])
                for i in range(num_threads)
            ]
            speeds = measure(readers, options.rounds, options.seconds)
            print(f"{name} {num_threads} thread(s): {table_row(speeds)}", flush=True)


if __name__ == "__main__":
    main()
