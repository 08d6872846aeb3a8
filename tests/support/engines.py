"""Engines on a real cluster for tests: a tiny model that takes long enough to be disturbed."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path
from typing import Any

from polyneuron import Engine, EngineConfig, SamplingParams
from tests.support.tiny_gguf import TinyModel, write_tiny_gguf

MODEL = TinyModel(
    num_layers=6, d_model=128, num_heads=6, num_kv_heads=2, head_dim=32, d_ff=256,
    context_length=4096, tensor_type="Q4_1", embedding_type="Q8_0",
)  # fmt: skip
CONFIG = EngineConfig(num_ctx=2048, num_workers=2, num_npu_threads=2, deterministic=True)
NPU_EXECUTOR = CONFIG.num_workers
"""Place of the NPU executor's first thread, after those of the CPU workers."""
GREEDY = SamplingParams(temperature=0.0)
PROMPT = [3 + i * 7 % 290 for i in range(40)]
LONG_PROMPT = [3 + i * 7 % 290 for i in range(1500)]


def write_model(folder: Path) -> Path:
    """The model's file in `folder`."""
    return write_tiny_gguf(folder / "tiny.gguf", MODEL)


def open_engine(path: Path, **settings: Any) -> Engine:
    """An open engine; `settings` are fields of EngineConfig beside those of CONFIG."""
    return Engine(str(path), CONFIG, **settings)


def held_bytes(engine: Engine, region: str) -> int:
    """Bytes of a region of the arena that the system holds pages for, whoever touched them."""
    span, page = engine.layout.spans[region], mmap.PAGESIZE
    address = engine.actors.arena.address + span.offset
    count = span.num_bytes // page
    held = (ctypes.c_ubyte * count)()
    status = ctypes.CDLL(None).mincore(
        ctypes.c_void_p(address), ctypes.c_size_t(count * page), held
    )
    assert status == 0
    return page * sum(entry & 1 for entry in held)
