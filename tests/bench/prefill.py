"""Prompts beside llama.cpp, in memory and out of it: `python -m tests.bench.prefill [PART …]`.

How much of the processor's int8 peak the products reach is told beside the speeds. The 7B files
have random weights of Mistral-7B's shape.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from polyneuron.model.locate import locate_model
from polyneuron.planning.source import open_source
from polyneuron.tracing.collector import read_recording
from polyneuron.tracing.recording import PREFILL, Step
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
from tests.bench.streaming import figures

SMALL_MIN, BIG_MIN, FLASH_MIN, OF_MEMORY_MIN = 2.0, 1.3, 1.3, 0.9
THREADS = "2"
MODEL_LIMIT = "3400MiB"
"""For half of the feed-forward layers of the 7B shape, its other weights, Ray and Python."""
HALF = ("--ffn-resident", "0.5")
LONG = ("-p", "512", "-n", "0", "-r", "2")
TRACED = (128, 512)
"""Lengths of prompts whose reads are to be hidden, as their timelines show."""
STALL_MAX = 0.05
PEAK_MS = "500"
EMBEDDING, HEAD = "token_embd.weight", "output.weight"


def memory() -> Iterator[Verdict]:
    """Both models in memory."""
    peak = int8_peak()
    rows = bench("smollm2", "-p", "512", "-n", "0")
    yield from ratio_verdicts("1", "SmolLM2 Q4_1", rows, {"pp512": SMALL_MIN})
    yield efficiency("SmolLM2 Q4_1, 512", locate_model("smollm2"), rows[0]["avg_ts"], peak)
    model = ensure_model()
    rows = bench(str(model.gguf), "-p", "128", "-n", "0", "-r", "3")
    yield from ratio_verdicts("2", "7B Q4_0", rows, {"pp128": BIG_MIN})
    yield efficiency("7B Q4_0, 128", model.gguf, rows[0]["avg_ts"], peak)


def flash() -> Iterator[Verdict]:
    """Half of the feed-forward layers of a 7B read ahead of the layer that computes."""
    model = ensure_model()
    (whole,) = _own_rows(str(model.ncf), *LONG)
    rows = bench(
        str(model.ncf), "--peer-model", str(model.gguf), *LONG, "--memory", MODEL_LIMIT, *HALF
    )
    own = next(row for row in rows if row.get("engine") == "polyneuron")
    yield from figures([whole, *(row for row in rows if "engine" in row)])
    share = own["avg_ts"] / whole["avg_ts"]
    work = f"7B Q4_0 in {MODEL_LIMIT}, half of the FFN on flash"
    verdict = judged(share >= OF_MEMORY_MIN, load_doubt([whole, own]))
    yield Verdict(
        "-", f"{work}: of its speed in memory", f"{share:.0%}", f">= {OF_MEMORY_MIN:.0%}", verdict
    )
    yield from ratio_verdicts("-", work, rows, {"pp512": FLASH_MIN})
    for tokens in TRACED:
        rows, steps = traced_prompts(str(model.ncf), tokens)
        yield hidden_reads(f"{work}, {tokens} tokens", rows, steps)


def traced_prompts(model: str, tokens: int) -> tuple[Rows, list[Step]]:
    """Prompts of so many tokens with half of the feed forward on flash, and their whole steps."""
    with tempfile.TemporaryDirectory(prefix="polyneuron-") as folder:
        path = Path(folder) / "prompts.jsonl"
        counts = ("-p", str(tokens), "-n", "0", "-r", "2", "--trace", str(path))
        rows = _own_rows(model, *counts, "--memory", MODEL_LIMIT, *HALF)
        return rows, whole_prompts(path, tokens)


def whole_prompts(timeline: Path, tokens: int) -> list[Step]:
    """The steps of a timeline in which a prefill program computes so many tokens or more."""
    steps = read_recording(timeline).steps
    return [step for step in steps if step.graph == PREFILL and step.tokens >= tokens]


def hidden_reads(work: str, rows: Rows, steps: Sequence[Step]) -> Verdict:
    """How much of such steps' time the executors wait for flash."""
    stalled = sum(step.stall_ns or 0 for step in steps)
    share = stalled / sum(step.executor_ns for step in steps)
    mib = sum(step.bytes or 0 for step in steps) / len(steps) / 2**20
    told = f"{share:.1%} of the step, {mib:.0f} MiB read for each"
    verdict = judged(share <= STALL_MAX, load_doubt(rows))
    return Verdict("-", f"{work}: stalled on reads", told, f"<= {STALL_MAX:.0%}", verdict)


def _own_rows(model: str, *arguments: str) -> Rows:
    rows: Rows = polyneuron("bench", "-m", model, "-t", THREADS, *arguments)
    return [row for row in rows if "engine" in row]


def int8_peak() -> float | None:
    """Multiplies and adds a second of two cores; None where no instruction for it is known."""
    source = Path(__file__).with_name("int8_peak.c")
    compiler = (sysconfig.get_config_var("CC") or "cc").split()
    with tempfile.TemporaryDirectory(prefix="polyneuron-") as folder:
        program = Path(folder) / "int8_peak"
        subprocess.run([*compiler, "-O2", source, "-o", program, "-lpthread"], check=True)
        done = subprocess.run([program, THREADS, PEAK_MS], stdout=subprocess.PIPE, check=True)
    return float(done.stdout.split()[0]) or None


def efficiency(work: str, path: Path, tokens_per_s: float, peak: float | None) -> Verdict:
    """What the model's matrices come to a second, by the peak."""
    rate = 2.0 * products(path) * tokens_per_s
    of_peak = f", {rate / peak:.0%} of {peak / 1e9:.0f} (int8 peak)" if peak else ""
    return Verdict("-", f"{work}: products", f"{rate / 1e9:.0f} GOP/s{of_peak}", "-", "-")


def products(path: Path) -> int:
    """Weights that a token of a prompt is multiplied with: all but embedding and head."""
    tensors = open_source(path).manifest.tensors
    return sum(
        tensor.rows * tensor.cols
        for tensor in tensors
        if tensor.storage is not None and tensor.name not in (EMBEDDING, HEAD)
    )


PARTS: dict[str, Callable[[], Iterator[Verdict]]] = {"memory": memory, "flash": flash}


def main(names: Sequence[str]) -> None:
    """Measure the parts named, or both, and print one table."""
    print_table(verdict for name in names or PARTS for verdict in PARTS[name]())


if __name__ == "__main__":
    main(sys.argv[1:])
