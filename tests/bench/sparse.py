"""Sparse decode beside llama.cpp: `python -m tests.bench.sparse [PART …]` (DESIGN §16, 3 to 9).

The model is a synthetic Bamboo-7B, hottest neurons first, with predictors fitted on random tokens
to keep 98 % of all activation; llama.cpp runs its dense twin. Each row names its command's
figures, so that it can be repeated.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.bench import best_of, planned
from tests.bench.bars import (
    Rows,
    Verdict,
    bench,
    judged,
    load_doubt,
    polyneuron,
    print_table,
    ratio_verdicts,
)
from tests.bench.random_model import RandomModel, ensure_model, ensure_predictors
from tests.bench.streaming import disk_speeds, figures

SHAPE = "bamboo-7b"
LIMIT = "3400MiB"
"""Non-feed-forward weights, predictors, half of the feed-forward weights, Ray and Python."""
HALF = ("--ffn-resident", "0.5")
PREDICTED = ("--mode", "predicted")
RACE = ("-p", "0", "-n", "32", "-r", "3")
LONG_RUN = ("-p", "0", "-n", "1024", "-r", "1")
IN_MEMORY_MIN, LESS_MEMORY_MIN, HALF_MIN, BEST_OF_MIN = 2.24, 1.0, 27.8, 1.28
P99_BY_MEAN_MAX, STALL_SHARE_MAX = 1.41, 0.137
PROBE_READS_MIN, OF_BOUND_MIN = 40_000.0, 0.85
PAPER_MISSES, PAPER_MISSES_P99 = 0.035, 0.189
SHARES = ("0.2", "0.3", "0.4", "0.5", "0.6", "0.8", "1.0")
NOISE = 0.95
LADDER: dict[str, tuple[dict[str, str], int]] = {
    "+ bundles": (
        {"lookahead": "false", "matrix_barrier": "true", "keep_neurons": "false"}, 8,
    ),
    "+ neuron cache": ({"lookahead": "false", "matrix_barrier": "true"}, 48),
    "+ cluster pipeline": ({"lookahead": "false"}, 48),
    "+ look-ahead": ({}, 48),
}  # fmt: skip
"""Rung to what it changes of the plan without hot clusters, and tokens to generate."""
WHOLE_PLAN, WHOLE_PLAN_TOKENS = "+ hot clusters", 48


def sparse_model() -> RandomModel:
    """The files, written and profiled where they are missing."""
    model = ensure_model(SHAPE)
    ensure_predictors(model)
    return model


def own_bench(model: RandomModel, *arguments: str) -> dict[str, Any]:
    """The row of a benchmark of ours alone, on two threads unless a plan says how many."""
    threads = () if "--plan" in arguments else ("-t", "2")
    rows: Rows = polyneuron("bench", "-m", str(model.ncf), *threads, *arguments)
    return next(row for row in rows if "engine" in row)


def memory() -> Iterator[Verdict]:
    """Rows 3 and 5: everything in memory, and 40 % less than llama.cpp takes."""
    model = sparse_model()
    rows = bench(str(model.ncf), "--peer-model", str(model.gguf), *RACE, *PREDICTED)
    yield from figures([row for row in rows if "engine" in row])
    yield from ratio_verdicts("3", "7B dReLU in memory", rows, {"tg32": IN_MEMORY_MIN})
    peer = next(row for row in rows if row.get("engine") == "llama.cpp")
    limit = int(0.6 * peer["peak_bytes"]) >> 20
    own = own_bench(model, *RACE, *PREDICTED, "--memory", f"{limit}MiB")
    yield from figures([own])
    ratio = own["avg_ts"] / peer["avg_ts"]
    work = f"7B dReLU in {limit} MiB, 40 % below llama.cpp's resident run"
    verdict = judged(ratio >= LESS_MEMORY_MIN, load_doubt([own]))
    yield Verdict("5", work, f"{ratio:.2f}x", f">= {LESS_MEMORY_MIN}x", verdict)


def flash() -> Iterator[Verdict]:
    """Row 4: half of the feed-forward weights on flash, both engines in cgroups of one size."""
    model = sparse_model()
    limits = ("--memory", LIMIT, *HALF, *PREDICTED)
    rows = bench(str(model.ncf), "--peer-model", str(model.gguf), *RACE, *limits)
    yield from figures([row for row in rows if "engine" in row])
    work = f"7B dReLU in {LIMIT}, half of the FFN on flash"
    yield from ratio_verdicts("4", work, rows, {"tg32": HALF_MIN})
    for probe in [row["disk"] for row in rows if "disk" in row]:
        for when, speeds in probe.items():
            yield Verdict("-", f"disk {when}", disk_speeds(speeds), "-", "-")
        own = next(row for row in rows if row.get("engine") == "polyneuron")
        yield bound_verdict("4", work, own, [speeds[-1] for speeds in probe.values()])


def bound_verdict(number: str, work: str, own: dict[str, Any], probes: Rows) -> Verdict:
    """Our rate beside what the disk's reads allow: bytes a token by the raw rate of such reads."""
    rate = max(probe["bytes_per_second"] for probe in probes)
    reads = max(probe["reads_per_second"] for probe in probes)
    share = own["avg_ts"] / (rate / own["io_bytes_per_token"])
    is_slow = reads < PROBE_READS_MIN  # else the ratio is the bar, and the processor the bound
    verdict = judged(share >= OF_BOUND_MIN) if is_slow else "-"
    bar = f">= {OF_BOUND_MIN:.0%}" if is_slow else "-"
    return Verdict(number, f"{work}: of the disk's bound", f"{share:.0%}", bar, verdict)


def ladder() -> Iterator[Verdict]:
    """What each mechanism adds, from whole layers streamed to the plan as it is."""
    model = sparse_model()
    dense = own_bench(model, "-p", "0", "-n", "8", "-r", "1", "--memory", LIMIT, *HALF,
                      "--mode", "dense")  # fmt: skip
    yield rung("whole layers, streamed", dense, None)
    before = dense
    with tempfile.TemporaryDirectory(prefix="polyneuron-") as folder:
        path = Path(folder) / "plan.toml"
        polyneuron("plan", "-m", str(model.ncf), "-t", "2", "-c", "64", "--memory", LIMIT,
                   *HALF, *PREDICTED, "-o", str(path))  # fmt: skip
        for name, (plan, num_tokens) in rungs(path.read_text()).items():
            path.write_text(plan)
            row = own_bench(model, "--plan", str(path), "-p", "0", "-n", str(num_tokens), "-r", "2")
            yield rung(name, row, before)
            before = row


def rungs(plan: str) -> dict[str, tuple[str, int]]:
    """The plan of each rung, and tokens to generate: hot clusters stay in the last one only.

    Pinned clusters would be a cache of their own on the rungs that have none.
    """
    bare = planned.with_hot(plan, 0)
    found = {name: (planned.changed(bare, keys), count) for name, (keys, count) in LADDER.items()}
    return found | {WHOLE_PLAN: (plan, WHOLE_PLAN_TOKENS)}


def rung(name: str, row: dict[str, Any], before: dict[str, Any] | None) -> Verdict:
    """Speed, and the share of the executors' time that was spent waiting for weights."""
    ratio = f", {row['avg_ts'] / before['avg_ts']:.2f}x" if before else ""
    measured = f"{row['avg_ts']:.2f} tok/s{ratio}, I/O {row['stall_share']:.1%}"
    return Verdict("-", f"ladder: {name}", measured, "-", "-")


def long() -> Iterator[Verdict]:
    """Rows 8 and 9: a thousand tokens with half of the feed-forward weights on flash."""
    row = own_bench(sparse_model(), *LONG_RUN, "--memory", LIMIT, *HALF, *PREDICTED)
    yield from figures([row])
    doubt, times = load_doubt([row]), row["token_ms"]
    ratio, stall = times["p99"] / times["mean"], row["stall_share"]
    verdict = judged(ratio <= P99_BY_MEAN_MAX, doubt)
    yield Verdict("8", "1,024 tokens: P99 / mean", f"{ratio:.2f}", f"<= {P99_BY_MEAN_MAX}", verdict)
    verdict = judged(stall <= STALL_SHARE_MAX, doubt)
    yield Verdict("9", "1,024 tokens: I/O", f"{stall:.1%}", f"<= {STALL_SHARE_MAX:.1%}", verdict)
    misses = f"{1 - row['hit_rate']:.1%} mean, {row['miss_rate_p99']:.1%} P99"
    paper = f"paper {PAPER_MISSES:.1%}, {PAPER_MISSES_P99:.1%}"
    yield Verdict("-", "1,024 tokens: misses", misses, paper, "-")


def sweep() -> Iterator[Verdict]:
    """Tokens a second by how much of the feed-forward weights stays."""
    model, last = sparse_model(), 0.0
    for share in SHARES:
        row = own_bench(model, *RACE, "--ffn-resident", share, *PREDICTED)
        rate, hits = row["avg_ts"], row["hit_rate"]
        shown = f"{rate:.2f} tok/s" + (f", hit rate {hits:.1%}" if hits is not None else "")
        verdict = judged(rate >= NOISE * last, load_doubt([row]))
        yield Verdict("-", f"{float(share):.0%} of the FFN in memory", shown, "grows", verdict)
        last = rate


def candidates() -> Iterator[Verdict]:
    """Four candidates of one prompt, ending one after another, against four runs in turn."""
    table = best_of.table([str(sparse_model().ncf), "--mode", "predicted"])
    for test, tokens, rate in table:
        if test != "ratio, decode":
            yield Verdict("-", f"best of 4: {test}", f"{rate} {tokens}".strip(), "-", "-")
            continue
        verdict = judged(float(rate.rstrip("x")) >= BEST_OF_MIN)
        yield Verdict("-", "best of 4: decode", rate, f">= {BEST_OF_MIN}x", verdict)


def plan() -> Iterator[Verdict]:
    """Expected speeds beside measured ones."""
    yield from planned.expectations(sparse_model(), own_bench)


def knobs() -> Iterator[Verdict]:
    """A plan beside plans with one knob moved."""
    yield from planned.knobs(sparse_model(), ("--memory", LIMIT, *HALF), own_bench)


PARTS: dict[str, Callable[[], Iterator[Verdict]]] = {
    "memory": memory, "flash": flash, "ladder": ladder, "long": long, "sweep": sweep,
    "candidates": candidates, "plan": plan, "knobs": knobs,
}  # fmt: skip


def main(names: Sequence[str]) -> None:
    """Measure the parts named, or all, and print one table."""
    print_table(verdict for name in names or PARTS for verdict in PARTS[name]())


if __name__ == "__main__":
    main(sys.argv[1:])
