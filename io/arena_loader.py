"""Brings everything that stays in memory to its place, whatever the file's kind and layout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from polyneuron.io.bundle_reader import BundleRead, read_bundles
from polyneuron.io.section_reader import SectionRead, read_sections
from polyneuron.io.weight_reader import ReadReport, WeightRead, read_weights
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
    if weights:
        reports.append(read_weights(path, weights, arena, count))
    sections = [read for read in reads if isinstance(read, SectionRead)]
    if sections:
        reports.append(read_sections(path, sections, arena, count))
    bundles = [read for read in reads if isinstance(read, BundleRead)]
    if bundles:
        reports.append(read_bundles(path, bundles, arena, count))
    lossy = {name: error for report in reports for name, error in report.lossy.items()}
    is_direct = all(report.is_direct for report in reports)
    return ReadReport(sum(report.num_bytes for report in reports), is_direct, lossy)
