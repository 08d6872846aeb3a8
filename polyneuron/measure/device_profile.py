"""Measures a machine for the planner, in about half a minute (DESIGN §10, PAPER §1.10)."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from polyneuron.config import usable_cores
from polyneuron.cores import Cores, read_cores, show_cores
from polyneuron.errors import ConfigError
from polyneuron.io.device_probe import Pattern, ProbeCase, ProbeRow, probe_device
from polyneuron.kernels import isa
from polyneuron.kernels.arena import MAX_EXECUTORS
from polyneuron.kernels.quant import StorageType, row_bytes
from polyneuron.measure.disk_probe import MAX_SHARE, MIN_SCRATCH_BYTES, scratch_file
from polyneuron.measure.host import Host
from polyneuron.measure.kernel_speed import MIB, Reader, Run, arena_like_memory, bytes_per_s
from polyneuron.measure.step_speed import Confine, cache_speed, step_speeds
from polyneuron.planning.device import (
    DeviceKey,
    DeviceProfile,
    Kernel,
    KernelSpeed,
    ReadSpeed,
)
from polyneuron.sizes import show_size

KIB = 1 << 10
Progress = Callable[[str], None]

READ_SIZES = (4 * KIB, 8 * KIB, 16 * KIB, 64 * KIB, MIB)
DEPTHS = (1, 8, 32, 64)
RANGES = (128 * MIB, 512 * MIB)
LAYER_DEPTHS = (1, 8, 32)
PASSES = 2
"""Over all cases; the better one counts: others on the machine, and on a shared disk, only take."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How long and how thoroughly to measure."""

    disk_ns: int = 10_000_000_000
    """For all reads together."""
    write_ns: int = 4_000_000_000
    scratch_bytes: int = 1 << 30
    memory_bytes: int = 512 * MIB
    """Weights that kernels read from."""
    kernel_s: float = 0.04
    """Of each round of each row."""
    rounds: int = 3
    step_ns: int = 400_000_000
    """For each number of executors."""
    types: tuple[StorageType, ...] = (StorageType.Q4, StorageType.Q8)
    tile_types: tuple[StorageType, ...] = (StorageType.Q1,)
    """Types that lie as tiles only."""
    widths: tuple[int, ...] = (576, 4096)
    rows_a_call: int = 256
    batches: tuple[int, ...] = (2, 4, 8)


def profile_device(
    folder: Path,
    progress: Progress = lambda text: None,
    effort: Effort | None = None,
    host: Host | None = None,
) -> DeviceProfile:
    """Measure this machine, and the disk that `folder` lies on (or the file it is).

    Raises ConfigError when the folder cannot be written or has no room, DeviceError when reads
    fail. Nothing is left behind.
    """
    effort, host = effort or Effort(), host or Host()
    cores = read_cores(host.root, usable_cores())
    kinds = cores.kinds
    with _probed_file(folder, effort, host, progress) as (path, num_bytes):
        reads = tuple(_read_rows(path, num_bytes, kinds, effort, progress))
    counts = thread_counts(cores, MAX_EXECUTORS)
    with _strongest_cores(cores) as confine:
        kernels = tuple(_kernel_rows(counts, effort, progress, confine))
        progress("step board and neuron cache")
        steps = tuple(step_speeds(counts, effort.step_ns, confine))
    return DeviceProfile(
        device_key(folder, host), num_bytes, kinds, reads, kernels, steps, cache_speed()
    )


def device_key(folder: Path, host: Host | None = None) -> DeviceKey:
    """What a profile of this machine and that folder's disk holds for."""
    from importlib.metadata import version

    host = host or Host()
    name = host.field("proc/cpuinfo", "model name") or host.text("proc/device-tree/model")
    system = host.text("proc/sys/kernel/osrelease")
    disk = os.stat(folder).st_dev
    cores = read_cores(host.root, usable_cores())
    name = name or host.machine
    if len(cores.kinds) > 1:  # as many cores of other kinds are another machine
        name += f" ({' | '.join(map(show_cores, cores.kinds))})"
    return DeviceKey(
        name, len(cores.ids), isa.active(), version("polyneuron"), system,
        f"{os.major(disk)}:{os.minor(disk)}",
    )  # fmt: skip


def core_kinds(host: Host, cores: Iterable[int]) -> tuple[tuple[int, ...], ...]:
    """Cores that are alike by capacity or highest frequency, the strongest kind first."""
    return read_cores(host.root, cores).kinds


def thread_counts(cores: Cores, limit: int) -> list[int]:
    """1, 2, 4 and so on, where another kind of core joins in, and the most; up to `limit`."""
    most = min(len(cores.ids), limit)
    joins = {count for count in cores.worker_counts() if count <= most}
    return sorted({1 << power for power in range(most.bit_length())} | joins | {most})


@contextmanager
def _strongest_cores(cores: Cores) -> Iterator[Confine]:
    """What confines this thread, and those it makes, to the so many strongest cores.

    Where all are alike it does nothing: any cores are the strongest.
    """
    if len(cores.usual) == len(cores.ids):
        yield lambda count: None
        return
    with _on_cores(cores.ids):
        yield lambda count: os.sched_setaffinity(0, cores.order[:count])


@contextmanager
def _probed_file(
    path: Path, effort: Effort, host: Host, progress: Progress
) -> Iterator[tuple[Path, int]]:
    """The file itself, or a nameless one in the folder."""
    if path.is_file():
        yield path, path.stat().st_size
        return
    free = host.space(path).free
    size = min(effort.scratch_bytes, free // MAX_SHARE)
    if size < min(MIN_SCRATCH_BYTES, effort.scratch_bytes):
        raise ConfigError(f"{path}: {show_size(free)} free are too little to measure; free some")
    progress(f"writing up to {show_size(size)} into {path}")
    try:
        with scratch_file(path, size, effort.write_ns) as found:
            yield found
    except PermissionError as error:
        raise ConfigError(f"{path}: {error.strerror}; name another folder or a file") from None


# ---- storage


def read_cases(num_bytes: int) -> list[ProbeCase]:
    """Random reads by size, depth and range, then large ones in order."""
    sizes = [size for size in READ_SIZES if size <= num_bytes] or [4 * KIB]
    ranges = [span for span in RANGES if span < num_bytes] + [0]
    cases = [
        ProbeCase(Pattern.RANDOM, size, depth, span)
        for span, size, depth in itertools.product(ranges, sizes, DEPTHS)
    ]
    largest = sizes[-1]
    return cases + [ProbeCase(Pattern.SEQUENTIAL, largest, depth) for depth in LAYER_DEPTHS]


def _read_rows(
    path: Path,
    num_bytes: int,
    kinds: tuple[tuple[int, ...], ...],
    effort: Effort,
    progress: Progress,
) -> Iterator[ReadSpeed]:
    cases = read_cases(num_bytes)
    case_ns = effort.disk_ns // (len(cases) * len(kinds) * PASSES)
    for kind in kinds:
        progress(f"reading {show_size(num_bytes)} in {len(cases)} ways from core {kind[0]}")
        with _on_cores(kind[:1]):
            passes = [
                probe_device(path, random.Random(seed), cases=cases, max_ns=case_ns).rows
                for seed in range(PASSES)
            ]
        for rows in zip(*passes, strict=True):
            yield _read_speed(max(rows, key=lambda row: row.reads_per_s), kind[0])


def _read_speed(row: ProbeRow, core: int) -> ReadSpeed:
    case = row.case
    return ReadSpeed(
        case.pattern is Pattern.RANDOM, case.read_bytes, case.depth, case.range_bytes, core,
        row.reads_per_s, row.latency_p50_ns, row.cpu_ns_per_read,
    )  # fmt: skip


@contextmanager
def _on_cores(cores: Sequence[int]) -> Iterator[None]:
    """This thread on these cores, as an actor may be."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


# ---- kernels


def _kernel_rows(
    counts: list[int], effort: Effort, progress: Progress, confine: Confine
) -> Iterator[KernelSpeed]:
    progress(f"kernels over {show_size(effort.memory_bytes)}, up to {counts[-1]} threads")
    memory = arena_like_memory(effort.memory_bytes)
    for threads in counts:
        confine(threads)
        share = memory.size // threads // 4096 * 4096
        parts = [memory[i * share : (i + 1) * share] for i in range(threads)]
        for storage, cols in itertools.product(effort.types, effort.widths):
            stride = -(-2 * row_bytes(storage, cols) // 512) * 512  # up and down of a neuron
            readers = [Reader(storage, cols, effort.rows_a_call, part, (stride,)) for part in parts]
            runs = [dict(reader.runs()) for reader in readers]
            names = {Kernel.TILES: "tiles", Kernel.DOT: f"dot {stride}"}
            names |= {Kernel.AXPY: f"axpy {stride}"}
            timed = {(kernel, 1): [run[name] for run in runs] for kernel, name in names.items()}
            if threads == counts[-1]:
                timed |= {
                    (Kernel.TILES, tokens): [reader.tiles(tokens) for reader in readers]
                    for tokens in effort.batches
                }
            for (kernel, tokens), calls in timed.items():
                speed = _best(calls, effort)
                yield KernelSpeed(kernel, storage.name.lower(), cols, tokens, threads, speed)
        for storage, cols in itertools.product(effort.tile_types, effort.widths):
            tiles = [Reader(storage, cols, 1, part, ()).tiles(1) for part in parts]
            speed = _best(tiles, effort)
            yield KernelSpeed(Kernel.TILES, storage.name.lower(), cols, 1, threads, speed)
        others = [Reader(StorageType.Q8, 64, 1, part, ()) for part in parts]
        speed = _best([reader.read for reader in others], effort)
        yield KernelSpeed(Kernel.MEMORY, "q8", 64, 1, threads, speed)
        speed = _best([reader.attention(128, 4, 256) for reader in others], effort)
        yield KernelSpeed(Kernel.ATTENTION, "f16", 128, 1, threads, speed)


def _best(calls: list[Run], effort: Effort) -> float:
    rounds = range(effort.rounds)
    return max(bytes_per_s(calls, effort.kernel_s) for _ in rounds)
