"""What a detailed step did, cluster by cluster, as the rest of timeline lines.

They are nearly all lines of a simulated timeline: written out here, each costs a quarter of what it
costs as keys that an encoder looks at one by one. `tests/scenarios/test_step_detail.py` holds that
both are the same bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from polyneuron.kernels.simulation import Stage

PRED, GIO, GC, UDIO, UDC = (
    int(stage) for stage in (Stage.PRED, Stage.GIO, Stage.GC, Stage.UDIO, Stage.UDC)
)
ATTENTION, HOT = int(Stage.ATTENTION), int(Stage.HOT)
COMPUTE_STAGES = {PRED: "pred", GC: "gc", UDC: "udc"}

Told = tuple[int, str]
"""An event's time and, in JSON, its keys behind time and number."""


@dataclass(slots=True)
class StepDetail:
    """Writes the records of detailed steps; reads are numbered through the run."""

    num_cores: int
    num_reads: int = 0

    def events(self, records: NDArray[np.void], t_ns: int, step: int) -> list[Told]:
        """Attention, hot neurons and the NPU as ops, clusters stage by stage, reads one event a
        cluster, of a step whose layers begin at t_ns."""
        told: list[Told] = []
        for at, ns, layer, cluster, stage, core, neurons, misses, size, _ in records.tolist():
            begin = t_ns + at
            if stage in COMPUTE_STAGES:
                told.append((begin, (
                    f'"actor":"worker.{core}","event":"cluster","ns":{ns},"step":{step},'
                    f'"layer":{layer},"cluster":{cluster},"stage":"{COMPUTE_STAGES[stage]}",'
                    f'"neurons":{neurons},"misses":{misses}'
                )))  # fmt: skip
            elif stage in (GIO, UDIO):
                told.append((begin, self._read(ns, step, layer, size)))
            elif stage in (ATTENTION, HOT):
                kind = "attention" if stage == ATTENTION else "feed_forward"
                for worker in range(self.num_cores):
                    told.append((begin, _op(f"worker.{worker}", ns, step, kind, layer)))
            else:
                told.append((begin, _op("npu.0", ns, step, "feed_forward", layer)))
        return told

    def _read(self, ns: int, step: int, layer: int, size: int) -> str:
        number, self.num_reads = self.num_reads, self.num_reads + 1
        return (
            f'"actor":"io","event":"read","ns":{ns},"read":{number},"layer":{layer},"neuron":-1,'
            f'"bytes":{size},"status":0,"step":{step}'
        )


def _op(actor: str, ns: int, step: int, kind: str, layer: int) -> str:
    op = 2 * layer + (kind != "attention")
    return (
        f'"actor":"{actor}","event":"op","ns":{ns},"wait_ns":0,"step":{step},"op":{op},'
        f'"kind":"{kind}","layer":{layer},"units":1'
    )
