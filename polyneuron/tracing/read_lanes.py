"""Lanes for reads: those in flight together lie in different ones."""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray

from polyneuron.tracing.record_table import RecordTable


def read_lanes(reads: RecordTable) -> NDArray[np.int64]:
    """The lowest lane that was free when each read was submitted, (reads,)."""
    lanes = np.zeros(len(reads), dtype=np.int64)
    free: list[int] = []
    in_flight: list[tuple[int, int]] = []
    num_lanes = 0
    starts = reads.column("t_ns").tolist()
    for index, (start, ns) in enumerate(zip(starts, reads.column("ns").tolist(), strict=True)):
        while in_flight and in_flight[0][0] <= start:
            heapq.heappush(free, heapq.heappop(in_flight)[1])
        if free:
            lane = heapq.heappop(free)
        else:
            lane, num_lanes = num_lanes, num_lanes + 1
        lanes[index] = lane
        heapq.heappush(in_flight, (start + ns, lane))
    return lanes


def reads_in_flight(reads: RecordTable) -> list[tuple[int, int]]:
    """(time in ns, reads in flight from then on), wherever that number changed."""
    starts, ns = reads.column("t_ns"), reads.column("ns")
    times = np.concatenate([starts, starts + ns])
    change = np.concatenate([np.ones_like(starts), -np.ones_like(starts)])
    order = np.argsort(times, kind="stable")
    times, depth = times[order], np.cumsum(change[order])
    is_last = np.diff(times, append=times[-1:] + 1) > 0
    return list(zip(times[is_last].tolist(), depth[is_last].tolist(), strict=True))
