"""What the step board and the neuron cache cost by themselves."""

from __future__ import annotations

import os
import statistics
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from polyneuron.kernels.arena import (
    HEADER_BYTES,
    PAGE_BYTES,
    SPIN_LIMIT,
    Arena,
    OpKind,
    ServeStatus,
    StepFlag,
    StepStatus,
    Unit,
    board_bytes,
    monotonic_ns,
)
from polyneuron.kernels.neuron_cache import NeuronCache
from polyneuron.planning.device import CacheSpeed, StepSpeed
from polyneuron.planning.layout import STEP_OP_BYTES
from polyneuron.planning.step_program import StepOp, write_program

NUM_OPS = 256
UNITS = 32  # of each op, about as many as a layer has clusters
COLS = 32
SLICE_NS = 1_000_000_000
STEP_TIMEOUT_NS = 10_000_000_000
MAX_STEPS = 200

CACHE_NEURONS = 1 << 17
CALL_NEURONS = 64
CALLS = 1000


def step_speed(threads: int, max_ns: int) -> StepSpeed:
    """Steps whose ops do nothing, walked by `threads` executors: the best of many."""
    with _board(threads) as arena:
        end_ns = monotonic_ns() + max_ns
        short = _steps(arena, 1, end_ns - max_ns // 2)
        long = _steps(arena, NUM_OPS, end_ns)
    # Others on the machine only ever add, so the lower quarter is nearer to the truth.
    least, most = (statistics.quantiles(times, n=4)[0] for times in (short, long))
    return StepSpeed(threads, max(0.0, most - least) / (NUM_OPS - 1), least)


@contextmanager
def _board(threads: int) -> Iterator[Arena]:
    """A board with the program, and executors that serve it."""
    program = HEADER_BYTES + -(-board_bytes(NUM_OPS) // PAGE_BYTES) * PAGE_BYTES
    rows = program + NUM_OPS * STEP_OP_BYTES
    arena = Arena.over(np.zeros(rows + UNITS * COLS * 8 + 2 * PAGE_BYTES, np.uint8))
    arena.format(HEADER_BYTES, NUM_OPS, threads, 0)
    ops = [
        StepOp(kind=OpKind.QUANTIZE, after=index, cols=COLS, in_=rows, in_stride=COLS * 4)
        for index in range(NUM_OPS)
    ]
    write_program(arena, program, ops)
    step = arena.step
    step.program, step.num_tokens, step.max_tokens = program, UNITS, UNITS
    step.spin_limit, step.num_parties[Unit.CPU] = SPIN_LIMIT, threads
    serving = [
        threading.Thread(target=_serve, args=(arena, i, arena.attach(i, Unit.CPU, os.getpid())))
        for i in range(threads)
    ]
    for thread in serving:
        thread.start()
    try:
        yield arena
    finally:
        arena.stop()
        for thread in serving:
            thread.join()


def _serve(arena: Arena, executor: int, generation: int) -> None:
    while arena.serve(executor, generation, SLICE_NS) is ServeStatus.SLICE:
        pass


def _steps(arena: Arena, num_ops: int, end_ns: int) -> list[int]:
    """Times of dry steps of the program's first ops; two at least."""
    times: list[int] = []
    while len(times) < 2 or (len(times) < MAX_STEPS and monotonic_ns() < end_ns):
        seq = arena.open_step()
        arena.step.program_ops, arena.step.flags = num_ops, StepFlag.DRY
        start_ns = monotonic_ns()
        arena.ring(seq)
        status = arena.wait_step(seq, STEP_TIMEOUT_NS)
        times.append(monotonic_ns() - start_ns)
        assert status is StepStatus.DONE
    return times


def cache_speed() -> CacheSpeed:
    """Uses of a neuron cache that hit, and that miss and evict.

    Half of the neurons fit. Random neurons hit and miss by turns; what hits cost, of resident ones
    alone, is taken off. What Python adds to a call is measured by calls without neurons.
    """
    rng = np.random.default_rng(1)
    half = CACHE_NEURONS // 2
    cache = NeuronCache.allocate(CACHE_NEURONS, half)
    resident = np.arange(half, dtype=np.uint32).reshape(-1, CALL_NEURONS)
    _time_calls(cache, list(resident), 1)
    empty_ns = _time_calls(cache, [np.zeros(0, np.uint32)] * CALLS, half + 1)
    hit_ns = (_time_calls(cache, list(resident), 2 * half) - empty_ns) / CALL_NEURONS
    mixed = [
        np.sort(rng.choice(CACHE_NEURONS, CALL_NEURONS, replace=False)).astype(np.uint32)
        for _ in range(CALLS)
    ]
    before = cache.counters()
    mixed_ns = (_time_calls(cache, mixed, 3 * half) - empty_ns) / CALL_NEURONS
    missed = (cache.counters().misses - before.misses) / (CALLS * CALL_NEURONS)
    miss_ns = (mixed_ns - (1 - missed) * hit_ns) / missed
    return CacheSpeed(max(hit_ns, 0.0), max(miss_ns, 0.0))


def _time_calls(cache: NeuronCache, calls: list[NDArray[np.uint32]], epoch: int) -> float:
    """Nanoseconds of the median call."""
    times = []
    for index, neurons in enumerate(calls):
        start_ns = monotonic_ns()
        use = cache.use(epoch + index, neurons)
        times.append(monotonic_ns() - start_ns)
        for miss in use.misses["neuron"] if use else ():
            cache.landed(int(miss))
    return statistics.median(times)
