"""7B files bigger than memory beside llama.cpp's mmap: `python -m tests.bench.streaming [PART]`.

`polyneuron bench` runs both in memory cgroups of one size, in turn. A longer run of ours alone
tells how even its tokens are.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence

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
from tests.bench.random_model import ensure_model

TEST = "tg16"
RACE = ("-p", "0", "-n", "16", "-r", "3")
LONG_RUN = ("-p", "0", "-n", "256", "-r", "1")
DENSE_RATIO_MIN = 2.0
EXACT_RATIO_MIN = 8.0
P99_BY_MEAN_MAX = 1.41
STALL_SHARE_MAX = 0.137
NO_CGROUP = "no memory cgroup can be made here"


def dense() -> Iterator[Verdict]:
    """Row 7: every layer is needed for every token."""
    yield from race(
        "7", "7B dense Q4_0 in 3 GiB", "mistral-7b", DENSE_RATIO_MIN, "--memory", "3GiB"
    )


def exact() -> Iterator[Verdict]:
    """Rows 4, 8 and 9: a tenth of the neurons is needed, half of them are not in memory."""
    limits = ("--memory", "3200MiB", "--ffn-resident", "0.5", "--mode", "exact")
    work = "7B dReLU Q4_0 in 3200 MiB, half of the FFN on flash"
    yield from race("4", work, "bamboo-7b", EXACT_RATIO_MIN, *limits)
    (row, *_) = polyneuron("bench", "-m", str(ensure_model("bamboo-7b").ncf), *LONG_RUN, *limits)
    p99, stall = row["token_ms"]["p99"] / row["token_ms"]["mean"], row["stall_share"]
    doubt = load_doubt([row])
    verdict = judged(p99 <= P99_BY_MEAN_MAX, doubt)
    yield Verdict("8", f"{work}: P99 / mean", f"{p99:.2f}", f"<= {P99_BY_MEAN_MAX}", verdict)
    verdict = judged(stall <= STALL_SHARE_MAX, doubt)
    yield Verdict("9", f"{work}: stall", f"{stall:.1%}", f"<= {STALL_SHARE_MAX:.1%}", verdict)
    yield from figures([row])


def race(number: str, work: str, shape: str, ratio_min: float, *limits: str) -> Iterator[Verdict]:
    """Both engines on the files of a shape: figures of each, and the ratio beside its bar."""
    model = ensure_model(shape)
    rows = bench(str(model.ncf), "--peer-model", str(model.gguf), *RACE, *limits)
    yield from figures([row for row in rows if "engine" in row])
    for probe in [row["disk"] for row in rows if "disk" in row]:
        for when, speeds in probe.items():
            yield Verdict("-", f"disk {when}", disk_speeds(speeds), "-", "-")
    (verdict,) = ratio_verdicts(number, work, rows, {TEST: ratio_min})
    is_limited = all(row["memory_limit_bytes"] for row in rows if "engine" in row)
    doubt = verdict.verdict if is_limited else judged(False, NO_CGROUP)
    yield Verdict(verdict.row, verdict.work, verdict.measured, verdict.bar, doubt)


def figures(rows: Rows) -> Iterator[Verdict]:
    """What was measured, with nothing to hold it against."""
    for row in rows:
        parts = [f"{row['avg_ts']:.3f} tok/s", f"peak {row['peak_bytes'] >> 20} MiB"]
        if (num_bytes := row["io_bytes_per_token"]) is not None:
            parts.append(f"{num_bytes / 2**20:.1f} MiB a token")
        if row["hit_rate"] is not None:
            parts.append(f"hit rate {row['hit_rate']:.1%}")
        if row["stall_share"] is not None:
            parts.append(f"stall {row['stall_share']:.1%}")
        yield Verdict("-", f"{row['engine']}, {row['test']}", ", ".join(parts), "-", "-")


def disk_speeds(speeds: Rows) -> str:
    """A probe's rows in a cell."""
    return ", ".join(
        f"{row['bytes_per_second'] / 1e6:.0f} MB/s, {row['reads_per_second'] / 1e3:.1f}k/s "
        f"{row['pattern']} {row['read_bytes']} B"
        for row in speeds
    )


PARTS: dict[str, Callable[[], Iterator[Verdict]]] = {"dense": dense, "exact": exact}


def main(names: Sequence[str]) -> None:
    """Measure the parts named, or both, and print one table."""
    print_table(verdict for name in names or PARTS for verdict in PARTS[name]())


if __name__ == "__main__":
    main(sys.argv[1:])
