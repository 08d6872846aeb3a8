"""`polyneuron run`: one completion of a raw prompt."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polyneuron.cli import options
from polyneuron.cli.core_options import core_settings
from polyneuron.cli.options import DEFAULTS, OUTPUT, option
from polyneuron.cli.progress import LoadProgress
from polyneuron.config import (
    DEFAULT_LOGIT_ROWS,
    DEFAULT_REQUESTS,
    EngineConfig,
    FeedForwardMode,
    KvType,
)
from polyneuron.errors import ConfigError, DeviceError
from polyneuron.io_report import kv_rms_error
from polyneuron.sizes import show_size
from polyneuron.timeline_events import TraceDetail

if TYPE_CHECKING:
    from polyneuron.completion import BestOf, Completion, RequestIo
    from polyneuron.engine import Engine

INTERRUPTED = 130  # what a shell reports for Ctrl-C


@dataclass(frozen=True, slots=True)
class RunOutput:
    """What `run` shows beside the text."""

    as_json: bool
    display_prompt: bool
    verbose_prompt: bool


def run(
    model: options.Model,
    prompt: Annotated[str | None, option("--prompt", "-p", text="raw text")] = None,
    file: Annotated[
        str | None, option("--file", "-f", text="read the prompt from a file; -: stdin")
    ] = None,
    predict: options.Predict = -1,
    stop: Annotated[list[str] | None, option("--stop", text="end before this text")] = None,
    ignore_eos: Annotated[
        bool, option("--ignore-eos", text="go on past the model's end token")
    ] = False,
    temp: options.Temp = DEFAULTS["temperature"],
    top_k: options.TopK = DEFAULTS["top_k"],
    top_p: options.TopP = DEFAULTS["top_p"],
    min_p: options.MinP = DEFAULTS["min_p"],
    typical: options.Typical = DEFAULTS["typical_p"],
    repeat_last_n: options.RepeatLastN = DEFAULTS["repeat_last_n"],
    repeat_penalty: options.RepeatPenalty = DEFAULTS["repeat_penalty"],
    presence_penalty: options.PresencePenalty = DEFAULTS["presence_penalty"],
    frequency_penalty: options.FrequencyPenalty = DEFAULTS["frequency_penalty"],
    seed: options.Seed = DEFAULTS["seed"],
    best_of: options.BestOf = 1,
    ctx_size: options.CtxSize = 0,
    threads: options.Threads = 0,
    threads_batch: options.ThreadsBatch = -1,
    npu: options.Npu = "native",
    cpu_mask: options.CpuMask = "",
    cpu_range: options.CpuRange = "",
    memory: options.Memory = "0",
    ffn_resident: options.FfnResident = -1.0,
    mode: options.Mode = FeedForwardMode.AUTO,
    kv_type: options.KvTypeOption = KvType.F16,
    plan: options.PlanPath = None,
    deterministic: options.Deterministic = False,
    no_display_prompt: Annotated[
        bool, option("--no-display-prompt", panel=OUTPUT, text="print the answer only")
    ] = False,
    verbose_prompt: Annotated[
        bool, option("--verbose-prompt", panel=OUTPUT, text="print the prompt's tokens first")
    ] = False,
    trace: options.Trace = None,
    trace_detail: options.Detail = TraceDetail.AUTO,
    as_json: options.Json = False,
) -> None:
    """Complete a prompt; control tokens in it count as such."""
    text = read_prompt(prompt, file)
    sampling = options.sampling_params(
        temperature=temp, top_k=top_k, top_p=top_p, min_p=min_p, typical_p=typical,
        repeat_last_n=repeat_last_n, repeat_penalty=repeat_penalty, seed=seed,
        presence_penalty=presence_penalty, frequency_penalty=frequency_penalty,
    )  # fmt: skip
    _check_request(predict, stop, best_of)
    output = RunOutput(as_json, not no_display_prompt and not as_json, verbose_prompt)
    config = EngineConfig(
        num_ctx=ctx_size, kv_type=kv_type, deterministic=deterministic, max_sequences=best_of,
        npu=npu, max_logit_rows=max(best_of, DEFAULT_LOGIT_ROWS),
        **options.traced(trace, trace_detail),
        **options.budget(memory, ffn_resident, mode, model),
        **core_settings(model, threads, threads_batch, cpu_mask, cpu_range),
    )  # fmt: skip
    if plan is not None:
        config = options.planned(config, Path(plan), model)
    with open_engine(model, config, text) as engine:
        complete(
            engine, text, output, max_tokens=max(predict, -1), sampling=sampling,
            stop=tuple(stop or ()), ignore_eos=ignore_eos, best_of=best_of,
        )  # fmt: skip


def _check_request(predict: int, stop: list[str] | None, best_of: int) -> None:
    if predict < -2:
        raise ConfigError(f"-n {predict}: give 0 or more, -1 (to the end) or -2 (fill the context)")
    if stop and not all(stop):
        raise ConfigError("--stop: a stop string is empty; leave it out")
    if not 1 <= best_of <= DEFAULT_REQUESTS:
        raise ConfigError(f"--best-of {best_of}: give 1 to {DEFAULT_REQUESTS}")


@contextmanager
def open_engine(model: str, config: EngineConfig, text: str) -> Iterator[Engine]:
    """An engine that can take the prompt `text`; progress of opening it on stderr."""
    # Imported late: importing Ray takes half a second and reads the environment.
    from polyneuron.engine import Engine

    with (
        LoadProgress("reading weights") as progress,
        LoadProgress("converting") as converting,
        Engine(model, config, on_load=progress, on_convert=converting, first_prompt=text) as engine,
    ):
        for bar in (progress, converting):
            bar.stop()
        yield engine


def read_prompt(prompt: str | None, file: str | None) -> str:
    """The prompt's text, from the flag, a file or stdin."""
    if (prompt is None) == (file is None):
        raise ConfigError("give the prompt with -p TEXT or with -f FILE (- for stdin), one of them")
    if prompt is not None:
        return prompt
    if file == "-":
        return sys.stdin.buffer.read().decode("utf-8", "replace")
    try:
        return Path(str(file)).read_bytes().decode("utf-8", "replace")
    except OSError as error:
        raise ConfigError(f"-f {file!a}: {error.strerror}") from None


def complete(engine: Engine, text: str, output: RunOutput, **request: Any) -> None:
    """Generate, stream to stdout, print the lines before and after to stderr."""
    tokens = engine.tokenize(text)
    note(engine.mode().line())
    if output.verbose_prompt:
        for token_id in tokens:
            note(f"{token_id:6} -> {engine.tokenizer.decode([token_id])!r}")
    generation = engine.stream(tokens, **request)
    if output.display_prompt:
        write(text)
    interrupted = False
    try:
        for piece in generation:
            if not output.as_json:
                write(piece)
    except KeyboardInterrupt:
        interrupted = True
    if not output.as_json:
        write("\n")
    if interrupted:
        note("interrupted")
        raise typer.Exit(INTERRUPTED)
    if output.as_json:
        write(json.dumps(as_object(engine, generation.completion)) + "\n")
    note(summary_line(engine, generation.completion))


def write(text: str) -> None:
    """Result text, at once."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise DeviceError(f"standard output: {error.strerror}") from None


def note(line: str) -> None:
    """A line for the person, beside the result."""
    print(line, file=sys.stderr, flush=True)


def tokens_of(count: int) -> str:
    """A number of tokens, in words."""
    return f"{count} token" if count == 1 else f"{count} tokens"


def summary_line(engine: Engine, completion: Completion) -> str:
    """What was measured, in one line."""
    times, memory = completion.timings, engine.memory()
    parts = [f"prompt {tokens_of(times.prompt_n)} in {times.prompt_ms:.0f} ms"]
    if times.predicted_per_second:
        p99 = times.token_ms["p99"]
        parts.append(f"{times.predicted_per_second:.1f} tok/s, p99 {p99:.1f} ms a token")
    parts.append(f"{tokens_of(times.predicted_n)}, ended by {completion.finish_reason}")
    if completion.best_of is not None:
        parts.append(best_of_part(completion.best_of))
    parts.append(
        f"memory {memory.peak_bytes >> 20} MiB of {engine.budget.limit_bytes >> 20} "
        f"(arena {memory.arena_bytes >> 20}, Ray's daemons {memory.ray_bytes >> 20})"
    )
    kept = [kv_part(engine)] if engine.config.kv_type is not KvType.F16 else []
    return "measured: " + " · ".join([*parts, *kept, *io_parts(completion.io)])


def kv_part(engine: Engine) -> str:
    """What the KV cache takes and how far what it holds is off."""
    size = show_size(engine.layout.spans["kv"].num_bytes)
    error = kv_rms_error(engine.actors.arena, engine.layout)
    off = "" if error is None else f", keys and values {error:.2%} rms off"
    return f"KV cache {engine.config.kv_type} {size}{off}"


def best_of_part(best_of: BestOf) -> str:
    """Which candidate was chosen and how likely it is."""
    best, total = best_of.candidates[best_of.chosen], sum(c.num_tokens for c in best_of.candidates)
    mean = "" if best.mean_logprob is None else f", mean log-probability {best.mean_logprob:.3f}"
    count = len(best_of.candidates)
    return f"best of {count}: candidate {best_of.chosen}{mean}, {tokens_of(total)} in all"


def io_parts(io: RequestIo) -> list[str]:
    """What was read for a token, how often that was needed, and the time waited for it."""
    if io.bytes_per_token is None or io.critical_path_share is None:
        return []
    parts = [f"flash {io.bytes_per_token / 2**20:.1f} MiB a token"]
    if io.hit_rate is not None:
        parts.append(f"hit rate {io.hit_rate:.1%}")
    return [*parts, f"waited for it {io.critical_path_share:.0%} of the time"]


def hot_changes(
    config: EngineConfig, batch_sizes: Sequence[tuple[int, int]]
) -> list[tuple[int, int]]:
    """From which token on how many clusters of each layer were hot: the decode program changed."""
    changes: list[tuple[int, int]] = []
    for index, size in batch_sizes:
        hot = config.hot_for(size)
        if not changes or changes[-1][1] != hot:
            changes.append((index, hot))
    return changes


def as_object(engine: Engine, completion: Completion) -> dict[str, Any]:
    """The `run --json` object; null where nothing was measured."""
    memory = engine.memory()
    return {
        "text": completion.text,
        "prompt_tokens": completion.prompt_tokens,
        "tokens": completion.tokens,
        "finish_reason": completion.finish_reason,
        "best_of": completion.best_of.as_dict() if completion.best_of else None,
        "batch_sizes": completion.batch_sizes,
        "hot_clusters": hot_changes(engine.config, completion.batch_sizes),
        "logits_sha256": completion.logits_sha256,
        "timings": completion.timings.as_dict(),
        "memory": {
            "budget_bytes": engine.budget.limit_bytes,
            "peak_bytes": memory.peak_bytes,
            "ray_bytes": memory.ray_bytes,
            "arena_bytes": memory.arena_bytes,
            "resident_ffn_fraction": engine.budget.resident_ffn_fraction,
            "kv_bytes": engine.layout.spans["kv"].num_bytes,
            "kv_rms_error": kv_rms_error(engine.actors.arena, engine.layout),
        },
        "io": completion.io.as_dict(),
        "mode": engine.mode().as_dict(),
    }
