"""One scenario by both players on this machine: `make bench-replay`, or
`python -m tests.bench.replay [PART …]`.

The machine is probed, then each scenario is replayed on the real actors and simulated with what the
probe found. Tokens a second must agree within 15 %; what is read a token, and how many neurons were
in memory, stands beside it and must agree too, since a rate may be right for the wrong reasons.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polyneuron.clock import MonotonicClock
from polyneuron.config import cache_folder
from polyneuron.io.predictor_file import predictor_path
from polyneuron.measure.bench_report import STRANGERS_SHARE_MAX
from polyneuron.measure.speed import busy_ticks
from tests.bench.bars import TEXT, Verdict, judged, polyneuron, print_table
from tests.bench.random_model import note
from tests.bench.sparse import sparse_model
from tests.support.models import DRELU, NO_DRELU

RATE_OFF_MAX = 0.15
COUNT_OFF_MAX, HITS_OFF_MAX = 0.1, 0.01
"""Of what is counted: by what was replayed, and of hits in points."""
OTHER_TEXT = 3
"""So many times as far off where a text is replayed that is not the one the activity was counted
in."""
LOOK_NS = 2_000_000_000
"""How long others are watched."""
MIB = 1 << 20
PAGE = """
name = "both"
[device]
profile = "here"
[model]
file = "{model}"
[engine]
mode = "{mode}"
ffn_resident = {share}
context = {context}
max_sequences = {sequences}
deterministic = false
{hot}
[[requests]]
prompt_tokens = 16
output_tokens = {tokens}
count = {sequences}
"""


@dataclass(frozen=True, slots=True)
class Case:
    """One scenario."""

    work: str
    model: Path
    share: float
    mode: str = "predicted"
    tokens: int = 96
    sequences: int = 1
    hot: str = ""
    leeway: float = 1.0
    """Of what is counted."""

    @property
    def page(self) -> str:
        """Its text."""
        return PAGE.format(
            model=self.model, mode=self.mode, share=self.share, hot=self.hot, tokens=self.tokens,
            sequences=self.sequences, context=2 * self.tokens,
        )  # fmt: skip


def both(case: Case) -> tuple[dict[str, Any], dict[str, Any], float]:
    """Figures replayed and simulated, and the cores that others used around the replay."""
    with tempfile.TemporaryDirectory(prefix="polyneuron-") as folder:
        path = Path(folder) / "both.toml"
        path.write_text(case.page)
        before = strangers()
        replayed = polyneuron("replay", str(path))["figures"]
        others = max(before, strangers())
        return replayed, polyneuron("simulate", str(path))["figures"], others


def strangers() -> float:
    """Cores that are busy while this process waits."""
    clock = MonotonicClock()
    begin, busy = clock.now_ns(), busy_ticks()
    clock.wait_ns(LOOK_NS)
    seconds = (busy_ticks() - busy) / os.sysconf("SC_CLK_TCK")
    return seconds * 1e9 / (clock.now_ns() - begin)


def verdicts(case: Case) -> Iterator[Verdict]:
    """A line for each figure of a scenario."""
    real, model, others = both(case)
    count_off, hits_off = COUNT_OFF_MAX * case.leeway, HITS_OFF_MAX * case.leeway
    busy = f"other processes used {others:.0%} of a core" if others > STRANGERS_SHARE_MAX else ""
    lines: list[tuple[str, str, float, str, Callable[[float, float], float], float]] = [
        ("decode_tok_s", "tok/s", 1.0, busy, _ratio_off, RATE_OFF_MAX),
        ("bytes_per_token", "MiB a token", MIB, "", _ratio_off, count_off),
        ("reads_per_token", "reads a token", 1.0, "", _ratio_off, count_off),
        ("hit_rate", "of the neurons in memory", 0.01, "", _share_off, hits_off),
    ]
    for name, unit, scale, doubt, off, most in lines:
        was, said = real.get(name), model.get(name)
        if was is None or said is None or not (was or said):
            continue
        percent = "%" if off is _share_off else ""
        shown = f"{was / scale:.4g}{percent} {unit}; simulated {said / scale:.4g}{percent}"
        distance = off(said, was)
        bar = f"within {most:.0%}" if off is _ratio_off else f"within {100 * most:g} points"
        ratio = f", {said / was:.2f}x" if was and off is _ratio_off else ""
        yield Verdict("-", case.work, shown + ratio, bar, judged(distance <= most, doubt))


def _ratio_off(one: float, other: float) -> float:
    return abs(one / other - 1) if other else float("inf")


def _share_off(one: float, other: float) -> float:
    return abs(one - other)


def big() -> Iterator[Verdict]:
    """The synthetic Bamboo-7B with half of its feed forward in memory."""
    path = sparse_model().ncf
    yield from verdicts(Case("7B, half of the FFN in memory", path, 0.5, tokens=64))


def hot() -> Iterator[Verdict]:
    """The same with one cluster in 32 of each layer hot."""
    path, hot = sparse_model().ncf, "hot_shares = [0.03125]"
    yield from verdicts(Case("7B, half, a cluster of 32 hot", path, 0.5, tokens=64, hot=hot))


def batch() -> Iterator[Verdict]:
    """Three sequences at once, with more hot clusters than one alone has."""
    path, shares = sparse_model().ncf, "hot_shares = [0.0625, 0.0625, 0.125]"
    case = Case("7B, 60 %, three sequences", path, 0.6, tokens=32, sequences=3, hot=shares)
    yield from verdicts(case)


def real() -> Iterator[Verdict]:
    """A real dReLU model, whose neurons a text needs."""
    if (path := _real_model()) is None:
        yield Verdict("-", "SmolLM2-135M, dReLU", "-", "-", NO_DRELU)
        return
    for mode in ("predicted", "exact"):
        work = f"SmolLM2-135M, dReLU, half of the FFN in memory, {mode}"
        yield from verdicts(Case(work, path, 0.5, mode, leeway=OTHER_TEXT))


def _real_model() -> Path | None:
    """The file in bundles, hottest neurons first, profiled on a text; made once."""
    path = cache_folder() / f"bench-{DRELU.stem}.ncf"
    if not DRELU.is_file():
        return None
    if not predictor_path(path).is_file():
        note(f"converting and profiling {DRELU.name}; `make clean` removes it")
        path.parent.mkdir(parents=True, exist_ok=True)
        run = [("convert", str(DRELU), "-o", str(path), "--layout", "bundles", "--force"),
               ("profile", "-m", str(path), "--text", str(TEXT), "--tokens", "1024")]  # fmt: skip
        for arguments in run:
            _quietly(*arguments)
    return path


def _quietly(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "polyneuron", *arguments], check=True,
                   stdout=subprocess.DEVNULL)  # fmt: skip


PARTS: dict[str, Callable[[], Iterator[Verdict]]] = {
    "big": big,
    "hot": hot,
    "batch": batch,
    "real": real,
}


def main(names: Sequence[str]) -> None:
    """Probe the machine, play the parts named, or all, and print one table."""
    polyneuron("profile", "--device", "-m", str(sparse_model().ncf))
    print_table(verdict for name in names or PARTS for verdict in PARTS[name]())


if __name__ == "__main__":
    main(sys.argv[1:])
