"""`polyneuron perplexity`: how well a model predicts a text, counted as llama-perplexity does."""

from __future__ import annotations

import json
import math
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from polyneuron.cli import options
from polyneuron.cli.core_options import core_settings
from polyneuron.cli.options import ENGINE, option
from polyneuron.cli.progress import LoadProgress
from polyneuron.cli.run import kv_part
from polyneuron.config import FeedForwardMode, KvType
from polyneuron.errors import ConfigError
from polyneuron.io_report import kv_rms_error
from polyneuron.measure.perplexity import Perplexity, chunks_of, measure

if TYPE_CHECKING:
    from polyneuron.engine import Engine

LOGIT_ROWS = 64  # scored at once: few enough for a 262k vocabulary, enough to share the head's read


def perplexity(
    model: options.Model,
    file: Annotated[str, option("--file", "-f", text="the text; -: stdin")],
    ctx_size: Annotated[
        int, option("--ctx-size", "-c", panel=ENGINE, text="positions of one chunk")
    ] = 512,
    chunks: Annotated[int, option("--chunks", text="score the first ones only; -1: all")] = -1,
    threads: options.Threads = 0,
    threads_batch: options.ThreadsBatch = -1,
    npu: options.Npu = "native",
    cpu_mask: options.CpuMask = "",
    cpu_range: options.CpuRange = "",
    memory: options.Memory = "0",
    ffn_resident: options.FfnResident = -1.0,
    mode: options.Mode = FeedForwardMode.AUTO,
    kv_type: options.KvTypeOption = KvType.F16,
    as_json: options.Json = False,
) -> None:
    """Perplexity of a text: the second half of every chunk of one context is scored."""
    if chunks == 0 or chunks < -1:
        raise ConfigError(f"--chunks {chunks}: give 1 or more, or -1 for all")
    text = read_text(file)
    from polyneuron.config import EngineConfig
    from polyneuron.engine import Engine

    # In predicted mode as in a run: the first half of a chunk is a prompt, which is not predicted;
    # the half that is scored is computed token by token, as generated tokens are.
    logit_rows = 1 if mode is FeedForwardMode.PREDICTED else LOGIT_ROWS
    config = EngineConfig(
        num_ctx=ctx_size, max_sequences=1, max_logit_rows=logit_rows,
        npu=npu, kv_type=kv_type,
        **core_settings(model, threads, threads_batch, cpu_mask, cpu_range),
        **options.budget(memory, ffn_resident, mode, model),
    )  # fmt: skip
    with (
        LoadProgress("reading weights") as progress,
        LoadProgress("converting") as converting,
        Engine(model, config, on_load=progress, on_convert=converting) as engine,
    ):
        for bar in (progress, converting):
            bar.stop()
        result = score_text(engine, text, chunks)
        kv_error = kv_rms_error(engine.actors.arena, engine.layout)
        if kv_type is not KvType.F16:
            print(kv_part(engine), file=sys.stderr, flush=True)
    if as_json:
        print(json.dumps(as_object(result) | {"kv_rms_error": kv_error}))
    else:
        error = "unknown" if result.stderr is None else f"{result.stderr:.5f}"
        print(f"Final estimate: PPL = {result.ppl:.4f} +/- {error}")


def read_text(file: str, flag: str = "-f") -> str:
    """The text of a file or of stdin; `flag` is what named it."""
    if file == "-":
        return sys.stdin.buffer.read().decode("utf-8", "replace")
    path = Path(file)
    try:
        return path.read_bytes().decode("utf-8", "replace")
    except OSError as error:
        raise ConfigError(f"{flag} {path}: {error.strerror}") from None


def score_text(engine: Engine, text: str, max_chunks: int) -> Perplexity:
    """Score the text chunk by chunk; says the running figure on stderr."""
    tokenizer, num_ctx = engine.tokenizer, engine.config.num_ctx
    tokens = tokenizer.encode(text, parse_special=False)
    chunks = chunks_of(tokens, num_ctx, tokenizer.bos_id if tokenizer.add_bos else None)
    chunks = chunks[:max_chunks] if max_chunks > 0 else chunks
    print(engine.mode().line(), file=sys.stderr)
    say = f"perplexity over {len(chunks)} chunks of {num_ctx} tokens"
    print(say, file=sys.stderr, flush=True)
    started = time.monotonic()
    result = Perplexity()
    for result in measure(engine.score, chunks):
        rate = result.num_chunks * num_ctx / (time.monotonic() - started)
        say = f"[{result.num_chunks}/{len(chunks)}] {result.ppl:.4f}, {rate:.0f} tok/s"
        print(say, file=sys.stderr, flush=True)
    return result


def as_object(result: Perplexity) -> dict[str, float | int | None]:
    """The `perplexity --json` object; `tokens` are those scored, a figure past all bounds null."""
    return {
        "ppl": result.ppl if math.isfinite(result.ppl) else None,
        "stderr": result.stderr,
        "chunks": result.num_chunks,
        "tokens": result.num_tokens,
    }
