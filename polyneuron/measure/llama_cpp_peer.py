"""llama.cpp as a contestant, in a process of its own: memory and threads are apart from ours.

In a memory cgroup it maps the file and does not repack its weights: repacked ones could not be
given back to the file, and the kernel would end it.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from polyneuron.actors.process_stats import cpu_ticks, pss_bytes, read_bytes
from polyneuron.completion import token_statistics
from polyneuron.config import Phase
from polyneuron.errors import ConfigError, EngineError
from polyneuron.measure.memory_cgroup import MemoryCgroup
from polyneuron.measure.speed import Sample, SampleIo
from polyneuron.sizes import show_size

MODULE = "llama_cpp"
SERVER = "polyneuron.measure.llama_cpp_server"
CLOSE_TIMEOUT_S = 10.0


class LlamaCpp:
    """The peer's process, which opens the model on `open` and answers one request at a time."""

    name = "llama.cpp"

    def __init__(self, cgroup: MemoryCgroup | None = None) -> None:
        self._cgroup = cgroup
        if importlib.util.find_spec(MODULE) is None:
            raise ConfigError(
                "--peer llama.cpp: llama-cpp-python is not installed; run: "
                "pip install 'polyneuron[peer]' (it compiles llama.cpp: minutes)"
            )
        words = [sys.executable, "-P", "-m", SERVER]
        self._process = subprocess.Popen(
            cgroup.inside(words) if cgroup else words,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def _ask(self, **request: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):  # a process that has ended gives no answer, told below
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            raise EngineError(f"--peer llama.cpp: its process ended {self._cause(code)}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise EngineError(f"--peer llama.cpp: {answer['error']}")
        return answer

    def _cause(self, code: int) -> str:
        if self._cgroup is not None and self._cgroup.oom_kills():
            return f"for want of memory: {show_size(self._cgroup.limit_bytes)} are too little"
        return f"with code {code}"

    def open(
        self,
        path: Path,
        num_threads: int,
        num_ctx: int,
        *,
        num_threads_batch: int = 0,
        cores: Sequence[int] = (),
    ) -> None:
        """Have it read the model, with its own defaults, on `cores` if some are named.

        `num_threads_batch`: for prompts; 0: as many as for single tokens.
        """
        self._ask(
            path=str(path.resolve()), num_threads=num_threads,
            num_threads_batch=num_threads_batch or num_threads, cores=list(cores),
            num_ctx=num_ctx, repack=self._cgroup is None,
        )  # fmt: skip

    def run(self, phase: Phase, tokens: Sequence[int]) -> Sample:
        """Compute the tokens, all at once or one after another; nothing is sampled."""
        at_once = phase is Phase.PREFILL
        before = self._read_bytes()
        step_ns = self._ask(tokens=list(tokens), at_once=at_once)["step_ns"]
        token_ms, after = None if at_once else token_statistics(step_ns[1:]), self._read_bytes()
        if before is None or after is None:
            return Sample(sum(step_ns), token_ms)
        io = SampleIo(bytes_per_token=(after - before) / len(tokens))
        return Sample(sum(step_ns), token_ms, io)

    def _read_bytes(self) -> int | None:
        """What it had read from the disk, page faults included; None where memory has no limit."""
        return None if self._cgroup is None else read_bytes(self._process.pid)

    def peak_bytes(self) -> int:
        """The most its cgroup held, page cache included; without one what its process has now."""
        if self._cgroup is not None:
            return self._cgroup.peak_bytes()
        return pss_bytes(self._process.pid)

    def cpu_ticks(self) -> int:
        """Processor time of its process."""
        return cpu_ticks(self._process.pid)

    @property
    def exit_code(self) -> int | None:
        """How its process ended; None while it runs."""
        return self._process.poll()

    def close(self) -> None:
        """End the process: it leaves when its standard input ends."""
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with suppress(BrokenPipeError):
                    stream.close()
        try:
            self._process.wait(CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
