"""Mixtures of experts beside llama.cpp: `python -m tests.bench.mixtures [PART …]` (DESIGN §16, 6).

Models a quarter as deep as TurboSparse-Mixtral-47B and Qwen3-30B-A3B, in a quarter of the memory.
The first one's experts have predictors, fitted on random tokens to keep 98 % of all activation;
llama.cpp runs the dense twins by mmap in cgroups of the same size. Files that are missing are
written first, into the cache folder: 14 and 9 GB, where the disk has room for them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from tests.bench.bars import Rows, Verdict, bench, judged, load_doubt, print_table, ratio_verdicts
from tests.bench.random_model import RandomModel, ensure_model, ensure_predictors
from tests.bench.sparse import NOISE, bound_verdict, own_bench
from tests.bench.streaming import NO_CGROUP, disk_speeds, figures

SPARSE, SPARSE_LAYERS, SPARSE_RANK = "turbosparse-mixtral-47b", 8, "512"
DENSE, DENSE_LAYERS = "qwen3moe-30b-a3b", 12
DEPTH = 4
"""The whole models are so many times as deep."""
LIMIT = "2GiB"
TEST = "tg16"
RACE = ("-p", "0", "-n", "16", "-r", "2")
SWEEP = ("-p", "0", "-n", "32", "-r", "2")
PREDICTED = ("--mode", "predicted")
SPARSE_MIN, DENSE_MIN = 21.2, 10.0
PAPER = {
    7: 2.13, 8: 2.38, 9: 2.87, 10: 3.58, 11: 4.43, 12: 5.34, 13: 6.40, 14: 7.55, 15: 8.38, 16: 9.65,
}  # fmt: skip
"""Tokens a second of the whole model on a OnePlus 12, by GB of memory (PAPER §3.4)."""


def sparse_model() -> RandomModel:
    """The files of the dReLU shape, written and profiled where they are missing."""
    model = ensure_model(SPARSE, SPARSE_LAYERS)
    ensure_predictors(model, SPARSE_RANK)
    return model


def turbosparse() -> Iterator[Verdict]:
    """Row 6: neurons of chosen experts, named by predictors."""
    work = f"TurboSparse-Mixtral, 1/{DEPTH} of its depth, in {LIMIT}"
    yield from race("6", work, sparse_model(), SPARSE_MIN, *PREDICTED)


def qwen3moe() -> Iterator[Verdict]:
    """Experts without sparsity: whole clusters of those chosen."""
    work = f"Qwen3-30B-A3B, 1/{DEPTH} of its depth, in {LIMIT}"
    yield from race("6", work, ensure_model(DENSE, DENSE_LAYERS), DENSE_MIN)


def race(
    number: str, work: str, model: RandomModel, ratio_min: float, *mode: str
) -> Iterator[Verdict]:
    """Figures of both engines, the disk beside them, and the ratio beside its bar."""
    limits = ("--memory", LIMIT, *mode)
    rows = bench(str(model.ncf), "--peer-model", str(model.gguf), *RACE, *limits)
    engines = [row for row in rows if "engine" in row]
    yield from figures(engines)
    (verdict,) = ratio_verdicts(number, work, rows, {TEST: ratio_min})
    if not all(row["memory_limit_bytes"] for row in engines):
        verdict = replace(verdict, verdict=judged(False, NO_CGROUP))
    yield verdict
    yield from disk_verdicts(number, work, rows)


def disk_verdicts(number: str, work: str, rows: Rows) -> Iterator[Verdict]:
    """What the disk gave before and after, and our rate beside what that allows."""
    own = next(row for row in rows if row.get("engine") == "polyneuron")
    for probe in [row["disk"] for row in rows if "disk" in row]:
        for when, speeds in probe.items():
            yield Verdict("-", f"disk {when}", disk_speeds(speeds), "-", "-")
        if own["io_bytes_per_token"]:
            yield bound_verdict(number, work, own, [speeds[-1] for speeds in probe.values()])


def sweep() -> Iterator[Verdict]:
    """Speed by memory, each a quarter of the paper's, and both curves beside their first points."""
    model, last, first = sparse_model(), 0.0, 0.0
    for gigabytes, paper in PAPER.items():
        memory = f"{gigabytes * 1024 // DEPTH}MiB"
        row = own_bench(model, *SWEEP, "--memory", memory, *PREDICTED)
        rate, hits = row["avg_ts"], row["hit_rate"]
        first = first or rate
        grown, theirs = rate / first, paper / PAPER[7]
        shown = f"{rate:.2f} tok/s, hit rate {hits:.1%}, {grown:.2f}x; paper {theirs:.2f}x"
        verdict = judged(rate >= NOISE * last, load_doubt([row]))
        work = f"TurboSparse-Mixtral, 1/{DEPTH} of its depth, in {memory}"
        yield Verdict("-", work, shown, "grows", verdict)
        last = rate


PARTS: dict[str, Callable[[], Iterator[Verdict]]] = {
    "turbosparse": turbosparse, "qwen3moe": qwen3moe, "sweep": sweep,
}  # fmt: skip


def main(names: Sequence[str]) -> None:
    """Measure the parts named, or all, and print one table."""
    print_table(verdict for name in names or PARTS for verdict in PARTS[name]())


if __name__ == "__main__":
    main(sys.argv[1:])
