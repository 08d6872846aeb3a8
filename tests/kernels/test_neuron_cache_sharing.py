"""The neuron cache among threads and processes: its lock, and waits for reads that end."""

from __future__ import annotations

import mmap
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from polyneuron.kernels.neuron_cache import (
    SLOT_LATE,
    NeuronCache,
    NeuronState,
    neuron_cache_bytes,
)
from tests.support.sources import ROOT

SECOND_NS = 10**9
WAIT_NS = 60 * SECOND_NS

NUM_NEURONS, NUM_SLOTS = 64, 24
WORDS = 4096 - 64  # offset of shared words behind the cache
SUM, STOP = 0, 1


class SharedCache:
    """A cache in a file that processes map, with a few words beside it."""

    def __init__(self, path: Path) -> None:
        assert neuron_cache_bytes(NUM_NEURONS, NUM_SLOTS) <= WORDS
        with path.open("r+b") as file:
            self.memory = np.frombuffer(mmap.mmap(file.fileno(), 4096), np.uint8)
        self.cache = NeuronCache(self.memory.ctypes.data, self.memory)
        self.words: NDArray[np.uint32] = self.memory[WORDS:].view(np.uint32)

    @classmethod
    def create(cls, path: Path) -> SharedCache:
        path.write_bytes(bytes(4096))
        shared = cls(path)
        shared.cache.format(NUM_NEURONS, NUM_SLOTS, 0, NUM_SLOTS)
        return shared


def child_adds(path: str, times: str) -> None:
    """Add to a word that only the lock protects."""
    shared = SharedCache(Path(path))
    for _ in range(int(times)):
        with shared.cache.locked(WAIT_NS):
            value = int(shared.words[SUM])
            for _ in range(20):  # long enough for the other to come between
                shared.cache.state(0)
            shared.words[SUM] = value + 1


def child_ends_reads(path: str, divisor: str) -> None:
    """End reads until told to stop: those of neurons that `divisor` divides fail."""
    shared = SharedCache(Path(path))
    while not shared.words[STOP]:
        for neuron in range(NUM_NEURONS):
            if shared.cache.state(neuron) is not NeuronState.LOADING:
                continue
            if neuron % int(divisor):
                shared.cache.landed(neuron)
                continue
            with shared.cache.locked(WAIT_NS):
                shared.cache.failed(neuron)


@contextmanager
def child(function: Callable[[str, str], None], *arguments: object) -> Iterator[None]:
    """Run one of the functions above in a process of its own, and see it end well."""
    program = f"from {__name__} import {function.__name__} as run; import sys; run(*sys.argv[1:])"
    command = [sys.executable, "-c", program, *map(str, arguments)]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield
            _, errors = process.communicate(timeout=60)
            assert process.returncode == 0, errors
        finally:
            process.kill()


class TestProcesses:
    def test_lock_is_held_by_one(self, tmp_path: Path) -> None:
        shared = SharedCache.create(tmp_path / "cache")
        times = 2000
        with child(child_adds, tmp_path / "cache", times):
            child_adds(str(tmp_path / "cache"), str(times))
        assert shared.words[SUM] == 2 * times

    def test_waits_end_with_the_reads(self, tmp_path: Path) -> None:
        """An executor here, the reader there: each neuron is here or known to be absent."""
        shared, divisor = SharedCache.create(tmp_path / "cache"), 5
        cache, rng, num_failed, num_misses = shared.cache, np.random.default_rng(2), 0, 0
        with child(child_ends_reads, tmp_path / "cache", divisor):
            for epoch in range(1, 300):
                step = np.sort(rng.choice(NUM_NEURONS, 8, replace=False)).astype(np.uint32)
                with cache.locked(WAIT_NS):
                    found = cache.use(epoch, step)
                assert found is not None
                num_misses += found.misses.size
                for neuron, slot in zip(step.tolist(), found.slots.tolist(), strict=True):
                    outcome = cache.wait(neuron, WAIT_NS) if slot & SLOT_LATE else 1
                    assert outcome == (1 if neuron % divisor else -1)
                    num_failed += outcome < 0
            shared.words[STOP] = 1
        counters = cache.counters()
        assert (counters.misses, counters.failures) == (num_misses, num_failed)
        assert num_failed > 0


class TestThreads:
    def test_all_waiters_of_a_neuron_wake(self) -> None:
        cache = NeuronCache.allocate(4, 4)
        cache.use(1, np.arange(4, dtype=np.uint32))
        with ThreadPoolExecutor(8) as pool:
            waits = [(n, pool.submit(cache.wait, n, WAIT_NS)) for n in (0, 1, 2, 3) * 2]
            for neuron in range(4):
                (cache.landed if neuron % 2 else cache.failed)(neuron)
            assert [wait.result(60) for _, wait in waits] == [-1, 1, -1, 1] * 2

    def test_executors_and_reader_at_once(self) -> None:
        """Executors share epochs; a reader lands what they order; all adds up at the end."""
        cache, stop, barrier = (
            NeuronCache.allocate(200, 80),
            threading.Event(),
            threading.Barrier(3),
        )

        def read() -> None:
            while not stop.is_set():
                for neuron in range(200):
                    if cache.state(neuron) is NeuronState.LOADING:
                        cache.landed(neuron)

        def execute(seed: int) -> int:
            rng, num_uses = np.random.default_rng(seed), 0
            for epoch in range(1, 200):
                barrier.wait(60)
                for _ in range(3):
                    step = np.sort(rng.choice(200, 8, replace=False)).astype(np.uint32)
                    with cache.locked(WAIT_NS):
                        found = cache.use(epoch, step)
                    assert found is not None
                    num_uses += step.size
                    for neuron, slot in zip(step.tolist(), found.slots.tolist(), strict=True):
                        if slot & SLOT_LATE:
                            assert cache.wait(neuron, WAIT_NS) == 1
                        assert cache.slot(neuron) == slot & ~SLOT_LATE
                barrier.wait(60)
            return num_uses

        with ThreadPoolExecutor(4) as pool:
            reader = pool.submit(read)
            try:
                executors = [pool.submit(execute, seed) for seed in range(3)]
                num_uses = sum(executor.result(100) for executor in executors)
            finally:
                stop.set()
                barrier.abort()
            reader.result(60)
        counters = cache.counters()
        assert counters.hits + counters.misses + counters.late == num_uses
        assert counters.misses - counters.evictions == counters.num_resident
        held = [cache.slot(n) for n in range(200) if cache.state(n) is NeuronState.RESIDENT]
        assert len(held) == len(set(held)) == counters.num_resident
