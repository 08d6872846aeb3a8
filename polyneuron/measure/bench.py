"""Opens a model in one engine or two and times every test, inside memory cgroups where limited."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from polyneuron.config import EngineConfig, Phase
from polyneuron.host_memory import HostMemory
from polyneuron.io.device_probe import LAYER_READS, ProbeRow, neuron_reads, probe_device
from polyneuron.io.file_kind import is_ncf
from polyneuron.io.ncf_reader import read_ncf
from polyneuron.measure.bench_report import BenchModel, BenchReport, DiskSpeeds, Entry
from polyneuron.measure.llama_cpp_peer import LlamaCpp
from polyneuron.measure.memory_cgroup import MemoryCgroup, memory_cgroup
from polyneuron.measure.own_engine import OwnEngine
from polyneuron.measure.speed import SEED, Contestant, Say, SpeedTest, race
from polyneuron.model.model_header import read_model_header
from polyneuron.sizes import show_size

if TYPE_CHECKING:
    from polyneuron.engine import Engine

OVERHEAD_TOKENS = 64


@dataclass(frozen=True, slots=True)
class BenchSettings:
    """What is timed, and on what."""

    path: Path
    tests: Sequence[SpeedTest]
    repetitions: int
    config: EngineConfig
    peer_path: Path | None = None
    """The GGUF that llama.cpp runs; None: no peer."""

    @property
    def limit_bytes(self) -> int | None:
        """What an engine may take; None: what the machine has."""
        return self.config.memory_bytes or None


def run_bench(
    settings: BenchSettings, open_engine: Callable[[EngineConfig], Engine], say: Say
) -> BenchReport:
    """Time every test; with a peer and a limit each engine is in a cgroup of its own."""
    config = settings.config
    with ExitStack() as cleanup:
        own_cgroup, peer_cgroup = make_cgroups(settings, cleanup, say)
        # Before our engine: until then the environment holds none of its secrets.
        peer = cleanup.enter_context(LlamaCpp(peer_cgroup)) if settings.peer_path else None
        if own_cgroup is not None:
            cleanup.enter_context(own_cgroup.entered())
        engine = cleanup.enter_context(open_engine(config))
        own = OwnEngine(engine, own_cgroup)
        contestants: list[Contestant] = [own]
        if peer is not None and settings.peer_path is not None:
            say(f"reading weights into {peer.name}")
            peer.open(
                settings.peer_path, config.num_workers, config.num_ctx,
                num_threads_batch=max(0, config.num_npu_threads), cores=config.cores,
            )  # fmt: skip
            contestants.append(peer)
        before = disk_speeds(engine)
        vocab_size = engine.spec.vocab_size
        result = race(contestants, settings.tests, settings.repetitions, vocab_size, say)
        disk = DiskSpeeds(before, disk_speeds(engine)) if before else None
        overhead_ms = None if engine.layout.is_streaming else _overhead_ms(own, settings)
    entries = {own.name: Entry(describe_file(settings.path), settings.limit_bytes)}
    ratios = {}
    if settings.peer_path is not None:
        limit_bytes = peer_cgroup.limit_bytes if peer_cgroup else None
        entries[LlamaCpp.name] = Entry(describe_file(settings.peer_path), limit_bytes)
        ratios = result.ratios(own.name, LlamaCpp.name)
    return BenchReport(entries, config.num_workers, result, ratios, overhead_ms, disk)


def make_cgroups(
    settings: BenchSettings, cleanup: ExitStack, say: Say
) -> tuple[MemoryCgroup | None, MemoryCgroup | None]:
    """Ours and the peer's, with no page of their files in memory; None where there is no limit."""
    limit_bytes = settings.limit_bytes
    if limit_bytes is None or settings.peer_path is None:
        return None, None
    room = HostMemory().available().num_bytes
    if 2 * limit_bytes > room:
        say(
            f"warning: both engines together may take {show_size(2 * limit_bytes)} and "
            f"{show_size(room)} are free: they will press each other"
        )
    try:
        cgroups = [memory_cgroup(limit_bytes, use) for use in ("own", "peer")]
        own, peer = [cleanup.enter_context(cgroup) for cgroup in cgroups]
    except OSError as error:
        say(
            f"no memory cgroup can be made here ({error.strerror}): --memory limits polyneuron "
            f"by its own account, and {LlamaCpp.name} takes what it likes"
        )
        return None, None
    for path in (settings.path, settings.peer_path):
        for file in read_model_header(path).files.paths if not is_ncf(path) else (path,):
            forget(file)
    return own, peer


def forget(path: Path) -> None:
    """Drop a file from the page cache: pages that others paid for would be free for an engine."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def disk_speeds(engine: Engine) -> tuple[ProbeRow, ...]:
    """The engine's own kinds of reads, measured on its file; none when it reads nothing."""
    layout, path = engine.layout, engine.source.path
    cases = [LAYER_READS] if layout.is_streaming else []
    if layout.bundles is not None and layout.has_neuron_cache:
        cases.append(neuron_reads(path, layout.bundles.slot_rows.slot_bytes))
    if not cases or path.stat().st_size < LAYER_READS.read_bytes:
        return ()
    return probe_device(path, random.Random(SEED), cases=cases).rows


def _overhead_ms(own: OwnEngine, settings: BenchSettings) -> float | None:
    if not any(test.phase is Phase.DECODE for test in settings.tests):
        return None
    count = min(OVERHEAD_TOKENS, settings.config.num_ctx - 1)
    # Any tokens every model has: in steps without kernels only their number counts.
    tokens: list[int] = np.random.default_rng(SEED).integers(0, 2, count).tolist()
    return own.overhead_ms(tokens)


def describe_file(path: Path) -> BenchModel:
    """Name and size of a GGUF or a neuron-cluster file."""
    if is_ncf(path):
        ncf = read_ncf(path)
        return BenchModel(
            str(ncf.metadata.get("general.name", path.stem)),
            sum(tensor.num_bytes for tensor in ncf.manifest.tensors),
            sum(tensor.rows * tensor.cols for tensor in ncf.manifest.tensors),
        )
    header = read_model_header(path)
    return BenchModel(
        str(header.metadata.get("general.name", path.stem)),
        sum(tensor.num_bytes for tensor in header.tensors),
        sum(prod(tensor.shape) for tensor in header.tensors),
    )
