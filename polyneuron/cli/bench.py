"""`polyneuron bench`: llama-bench's tests and table, beside a peer if wanted."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from polyneuron.cli import options
from polyneuron.cli.core_options import core_settings
from polyneuron.cli.options import ENGINE, OUTPUT, option
from polyneuron.cli.progress import LoadProgress
from polyneuron.config import EngineConfig, FeedForwardMode, KvType, Phase
from polyneuron.cores import this_machine
from polyneuron.errors import ConfigError
from polyneuron.io.file_kind import is_ncf
from polyneuron.measure.bench import BenchSettings, run_bench
from polyneuron.measure.llama_cpp_peer import LlamaCpp
from polyneuron.measure.speed import SpeedTest
from polyneuron.model.locate import locate_model
from polyneuron.planning.source import open_source
from polyneuron.timeline_events import TraceDetail

if TYPE_CHECKING:
    from polyneuron.engine import Engine


class OutputFormat(StrEnum):
    """How the result is printed."""

    MARKDOWN = "md"
    JSON = "json"


def bench(
    model: options.Model,
    prompt: Annotated[
        str, option("--n-prompt", "-p", text="prefill tests: tokens, as 512 or 128,512; 0: none")
    ] = "512",
    gen: Annotated[
        str, option("--n-gen", "-n", text="decode tests: tokens, as 128 or 32,128; 0: none")
    ] = "128",
    repetitions: Annotated[int, option("--repetitions", "-r", text="of each test")] = 5,
    peer: Annotated[
        str | None,
        option("--peer", text="time llama.cpp too, in turn; with --memory in cgroups of that size"),
    ] = None,
    peer_model: Annotated[
        Path | None, option("--peer-model", text="its GGUF, when MODEL is a .ncf file")
    ] = None,
    threads: Annotated[
        int, option("--threads", "-t", "--workers", panel=ENGINE, text="0: one a fast core")
    ] = 0,
    threads_batch: options.ThreadsBatch = -1,
    npu: options.Npu = "native",
    cpu_mask: options.CpuMask = "",
    cpu_range: options.CpuRange = "",
    memory: options.Memory = "0",
    ffn_resident: options.FfnResident = -1.0,
    mode: options.Mode = FeedForwardMode.AUTO,
    kv_type: options.KvTypeOption = KvType.F16,
    plan: options.PlanPath = None,
    output: Annotated[
        OutputFormat, option("--output", "-o", panel=OUTPUT, text="a table or JSON")
    ] = OutputFormat.MARKDOWN,
    trace: options.Trace = None,
    trace_detail: options.Detail = TraceDetail.AUTO,
    as_json: options.Json = False,
) -> None:
    """Tokens a second of prefill and decode, on random tokens."""
    tests = [*_tests(Phase.PREFILL, "-p", prompt), *_tests(Phase.DECODE, "-n", gen)]
    if not tests:
        raise ConfigError("-p 0 -n 0: nothing to measure; leave one out for its default")
    if repetitions < 1:
        raise ConfigError(f"-r {repetitions}: give 1 or more")
    if threads < 0:
        raise ConfigError(f"-t {threads}: give 1 or more, or 0 for one a fast core")
    if peer not in (None, LlamaCpp.name):
        raise ConfigError(f"--peer {peer}: the only one known is {LlamaCpp.name}")
    path = locate_model(model)
    config = EngineConfig(
        max_sequences=1, **options.traced(trace, trace_detail),
        npu=npu, kv_type=kv_type,
        **core_settings(model, threads, threads_batch, cpu_mask, cpu_range),
        **options.budget(memory, ffn_resident, mode, model),
    )  # fmt: skip
    if plan is not None:
        config = options.planned(config, Path(plan), model)
    num_workers = config.num_workers or this_machine().num_workers(config.cores)
    config = replace(config, num_ctx=_context(path, tests), num_workers=num_workers)
    peer_path = _peer_path(path, peer, peer_model)
    settings = BenchSettings(path, tests, repetitions, config, peer_path)
    report = run_bench(settings, lambda config: _open(path, config), _say)
    if as_json or output is OutputFormat.JSON:
        print(json.dumps(report.rows(), indent=1))
        for line in report.warnings():
            _say(line)
    else:
        print(report.table())


def _tests(phase: Phase, flag: str, text: str) -> list[SpeedTest]:
    """The tests of a list of numbers; zeros are none."""
    try:
        counts = [int(word) for word in text.split(",")]
    except ValueError:
        counts = [-1]
    if min(counts) < 0:
        raise ConfigError(f"{flag} {text}: give numbers of tokens, as 128 or 128,512, or 0")
    return [SpeedTest(phase, count) for count in dict.fromkeys(counts) if count]


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _peer_path(path: Path, peer: str | None, peer_model: Path | None) -> Path | None:
    """The GGUF the peer runs; None without a peer."""
    if peer is None:
        if peer_model is not None:
            raise ConfigError(f"--peer-model {peer_model}: give --peer {LlamaCpp.name} too")
        return None
    if peer_model is None and (is_ncf(path) or path.is_dir()):
        raise ConfigError(
            f"--peer {peer}: it cannot read {path}; name a GGUF of the same weights with "
            f"--peer-model FILE.gguf"
        )
    if peer_model is not None and not peer_model.is_file():
        raise ConfigError(f"--peer-model {peer_model}: no such file; give a .gguf file")
    if peer_model is not None and is_ncf(peer_model):
        raise ConfigError(f"--peer-model {peer_model}: {peer} reads GGUF files only; give one")
    return peer_model or path


def _context(path: Path, tests: list[SpeedTest]) -> int:
    """Positions that the longest test needs, if the model has as many."""
    num_ctx = max(test.num_tokens for test in tests) + 1
    limit = open_source(path).spec.context_length
    if num_ctx > limit:
        longest = max(tests, key=lambda test: test.num_tokens)
        raise ConfigError(f"test {longest.name}: the model has a context of {limit}, {num_ctx} "
                          f"positions are needed; lower -p or -n")  # fmt: skip
    return num_ctx


def _open(path: Path, config: EngineConfig) -> Engine:
    # Imported late: importing Ray takes half a second and reads the environment.
    from polyneuron.engine import Engine

    with LoadProgress("reading weights") as progress, LoadProgress("converting") as converting:
        engine = Engine(str(path), config, on_load=progress, on_convert=converting)
    _say(engine.mode().line())
    return engine
