"""Brings everything that stays in memory to its place, whatever the file's kind and layout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from polyneuron.io.bundle_reader import BundleRead, read_bundles
from polyneuron.io.file_device import open_device
from polyneuron.io.section_reader import SectionRead, read_sections
from polyneuron.io.weight_reader import ReadReport, WeightRead, read_parted, read_weights
from polyneuron.kernels.arena import Arena

Reads = list[WeightRead | SectionRead | BundleRead]


def read_all(path: Path, reads: Reads, arena: Arena, progress: Callable[[int], None]) -> ReadReport:
    """Perform all reads; `progress` gets the bytes so far.

    Raises DeviceError, ChecksumError or FormatError naming file and place.
    """
    reports: list[ReadReport] = []

    def count(num_bytes: int) -> None:
        progress(sum(report.num_bytes for report in reports) + num_bytes)

    weights = [read for read in reads if isinstance(read, WeightRead)]
    if weights and weights[0].files is not None:
        return read_parted(path, weights, arena, count)
    with open_device(path) as device:
        if weights:
            reports.append(read_weights(device, weights, arena, count))
        if sections := [read for read in reads if isinstance(read, SectionRead) and not read.path]:
            reports.append(read_sections(device, sections, arena, count))
        if bundles := [read for read in reads if isinstance(read, BundleRead)]:
            reports.append(read_bundles(device, bundles, arena, count))
    for read in reads:
        if isinstance(read, SectionRead) and read.path:
            with open_device(read.path) as device:
                reports.append(read_sections(device, [read], arena, count))
    lossy = {name: error for report in reports for name, error in report.lossy.items()}
    is_direct = all(report.is_direct for report in reports)
    return ReadReport(sum(report.num_bytes for report in reports), is_direct, lossy)
