"""Why a back end gave up, in the arena: written once by its executor, read by who looks after it.

A length, then so many bytes of text: no actor call is needed, and the text outlives its writer.
"""

from __future__ import annotations

from polyneuron.kernels.arena import Arena

NOTICE_BYTES = 512
HEAD_BYTES = 4


def write_notice(arena: Arena, executor: int, text: str) -> None:
    """Say why; what an earlier process said stays."""
    offset = int(arena.executor(executor).notice)
    if not offset or read_notice(arena, offset):
        return
    encoded = text.encode("utf-8", "replace")[: NOTICE_BYTES - HEAD_BYTES]
    arena.bytes_at(offset + HEAD_BYTES, len(encoded))[:] = encoded
    arena.store_word(offset, len(encoded))


def read_notice(arena: Arena, offset: int) -> str:
    """What was said; empty: nothing."""
    length = int(arena.view(offset, (1,), "u4")[0])
    return bytes(arena.bytes_at(offset + HEAD_BYTES, length)).decode("utf-8", "replace")
