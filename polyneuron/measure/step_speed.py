"""What the step board and the neuron cache cost by themselves."""

from __future__ import annotations

import os
import statistics
import threading
from collections.abc import Callable, Iterator, Sequence
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
from polyneuron.planning.layout import ACT_BLOCK_BYTES, STEP_OP_BYTES
from polyneuron.planning.step_program import StepOp, write_program

NUM_OPS = 256
UNITS = 32  # of each op, about as many as a layer has clusters
COLS = 4096  # a unit takes about a quarter of a microsecond, so all executors take part
ACT_BYTES = COLS // 32 * ACT_BLOCK_BYTES
SLICE_NS = 1_000_000_000
STEP_TIMEOUT_NS = 10_000_000_000
MAX_STEPS = 400
LEAST = 0.05
"""Of all times, the share that may be quicker: others on the machine only ever add."""

Confine = Callable[[int], None]
"""Keeps this thread, and those it makes, to the cores that so many executors would have."""

CACHE_NEURONS = 1 << 17
CALL_NEURONS = 64
CALLS = 1000


def step_speeds(
    counts: Sequence[int], max_ns: int, confine: Confine = lambda count: None
) -> list[StepSpeed]:
    """For each number of executors, what ops cost beyond their share of the work.

    `confine` is told how many before they are made, to choose their cores.
    Alone an executor is timed with ops that do nothing; several are timed with ops that round rows
    to 8 bits, and what one alone takes for that, by their number, is taken off.
    """
    confine(1)
    with _board(1) as arena:
        nothing = _least_ns(arena, NUM_OPS, max_ns // 2, StepFlag.DRY)
        work = _least_ns(arena, NUM_OPS, max_ns // 2)
    speeds = []
    for threads in counts:
        confine(threads)
        with _board(threads) as arena:
            step_ns = _least_ns(arena, 1, max_ns // 4, StepFlag.DRY)
            whole = _least_ns(arena, NUM_OPS, max_ns) if threads > 1 else work
        alone = nothing / NUM_OPS
        shared = (whole - step_ns - work / threads) / NUM_OPS if threads > 1 else alone
        speeds.append(StepSpeed(threads, max(alone, shared), step_ns))
    return speeds


@contextmanager
def _board(threads: int) -> Iterator[Arena]:
    """A board with the program, and executors that serve it."""
    program = HEADER_BYTES + -(-board_bytes(NUM_OPS) // PAGE_BYTES) * PAGE_BYTES
    rows = program + NUM_OPS * STEP_OP_BYTES
    acts = rows + UNITS * COLS * 4
    arena = Arena.over(np.zeros(acts + UNITS * ACT_BYTES + 2 * PAGE_BYTES, np.uint8))
    arena.format(HEADER_BYTES, NUM_OPS, threads)
    ops = [
        StepOp(
            kind=OpKind.QUANTIZE, after=index, cols=COLS, in_=rows, in_stride=COLS * 4,
            out_acts=acts, out_acts_stride=ACT_BYTES,
        )
        for index in range(NUM_OPS)
    ]  # fmt: skip
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


def _least_ns(arena: Arena, num_ops: int, max_ns: int, flags: int = 0) -> float:
    """Time of a step of the program's first ops when nothing disturbs it."""
    times: list[int] = []
    end_ns = monotonic_ns() + max_ns
    while len(times) < 2 or (len(times) < MAX_STEPS and monotonic_ns() < end_ns):
        seq = arena.open_step()
        arena.step.program_ops, arena.step.flags = num_ops, flags
        start_ns = monotonic_ns()
        arena.ring(seq)
        status = arena.wait_step(seq, STEP_TIMEOUT_NS)
        times.append(monotonic_ns() - start_ns)
        assert status is StepStatus.DONE
    return float(np.quantile(times, LEAST))


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
