"""The I/O engine beside a bare C loop on one file, in turn: `python -m tests.bench.io_probe`.

Disks are moody: each pair runs back to back, and the median of the pairs' ratios is what counts.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from polyneuron.io.block_device import Backend
from polyneuron.io.device_probe import CASES, Pattern, ProbeCase, probe_device
from polyneuron.io.file_device import DeviceOptions

MIB = 1 << 20
RAW_NAMES = {Backend.URING: "uring", Backend.POOL: "preadv"}


@dataclass(frozen=True, slots=True)
class Speed:
    """One run of one side."""

    bytes_per_s: float
    reads_per_s: float
    cpu_us_per_read: float


def build_raw(folder: Path) -> Path:
    """The bare loop, compiled as the kernels are."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise SystemExit("io_probe: no C compiler (cc or gcc) on the path")
    program = folder / "io_raw"
    source = str(Path(__file__).with_name("io_raw.c"))
    flags = ["-O3", "-std=c11", "-D_GNU_SOURCE", "-pthread"]
    subprocess.run([compiler, *flags, source, "-o", str(program)], check=True)
    return program


def run_raw(program: Path, path: Path, backend: Backend, case: ProbeCase, max_ns: int) -> Speed:
    """The bare loop's speed."""
    arguments = [
        RAW_NAMES[backend], path, int(case.pattern is Pattern.RANDOM), case.read_bytes, case.depth,
        max_ns, random.getrandbits(40),
    ]  # fmt: skip
    result = subprocess.run(
        [program, *map(str, arguments)], check=True, capture_output=True, text=True
    )
    num_reads, num_bytes, elapsed_ns, cpu_ns = map(int, result.stdout.split())
    return Speed(
        num_bytes * 1e9 / elapsed_ns, num_reads * 1e9 / elapsed_ns, cpu_ns / num_reads / 1e3
    )


def run_engine(path: Path, backend: Backend, case: ProbeCase, max_ns: int) -> Speed:
    """The engine's speed."""
    options = DeviceOptions(max(case.depth, 1), 256, backend)
    probe = probe_device(path, random.Random(), cases=[case], max_ns=max_ns, options=options)
    row = probe.rows[0]
    return Speed(row.bytes_per_s, row.reads_per_s, row.cpu_ns_per_read / 1e3)


def compare(program: Path, path: Path, backend: Backend, case: ProbeCase, pairs: int, ns: int):
    """Print one row: both sides' medians and the median of the ratios."""
    raw, engine, ratios = [], [], []
    for index in range(pairs):
        runs = [
            lambda: raw.append(run_raw(program, path, backend, case, ns)),
            lambda: engine.append(run_engine(path, backend, case, ns)),
        ]
        for run in runs if index % 2 else reversed(runs):
            run()
        ratios.append(engine[-1].reads_per_s / raw[-1].reads_per_s)
    a, b = median(raw), median(engine)
    print(
        f"{backend.name:6}{case.pattern.value:11}{case.read_bytes >> 10:5} KiB {case.depth:3}  "
        f"{a.bytes_per_s / 1e6:6.0f} {b.bytes_per_s / 1e6:6.0f} MB/s  "
        f"{a.reads_per_s / 1e3:5.1f} {b.reads_per_s / 1e3:5.1f} k/s  "
        f"{a.cpu_us_per_read:6.1f} {b.cpu_us_per_read:6.1f} us  "
        f"{statistics.median(ratios):5.2f}  ({min(ratios):.2f}-{max(ratios):.2f})",
        flush=True,
    )


def median(speeds: list[Speed]) -> Speed:
    """Each figure's own median."""
    return Speed(
        *(
            statistics.median(getattr(speed, name) for speed in speeds)
            for name in ("bytes_per_s", "reads_per_s", "cpu_us_per_read")
        )
    )


def write_file(path: Path, num_bytes: int) -> None:
    """A file of random bytes, on the disk and not in the page cache."""
    block = os.urandom(16 * MIB)
    with path.open("wb") as file:
        for _ in range(num_bytes // len(block)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main() -> None:
    """Compare all cases on both back ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--file", type=Path, help="an existing file to read; else one is written")
    parser.add_argument("--mib", type=int, default=2048, help="size of the file that is written")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--ms", type=int, default=300, help="time of one run")
    parser.add_argument("--backend", choices=["uring", "pool"], action="append")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        program = build_raw(Path(folder))
        path = arguments.file or Path(folder) / "probe.bin"
        if arguments.file is None:
            write_file(path, arguments.mib * MIB)
        print("back end, pattern, size, depth; raw and engine: MB/s, reads, CPU a read; ratio")
        for name in arguments.backend or ["uring", "pool"]:
            for case in CASES:
                backend = Backend[name.upper()]
                compare(program, path, backend, case, arguments.pairs, arguments.ms * 10**6)


if __name__ == "__main__":
    main()
