"""Products with scattered rows beside those with tiles: `python -m tests.bench.row_kernels`.

Memory like the arena's (shared, in small pages) is read in turn by a plain sequential loop, by
matmul_tiles, by dot_rows over packed rows in order ("rows": the dense row kernel), and by dot_rows
and axpy_rows over rows with random ids. "fetch" reads the bytes of the same rows as float32
products, which cost next to no arithmetic: what the memory gives to scattered rows at all. Speeds
count the bytes of tiles and rows over the time the threads ran, medians over the rounds;
percentages are medians of each round's ratio to "rows", or to tiles where a type has no rows.
"""

from __future__ import annotations

import argparse
import statistics

from polyneuron.kernels import isa
from polyneuron.kernels.quant import StorageType
from polyneuron.measure.kernel_speed import MIB, Reader, arena_like_memory, bytes_per_s


def measure(readers: list[Reader], rounds: int, seconds: float) -> dict[str, list[float]]:
    """Name -> bytes a second of each round."""
    by_reader = [dict(reader.runs()) for reader in readers]
    speeds: dict[str, list[float]] = {name: [] for name in by_reader[0]}
    for _ in range(rounds):
        for name, figures in speeds.items():
            figures.append(bytes_per_s([runs[name] for runs in by_reader], seconds))
    return speeds


def table_row(speeds: dict[str, list[float]]) -> str:
    """Medians in GB/s, and their share of the dense row kernel."""
    cells, whole = [], speeds.get("rows", speeds["tiles"])
    for name, figures in speeds.items():
        ratios = [a / b for a, b in zip(figures, whole, strict=True)]
        speed = statistics.median(figures) / 1e9
        cells.append(f"{name} {speed:.1f} ({statistics.median(ratios):.0%})")
    return ", ".join(cells)


def main(arguments: list[str] | None = None) -> None:
    """Print one line a storage type and number of threads."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--types", nargs="+", default=["q4", "q8", "q1"])
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
