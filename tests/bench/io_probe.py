"""What reads files beside a bare C loop on one file, in turn: `python -m tests.bench.io_probe`.

Three parts: the I/O engine, by its own probe; layers, as the reader of streamed layers brings them;
neurons, through the ring of orders. Disks are moody: each pair runs back to back, and the median of
the pairs' ratios is what counts.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from polyneuron.io.block_device import Backend
from polyneuron.io.device_probe import CASES, Pattern, ProbeCase, probe_device
from polyneuron.io.file_device import DeviceOptions
from tests.bench.io_paths import read_neurons, stream_layers
from tests.bench.speed import Speed, median

KIB, MIB = 1 << 10, 1 << 20
RAW_NAMES = {Backend.URING: "uring", Backend.POOL: "preadv"}
BAR = 0.80
LAYER_CASE = ProbeCase(Pattern.SEQUENTIAL, MIB, 32)
NEURON_CASES = [
    ProbeCase(Pattern.RANDOM, read_bytes, depth)
    for read_bytes in (4 * KIB, 8 * KIB)
    for depth in (8, 32)
]


@dataclass(frozen=True, slots=True)
class Contest:
    """A row: the same reads by both sides."""

    name: str
    case: ProbeCase
    raw: Callable[[], Speed]
    ours: Callable[[], Speed]


@dataclass(frozen=True, slots=True)
class Bench:
    """What all rows share."""

    program: Path
    path: Path
    max_ns: int

    def run_raw(self, backend: Backend, memory: str, case: ProbeCase) -> Speed:
        """The bare loop's speed into `huge` pages or `shared` memory."""
        arguments = [
            RAW_NAMES[backend], memory, self.path, int(case.pattern is Pattern.RANDOM),
            case.read_bytes, case.depth, self.max_ns, random.getrandbits(40),
        ]  # fmt: skip
        result = subprocess.run(
            [self.program, *map(str, arguments)], check=True, capture_output=True, text=True
        )
        num_reads, num_bytes, elapsed_ns, cpu_ns = map(int, result.stdout.split())
        return Speed(
            num_bytes * 1e9 / elapsed_ns, num_reads * 1e9 / elapsed_ns, cpu_ns / num_reads / 1e3
        )

    def run_engine(self, backend: Backend, case: ProbeCase) -> Speed:
        """The engine's speed."""
        options = DeviceOptions(case.depth, 256, backend)
        probe = probe_device(
            self.path, random.Random(), cases=[case], max_ns=self.max_ns, options=options
        )
        row = probe.rows[0]
        return Speed(row.bytes_per_s, row.reads_per_s, row.cpu_ns_per_read / 1e3)

    def engine_contests(self, backend: Backend) -> Iterator[Contest]:
        """The engine's own probe, every case."""
        for case in CASES:
            yield Contest(
                f"engine {backend.name.lower()}",
                case,
                lambda case=case: self.run_raw(backend, "huge", case),
                lambda case=case: self.run_engine(backend, case),
            )

    def path_contests(self) -> Iterator[Contest]:
        """The product's two ways into the arena, beside the bare loop into the same memory."""
        yield Contest(
            "layers",
            LAYER_CASE,
            lambda: self.run_raw(Backend.URING, "shared", LAYER_CASE),
            lambda: stream_layers(self.path, self.max_ns, DeviceOptions(LAYER_CASE.depth)),
        )
        for case in NEURON_CASES:
            options = DeviceOptions(case.depth)
            for is_registered in (False, True):
                yield Contest(
                    "neurons registered" if is_registered else "neurons",
                    case,
                    lambda case=case: self.run_raw(Backend.URING, "shared", case),
                    lambda size=case.read_bytes, options=options, is_registered=is_registered: (
                        read_neurons(self.path, size, self.max_ns, options, is_registered)
                    ),
                )


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


def hold(contest: Contest, pairs: int) -> float:
    """Print one row, both sides' medians and the median of the ratios; returns that."""
    raw, ours, ratios = [], [], []
    for index in range(pairs):
        runs = [lambda: raw.append(contest.raw()), lambda: ours.append(contest.ours())]
        for run in runs if index % 2 else reversed(runs):
            run()
        ratios.append(ours[-1].reads_per_s / raw[-1].reads_per_s)
    a, b, case = median(raw), median(ours), contest.case
    print(
        f"{contest.name:19}{case.pattern.value:11}{case.read_bytes >> 10:5} KiB {case.depth:3}  "
        f"{a.bytes_per_s / 1e6:6.0f} {b.bytes_per_s / 1e6:6.0f} MB/s  "
        f"{a.reads_per_s / 1e3:5.1f} {b.reads_per_s / 1e3:5.1f} k/s  "
        f"{a.cpu_us_per_read:6.1f} {b.cpu_us_per_read:6.1f} us  "
        f"{statistics.median(ratios):5.2f}  ({min(ratios):.2f}-{max(ratios):.2f})",
        flush=True,
    )
    return statistics.median(ratios)


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
    """Hold every contest; the bar is that of the product's two ways."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--file", type=Path, help="an existing file to read; else one is written")
    parser.add_argument("--mib", type=int, default=2048, help="size of the file that is written")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--ms", type=int, default=300, help="time of one run")
    parser.add_argument("--part", choices=["paths", "uring", "pool"], action="append")
    arguments = parser.parse_args()
    parts = arguments.part or ["paths", "uring", "pool"]
    with tempfile.TemporaryDirectory() as folder:
        path = arguments.file or Path(folder) / "probe.bin"
        bench = Bench(build_raw(Path(folder)), path, arguments.ms * 10**6)
        if arguments.file is None:
            write_file(path, arguments.mib * MIB)
        print("what, pattern, size, depth; raw and ours: MB/s, reads, CPU a read; ratio")
        below = []
        for contest in bench.path_contests() if "paths" in parts else ():
            ratio = hold(contest, arguments.pairs)
            below += [ratio] if ratio < BAR else []
        for backend in (Backend.URING, Backend.POOL):
            if backend.name.lower() in parts:
                for contest in bench.engine_contests(backend):
                    hold(contest, arguments.pairs)
    if "paths" in parts:
        print(f"layers and neurons: bar {BAR:.2f} of the bare loop, {len(below)} rows below it")


if __name__ == "__main__":
    main()
