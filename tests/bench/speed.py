"""What one run of a loop of reads came to."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Speed:
    """One run of one side."""

    bytes_per_s: float
    reads_per_s: float
    cpu_us_per_read: float


def median(speeds: Sequence[Speed]) -> Speed:
    """Each figure's own median."""
    return Speed(
        *(
            statistics.median(getattr(speed, name) for speed in speeds)
            for name in ("bytes_per_s", "reads_per_s", "cpu_us_per_read")
        )
    )
