"""The figures of a timeline as tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.table import Table

from polyneuron.cli.shown import amount, result_console, shown
from polyneuron.tracing.summary import DISTRIBUTION, Figures

PLAIN_WIDTH = 100
MAX_CHANGES = 12
"""Switches that are shown; faults and restarts are shown all."""
NONE = "-"
_NOT_KEYS = {"t_ms", "actor", "event"}


def show(figures: Figures) -> None:
    """Print what happened, what a token cost, who was busy, and what changed."""
    console = result_console(PLAIN_WIDTH)
    for line in _facts(figures):
        console.print(line, soft_wrap=True)
    tables = (requests(figures), costs(figures), executors(figures), events(figures))
    for table in tables:
        if table.row_count:
            console.print(table)
    for line in _notes(figures):
        console.print(line, soft_wrap=True)


def _facts(figures: Figures) -> list[str]:
    run = figures["run"]
    if run is None:
        return ["run: not known, the timeline does not begin with it"]
    clock = "model time, simulated" if run["clock"] == "model" else "real time"
    who = f"CPU workers {run['workers']}, NPU threads {run['npu_threads']}"
    line = f"{run['model']}: {run['mode']} mode, {who}, {run['isa']}, policy {run['policy']}"
    steps = sum(figures[name]["steps"] for name in ("prefill", "decode") if figures[name])
    return [shown(line), f"{ms(figures['duration_ms'])} of {clock}, {steps:,} steps"]


def requests(figures: Figures) -> Table:
    """A row a request: when its first token came, and the times between the others."""
    headings = ("prompt", "tokens", "end", "first token", *DISTRIBUTION)
    table = _table("request", headings, "time between tokens in the last four columns")
    for request in figures["requests"]:
        times = [ms(request["tbt_ms"][name]) for name in DISTRIBUTION]
        end = request["reason"] or request["state"] or NONE
        counts = [f"{request[name]:,}" for name in ("prompt_tokens", "tokens")]
        row = [str(request["request"]), *counts, shown(end), ms(request["ttft_ms"]), *times]
        table.add_row(*row)
    return table


def costs(figures: Figures) -> Table:
    """What a token of each phase cost: times are of all executors together."""
    table = _table("per token", DISTRIBUTION)
    for name in ("decode", "prefill"):
        phase = figures[name]
        if phase is None:
            continue
        rate = phase["tokens_per_second"]
        heading = f"{name}: {NONE if rate is None else f'{rate:,.2f}'} tokens/s"
        table.add_row(heading, *[""] * len(DISTRIBUTION))
        _add(table, "  whole step", phase["step_ms"], ms)
        token = phase["token"]
        for what, part in (("compute", "compute"), ("waits for flash", "stall"),
                           ("waits for others", "wait")):  # fmt: skip
            label = f"  {what}, {share(phase[f'{part}_share'])} of the time"
            _add(table, label, token[f"{part}_ms"], ms)
        for what in ("needed", "hits", "misses", "predicted", "active"):
            _add(table, f"  neurons {what}", token[what], count)
        _add(table, "  miss rate", phase["miss_rate"], share)
        _add(table, "  bytes read", token["bytes"], lambda value: amount(_whole(value)))
        _add(table, "  reads", token["reads"], count)
    return table


def executors(figures: Figures) -> Table:
    """How each executor spent the steps with detail."""
    number = figures["detailed_steps"]
    note = f"shares of the {number:,} steps with detail"
    table = _table("executor", ("busy", "waits for flash", "waits for others"), note)
    for executor in figures["executors"]:
        shares = [share(executor[f"{name}_share"]) for name in ("busy", "stall", "wait")]
        table.add_row(shown(executor["executor"]), *shares)
    return table


def events(figures: Figures) -> Table:
    """Faults, restarts, and the first switches of batch, graph, phase and plan."""
    changes = figures["changes"]
    rows = [*changes[:MAX_CHANGES], *figures["faults"], *figures["restarts"]]
    more = len(changes) - MAX_CHANGES
    note = f"{more:,} more switches: --json has them all" if more > 0 else None
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, caption=note, caption_justify="left")
    table.add_column("at", justify="right")
    for heading in ("event", "what", "told by"):
        table.add_column(heading)
    for row in sorted(rows, key=lambda row: float(row["t_ms"])):
        what = ", ".join(
            f"{key} {NONE if value == '' else shown(value)}"
            for key, value in row.items()
            if key not in _NOT_KEYS
        )
        table.add_row(ms(row["t_ms"]), row["event"], what, shown(row["actor"]))
    return table


def _notes(figures: Figures) -> list[str]:
    notes = []
    flash = figures["flash"]
    if flash is not None:
        times = flash["read_ms"]
        notes.append(
            f"flash: {flash['reads']:,} reads with detail, {amount(flash['bytes'])}, "
            f"P50 {ms(times['p50'])}, P99 {ms(times['p99'])}, {flash['failed']:,} failed"
        )
    if figures["lost_records"]:
        notes.append(f"{figures['lost_records']:,} records did not fit their rings and are lost")
    return notes


def _table(first: str, headings: Sequence[str], note: str | None = None) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, caption=note, caption_justify="left")
    table.add_column(first)
    for heading in headings:
        table.add_column(heading.replace("p", "P") if heading in DISTRIBUTION[1:] else heading,
                         justify="right")  # fmt: skip
    return table


def _add(table: Table, label: str, values: dict[str, Any], text: Any) -> None:
    table.add_row(label, *(text(values[name]) for name in DISTRIBUTION))


def _whole(value: float | None) -> int | None:
    return None if value is None else round(value)


def ms(value: float | None) -> str:
    """A time for people, from ms; `-` where it was not measured."""
    if value is None:
        return NONE
    return f"{value / 1000:,.3f} s" if value >= 10_000 else f"{value:,.3f} ms"


def share(value: float | None) -> str:
    """A share for people; `-` where it was not measured."""
    return NONE if value is None else f"{100 * value:.1f} %"


def count(value: float | None) -> str:
    """A count for people; `-` where it was not measured."""
    return NONE if value is None else f"{value:,.1f}"
