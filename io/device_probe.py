"""What a device gives: sequential and random reads at several sizes and depths."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import numpy as np

from polyneuron.errors import ConfigError
from polyneuron.io.block_device import HUGE_PAGE_BYTES, DeviceInfo, aligned_bytes, device_error
from polyneuron.io.file_device import DeviceOptions, FileDevice
from polyneuron.kernels._kernels import ffi, lib

KIB = 1024
MAX_NS = 300_000_000
"""Time for one row, unless the reads end before."""
MAX_READS = 1 << 16


class Pattern(Enum):
    """Where the reads go."""

    SEQUENTIAL = "sequential"
    RANDOM = "random"


@dataclass(frozen=True, slots=True)
class ProbeCase:
    """One row to be measured."""

    pattern: Pattern
    read_bytes: int
    depth: int
    range_bytes: int = 0
    """How much of the file, from its start; 0: all of it."""


CASES = tuple(
    ProbeCase(pattern, read_bytes, depth)
    for pattern, read_bytes in [
        (Pattern.SEQUENTIAL, 1024 * KIB),
        (Pattern.RANDOM, 4 * KIB),
        (Pattern.RANDOM, 8 * KIB),
        (Pattern.RANDOM, 64 * KIB),
    ]
    for depth in (1, 8, 32)
)


LAYER_READS = ProbeCase(Pattern.SEQUENTIAL, 1024 * KIB, 8)
"""As layers are read."""


def neuron_reads(path: Path, read_bytes: int) -> ProbeCase:
    """As single neurons of `read_bytes` are read from a file, in whole sectors of its device."""
    options = DeviceOptions()
    with closing(FileDevice(path, options)) as device:
        sector = device.info().offset_alignment
    return ProbeCase(Pattern.RANDOM, -(-read_bytes // sector) * sector, options.queue_depth)


@dataclass(frozen=True, slots=True)
class ProbeRow:
    """What one case gave."""

    case: ProbeCase
    num_reads: int
    bytes_per_s: float
    reads_per_s: float
    latency_p50_ns: int
    latency_p99_ns: int
    cpu_ns_per_read: float
    """Of the calling thread, in user and kernel mode: without a pool's threads and interrupts."""


@dataclass(frozen=True, slots=True)
class DeviceProbe:
    """A probed device and its rows, in the order of the cases."""

    info: DeviceInfo
    rows: tuple[ProbeRow, ...]


def probe_device(
    path: Path,
    choices: random.Random,
    *,
    cases: Sequence[ProbeCase] = CASES,
    max_ns: int = MAX_NS,
    options: DeviceOptions | None = None,
) -> DeviceProbe:
    """Measure reads of a file, all over it, for at most `max_ns` a case.

    The file is to be larger than what the disk itself caches. Reads nothing into the page cache.
    """
    with closing(FileDevice(path, options)) as device:
        rows = tuple(_measure(device, case, choices, max_ns) for case in cases)
        return DeviceProbe(device.info(), rows)


def _measure(device: FileDevice, case: ProbeCase, choices: random.Random, max_ns: int) -> ProbeRow:
    info = device.info()
    offsets = np.array(_offsets(info, case, choices), np.uint64)
    latencies = np.zeros(len(offsets), np.uint64)
    # At least a huge page, so that every case reads into the same kind of memory.
    memory = aligned_bytes(max(case.read_bytes * case.depth, HUGE_PAGE_BYTES), 4096)
    memory[:] = 1  # every page there before time is taken
    result = ffi.new("struct io_probe_result *")
    status = lib.io_probe(
        device.engine,
        ffi.cast("uint64_t *", offsets.ctypes.data),
        len(offsets),
        case.read_bytes,
        case.depth,
        ffi.cast("void *", memory.ctypes.data),
        max_ns,
        ffi.cast("uint64_t *", latencies.ctypes.data),
        result,
    )
    if status != 0:
        raise device_error(f"{info.path}: probing failed; check the disk", status)
    found = result[0]
    return ProbeRow(
        case=case,
        num_reads=found.num_reads,
        bytes_per_s=found.num_bytes * 1e9 / found.elapsed_ns,
        reads_per_s=found.num_reads * 1e9 / found.elapsed_ns,
        latency_p50_ns=int(np.percentile(latencies[: found.num_reads], 50)),
        latency_p99_ns=int(np.percentile(latencies[: found.num_reads], 99)),
        cpu_ns_per_read=found.cpu_ns / found.num_reads,
    )


def _offsets(info: DeviceInfo, case: ProbeCase, choices: random.Random) -> list[int]:
    """Whole reads within the file; a sequence begins anywhere and goes round."""
    places = min(info.file_bytes, case.range_bytes or info.file_bytes) // case.read_bytes
    if places == 0:
        raise ConfigError(
            f"{info.path}: has {info.file_bytes} bytes, a probe needs {case.read_bytes} or more"
        )
    if case.pattern is Pattern.RANDOM:
        return [choices.randrange(places) * case.read_bytes for _ in range(MAX_READS)]
    first = choices.randrange(places)
    return [(first + index) % places * case.read_bytes for index in range(MAX_READS)]
