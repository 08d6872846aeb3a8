"""Our engine as a contestant."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from polyneuron.actors.process_stats import cpu_ticks
from polyneuron.completion import RequestIo
from polyneuron.config import Phase
from polyneuron.measure.memory_cgroup import MemoryCgroup
from polyneuron.measure.speed import Sample, SampleIo
from polyneuron.model.sampling import SamplingParams

if TYPE_CHECKING:
    from polyneuron.engine import Engine

GREEDY = SamplingParams(temperature=0.0)


class OwnEngine:
    """An open engine; times are the coordinator's, sampling and hand-off included."""

    name = "polyneuron"

    def __init__(self, engine: Engine, cgroup: MemoryCgroup | None = None) -> None:
        self._engine, self._cgroup = engine, cgroup

    def run(self, phase: Phase, tokens: Sequence[int]) -> Sample:
        """Prefill the tokens, or generate as many after the first of them."""
        is_prefill = phase is Phase.PREFILL
        prompt, max_tokens = (tokens, 0) if is_prefill else (tokens[:1], len(tokens))
        done = self._engine.generate(
            prompt, max_tokens=max_tokens, sampling=GREEDY, ignore_eos=True
        )
        times = done.timings
        total_ns = round((times.prompt_ms + times.predicted_ms) * 1e6)
        io = self._io(done.io, phase, len(tokens), total_ns)
        return Sample(total_ns, None if is_prefill else times.token_ms, io)

    def _io(self, io: RequestIo, phase: Phase, num_tokens: int, total_ns: int) -> SampleIo:
        """Of all steps of a repetition, the one that took the first token included."""
        if not self._engine.layout.is_streaming:
            return SampleIo()
        config, both = self._engine.config, io.prefill.plus(io.decode)
        dense_units = config.num_npu_threads or config.num_workers
        executors = dense_units if phase is Phase.PREFILL else config.num_workers
        return SampleIo(
            both.bytes_read / num_tokens,
            both.hit_rate,
            both.stall_ns / (executors * total_ns),
            io.miss_rate_p99,
        )

    def overhead_ms(self, tokens: Sequence[int]) -> float | None:
        """What a decode step costs outside kernels: its mean time when steps skip them.

        None with less than two tokens.
        """
        # Imported late: by now the engine has prepared what Ray reads on import.
        from polyneuron.actors import launch

        launch.ask_coordinator(self._engine.actors, "set_dry", True)
        try:
            times = self.run(Phase.DECODE, tokens).token_ms
        finally:
            launch.ask_coordinator(self._engine.actors, "set_dry", False)
        return times["mean"] if times else None

    def peak_bytes(self) -> int:
        """The most its cgroup held, page cache included; without one what its processes have."""
        if self._cgroup is not None:
            return self._cgroup.peak_bytes()
        return self._engine.memory().total_bytes

    def cpu_ticks(self) -> int:
        """Processor time of all processes, Ray's included."""
        pids = [os.getpid(), *(process.pid for process in self._engine.cluster.processes())]
        return sum(map(cpu_ticks, pids))
