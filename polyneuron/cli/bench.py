"""`polyneuron bench`: llama-bench's tests and table, beside a peer if wanted."""

from __future__ import annotations

import contextlib
import json
import sys
from enum import StrEnum
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np

from polyneuron.cli import options
from polyneuron.cli.options import ENGINE, OUTPUT, option
from polyneuron.cli.progress import LoadProgress
from polyneuron.config import EngineConfig, Phase, usable_cores
from polyneuron.errors import ConfigError
from polyneuron.io.gguf_file import GgufHeader, check_supported, read_header
from polyneuron.measure.bench_report import BenchModel, BenchReport
from polyneuron.measure.llama_cpp_peer import LlamaCpp
from polyneuron.measure.own_engine import OwnEngine
from polyneuron.measure.speed import SEED, Contestant, SpeedTest, race
from polyneuron.model.architecture import describe
from polyneuron.model.locate import locate_model

if TYPE_CHECKING:
    from polyneuron.engine import Engine

OVERHEAD_TOKENS = 64


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
        str | None, option("--peer", text="time this engine too, in turn: llama.cpp")
    ] = None,
    threads: Annotated[
        int, option("--threads", "-t", "--workers", panel=ENGINE, text="0: one a usable core")
    ] = 0,
    output: Annotated[
        OutputFormat, option("--output", "-o", panel=OUTPUT, text="a table or JSON")
    ] = OutputFormat.MARKDOWN,
    as_json: options.Json = False,
) -> None:
    """Tokens a second of prefill and decode, on random tokens in memory."""
    tests = [*_tests(Phase.PREFILL, "-p", prompt), *_tests(Phase.DECODE, "-n", gen)]
    if not tests:
        raise ConfigError("-p 0 -n 0: nothing to measure; leave one out for its default")
    if repetitions < 1:
        raise ConfigError(f"-r {repetitions}: give 1 or more")
    if threads < 0:
        raise ConfigError(f"-t {threads}: give 1 or more, or 0 for one a usable core")
    if peer not in (None, LlamaCpp.name):
        raise ConfigError(f"--peer {peer}: the only one known is {LlamaCpp.name}")
    report = measure_model(
        locate_model(model), tests, repetitions, threads or len(usable_cores()), peer is not None
    )
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


def measure_model(
    path: Path, tests: list[SpeedTest], repetitions: int, num_threads: int, with_peer: bool
) -> BenchReport:
    """Open the model, in both engines if wanted, and time every test."""
    header = read_header(path)
    check_supported(header)
    num_ctx = max(test.num_tokens for test in tests) + 1
    limit = describe(header).context_length
    if num_ctx > limit:
        longest = max(tests, key=lambda test: test.num_tokens)
        raise ConfigError(f"test {longest.name}: the model has a context of {limit}, {num_ctx} "
                          f"positions are needed; lower -p or -n")  # fmt: skip
    with contextlib.ExitStack() as cleanup:
        # Before our engine: until then the environment holds none of its secrets.
        peer = cleanup.enter_context(LlamaCpp()) if with_peer else None
        engine = cleanup.enter_context(_open(path, num_threads, num_ctx))
        own = OwnEngine(engine)
        contestants: list[Contestant] = [own]
        if peer is not None:
            _say(f"reading weights into {peer.name}")
            peer.open(path, num_threads, num_ctx)
            contestants.append(peer)
        vocab_size = engine.spec.vocab_size
        result = race(contestants, tests, repetitions, vocab_size, _say)
        overhead_ms = None
        if any(test.phase is Phase.DECODE for test in tests):
            overhead_ms = own.overhead_ms(_random_tokens(min(OVERHEAD_TOKENS, num_ctx - 1)))
    ratios = result.ratios(own.name, LlamaCpp.name) if with_peer else {}
    return BenchReport(_described(header), num_threads, result, ratios, overhead_ms)


def _open(path: Path, num_threads: int, num_ctx: int) -> Engine:
    # Imported late: importing Ray takes half a second and reads the environment.
    from polyneuron.engine import Engine

    config = EngineConfig(num_ctx=num_ctx, num_workers=num_threads, max_sequences=1)
    with LoadProgress("reading weights") as progress:
        engine = Engine(str(path), config, on_load=progress)
    _say(engine.mode().line())
    return engine


def _random_tokens(count: int) -> list[int]:
    """Any tokens every model has: in steps without kernels only their number counts."""
    tokens: list[int] = np.random.default_rng(SEED).integers(0, 2, count).tolist()
    return tokens


def _described(header: GgufHeader) -> BenchModel:
    name = str(header.metadata.get("general.name", header.path.stem))
    return BenchModel(
        name,
        sum(tensor.num_bytes for tensor in header.tensors),
        sum(prod(tensor.shape) for tensor in header.tensors),
    )
