"""The peer's process: llama.cpp behind lines of JSON, timed without sampling.

The first line opens a model, every other one computes tokens from an empty context. Run as a module
with pipes on both sides; ends when its standard input does.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Iterable
from typing import Any, TextIO

import llama_cpp as api

BATCH_TOKENS = 512


class Peer:
    """A model open in llama.cpp; all settings not named here are its own defaults."""

    def __init__(
        self,
        path: str,
        num_threads: int,
        num_threads_batch: int,
        cores: list[int],
        num_ctx: int,
        repack: bool,
    ) -> None:
        if cores:  # before its threads are made
            os.sched_setaffinity(0, cores)
        model_params = api.llama_model_default_params()
        model_params.n_gpu_layers = 0
        model_params.use_extra_bufts = repack
        self._model = api.llama_model_load_from_file(path.encode(), model_params)
        if not self._model:
            raise RuntimeError(f"cannot open {path}")
        params = api.llama_context_default_params()
        params.n_ctx = num_ctx
        params.n_batch = BATCH_TOKENS
        params.n_ubatch = BATCH_TOKENS
        params.n_threads = num_threads
        params.n_threads_batch = num_threads_batch
        self._context = api.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError(f"no context of {num_ctx} positions")

    def step_ns(self, tokens: list[int], at_once: bool) -> list[int]:
        """Compute all tokens; the time of each decode call, logits of its last token included."""
        api.llama_memory_clear(api.llama_get_memory(self._context), False)
        stride = BATCH_TOKENS if at_once else 1
        return [self._decode(tokens[i : i + stride]) for i in range(0, len(tokens), stride)]

    def _decode(self, tokens: list[int]) -> int:
        array = (ctypes.c_int32 * len(tokens))(*tokens)
        start_ns = time.monotonic_ns()
        status = api.llama_decode(self._context, api.llama_batch_get_one(array, len(tokens)))
        api.llama_synchronize(self._context)
        if status != 0:
            raise RuntimeError(f"llama_decode gave {status}")
        return time.monotonic_ns() - start_ns


def serve(requests: Iterable[str], answers: TextIO) -> None:
    """Answer every line with a line."""
    peer: Peer | None = None
    for line in requests:
        request: dict[str, Any] = json.loads(line)
        try:
            if peer is None:
                peer = Peer(**request)
                answer: dict[str, Any] = {}
            else:
                answer = {"step_ns": peer.step_ns(**request)}
        except RuntimeError as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), file=answers, flush=True)


def _ignore(level: int, text: bytes, user_data: object) -> None:
    """The log is not for the one who reads our stderr."""


_IGNORE_LOG = api.llama_log_callback(_ignore)  # C keeps a pointer to it


def main() -> None:
    """Serve standard input, with llama.cpp's own prints kept off standard output."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started us ends us
    with os.fdopen(os.dup(sys.stdout.fileno()), "w") as answers:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        api.llama_log_set(_IGNORE_LOG, None)
        api.llama_backend_init()
        serve(sys.stdin, answers)


if __name__ == "__main__":
    main()
