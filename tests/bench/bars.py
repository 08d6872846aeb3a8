"""Measures the bars of DESIGN §16 that this machine can: `python -m tests.bench.bars`.

A ratio taken while other processes held a core is printed and not judged.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polyneuron.measure.bench_report import IDLE_SHARE_MAX, STRANGERS_SHARE_MAX, markdown
from tests.bench.random_model import random_model

TEXT = Path(__file__).resolve().parents[1] / "data" / "text" / "genesis_1_12.txt"
LLAMA_CPP_PPL = 7.0892  # of TEXT at context 512, 8-bit activations
FLOAT_PPL = 7.0565  # float32, the file's weights dequantised
PPL_MARGIN = 0.005
OVERHEAD_MS_MAX = 0.5

Rows = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Verdict:
    """One line of the table."""

    row: str
    work: str
    measured: str
    bar: str
    verdict: str

    @property
    def cells(self) -> tuple[str, ...]:
        """The line's cells."""
        return self.row, self.work, self.measured, self.bar, self.verdict


def judged(is_met: bool, doubt: str = "") -> str:
    """met or not met; with a doubt neither."""
    return f"not judged: {doubt}" if doubt else "met" if is_met else "not met"


def load_doubt(rows: Rows) -> str:
    """What others used meanwhile, where that is much."""
    load = max(row["other_cores"] for row in rows)
    return f"other processes used {load:.0%} of a core" if load > STRANGERS_SHARE_MAX else ""


def doubt_of(rows: Rows, test: str) -> str:
    """Why a ratio of this test says little; empty when nothing speaks against it."""
    if doubt := load_doubt([row for row in rows if row.get("test") == test]):
        return doubt
    name, share = max(rows[-1]["idle_cores"].items(), key=lambda item: item[1])
    return f"{name} was not idle: {share:.0%} of a core" if share > IDLE_SHARE_MAX else ""


def ratio_verdicts(row: str, work: str, rows: Rows, bars: dict[str, float]) -> Iterator[Verdict]:
    """One verdict a test, in the order of `bars` (test to the least ratio)."""
    for test, least in bars.items():
        ratio, doubt = rows[-1]["ratio"][test], doubt_of(rows, test)
        what = f"{work}, {test}"
        yield Verdict(row, what, f"{ratio:.2f}x", f">= {least}x", judged(ratio >= least, doubt))


def overhead_verdict(rows: Rows) -> Verdict:
    """What a decode step costs outside kernels."""
    (overhead,) = [row["overhead_ms"] for row in rows if row.get("overhead_ms") is not None]
    bar = f"< {OVERHEAD_MS_MAX} ms"
    what = "SmolLM2, decode step outside kernels"
    return Verdict("-", what, f"{overhead:.3f} ms", bar, judged(overhead < OVERHEAD_MS_MAX))


def perplexity_verdict(ppl: float) -> Verdict:
    """Not above llama.cpp nor below the float figure, by more than the margin."""
    low, high = FLOAT_PPL * (1 - PPL_MARGIN), LLAMA_CPP_PPL * (1 + PPL_MARGIN)
    bar = f"{low:.4f} to {high:.4f}"
    return Verdict("11", "SmolLM2, perplexity", f"{ppl:.4f}", bar, judged(low <= ppl <= high))


def polyneuron(*arguments: str) -> Any:
    """The JSON that one run of the program prints; its progress goes to our stderr."""
    command = [sys.executable, "-m", "polyneuron", *arguments, "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    if done.returncode != 0:
        raise SystemExit(done.returncode)
    return json.loads(done.stdout)


def bench(model: str, *arguments: str) -> Rows:
    """Rows of a benchmark beside llama.cpp on two threads, as the bars say."""
    rows: Rows = polyneuron("bench", "-m", model, "-t", "2", "--peer", "llama.cpp", *arguments)
    return rows


def small_model() -> Iterator[Verdict]:
    """Bars on SmolLM2."""
    rows = bench("smollm2")
    yield from ratio_verdicts("1", "SmolLM2 Q4_1", rows, {"pp512": 2.0, "tg128": 1.0})
    yield overhead_verdict(rows)
    yield perplexity_verdict(polyneuron("perplexity", "-m", "smollm2", "-f", str(TEXT))["ppl"])


def big_model() -> Iterator[Verdict]:
    """Bars on the 7B shape."""
    model = random_model()
    if not model.is_there:
        yield Verdict("2", "7B shape Q4_0", "-", "-", "no file: make model-7b")
        return
    rows = bench(str(model.gguf), "-p", "128", "-n", "32", "-r", "3")
    yield from ratio_verdicts("2", "7B shape Q4_0", rows, {"pp128": 1.3, "tg32": 1.0})


PARTS: dict[str, Callable[[], Iterator[Verdict]]] = {"smollm2": small_model, "7b": big_model}


def print_table(verdicts: Iterable[Verdict]) -> None:
    """All of them as one table."""
    head = ("row", "work", "measured", "bar", "verdict")
    print("\n".join(markdown([head, *(verdict.cells for verdict in verdicts)], len(head))))


def main(names: list[str]) -> None:
    """Measure the parts named, or all, and print one table."""
    print_table(verdict for name in names or PARTS for verdict in PARTS[name]())


if __name__ == "__main__":
    main(sys.argv[1:])
