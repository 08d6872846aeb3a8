"""Plans against what runs then give: `make bench-sparse PARTS="plan knobs"` (docs/PLANNING.md)."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.bench.bars import Rows, Verdict, judged, load_doubt, polyneuron
from tests.bench.random_model import RandomModel

SHARES = ("0.3", "0.5", "0.8")
"""Of the feed-forward weights in memory: budgets that expectations are held against."""
OFF_MAX = 0.20
GAIN_MAX = 1.05
TOKENS = ("-p", "0", "-n", "48", "-r", "3")
PREDICTED = ("--mode", "predicted")
CONTEXT = ("-c", "64")
"""What the benchmark's tokens need: a plan for more would keep fewer weights."""

Bench = Callable[..., dict[str, Any]]


def changed(plan: str, changes: dict[str, str]) -> str:
    """A plan with keys of its table `engine` set; those it lacks are added."""
    for key, value in changes.items():
        line = f"{key} = {value}"
        plan, count = re.subn(rf"(?m)^{key} = .*$", line, plan)
        if not count:
            plan = plan.replace("[engine]\n", f"[engine]\n{line}\n")
    return plan


def with_hot(plan: str, hot_clusters: int) -> str:
    """A plan with so many hot clusters for one sequence, and none named for more."""
    return re.sub(r"(?ms)^\[hot_clusters\]\n.*", f"[hot_clusters]\n1 = {hot_clusters}\n", plan)


def expectations(model: RandomModel, bench: Bench) -> Iterator[Verdict]:
    """What `plan` expects of a run as it is asked for, beside what that run gives.

    Shared machines change within the hour, so each run's is probed right before it. A run before
    all of them reads what they will read: behind a virtual disk lies the host's page cache, and
    a file's first reads came from there at 60,000 a second or past it at 10,000.
    """
    bench(model, "-p", "0", "-n", "16", "-r", "1", "--ffn-resident", SHARES[0], *PREDICTED)
    for share in SHARES:
        polyneuron("profile", "--device", "-m", str(model.ncf))
        flags = ("--ffn-resident", share, *PREDICTED)
        plan = polyneuron("plan", "-m", str(model.ncf), "-t", "2", *CONTEXT, *flags)
        row = bench(model, *TOKENS, *flags)
        expected, measured = plan["expected"], row["avg_ts"]
        rate = expected["tokens_per_second"]
        read = f"{expected['bytes_per_token'] / 2**20:.1f} MiB a token"
        was_read = f"{(row['io_bytes_per_token'] or 0) / 2**20:.1f}"
        shown = f"{rate:.1f} tok/s, {read}; {measured:.1f}, {was_read}"
        verdict = judged(abs(rate / measured - 1) <= OFF_MAX, load_doubt([row]))
        work = f"{float(share):.0%} of the FFN in memory: expected; measured"
        yield Verdict("-", work, shown, f"within {OFF_MAX:.0%}", verdict)


def knobs(model: RandomModel, limits: tuple[str, ...], bench: Bench) -> Iterator[Verdict]:
    """Each knob of a plan moved by one step: none may gain much, or the planner missed it."""
    with tempfile.TemporaryDirectory(prefix="polyneuron-") as folder:
        path = Path(folder) / "plan.toml"
        polyneuron("plan", "-m", str(model.ncf), *CONTEXT, *limits, *PREDICTED, "-o", str(path))
        text, rows = path.read_text(), []
        for name, plan in {"the plan": text, **moves(text)}.items():
            path.write_text(plan)
            rows.append((name, bench(model, "--plan", str(path), *TOKENS)))
    planned = rows[0][1]
    for name, row in rows:
        yield knob_verdict(name, row, planned)


def knob_verdict(name: str, row: dict[str, Any], planned: dict[str, Any]) -> Verdict:
    """A moved knob's speed by the plan's."""
    gain = row["avg_ts"] / planned["avg_ts"]
    shown = f"{row['avg_ts']:.2f} tok/s, {gain:.2f}x"
    both: Rows = [row, planned]
    verdict = "-" if row is planned else judged(gain <= GAIN_MAX, load_doubt(both))
    return Verdict(
        "-", f"knob: {name}", shown, "-" if row is planned else f"<= {GAIN_MAX}x", verdict
    )


def moves(plan: str) -> dict[str, str]:
    """Plans with one knob moved, by what was moved."""
    workers, depth = _number(plan, "workers"), _number(plan, "queue_depth")
    ahead = "false" if "lookahead = true" in plan else "true"
    hot = int(found.group(1)) if (found := re.search(r"(?m)^1 = (\d+)", plan)) else 0
    moved = {
        f"{each} workers": changed(plan, {"workers": str(each)})
        for each in (workers - 1, workers + 1)
        if each
    }
    for each in (depth // 2, depth * 2):
        moved[f"{each} reads at once"] = changed(plan, {"queue_depth": str(each)})
    moved[f"lookahead {ahead}"] = changed(plan, {"lookahead": ahead})
    for each in sorted({max(0, hot - 2), hot // 2, hot + 2} - {hot}):
        moved[f"{each} hot clusters, not {hot}"] = with_hot(plan, each)
    moved["hot clusters on the NPU executor"] = changed(plan, {"hot_on_npu": "true"})
    return moved


def _number(plan: str, key: str) -> int:
    found = re.search(rf"(?m)^{key} = (\d+)", plan)
    assert found, key
    return int(found.group(1))
