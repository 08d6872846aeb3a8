"""A recording as one HTML page that needs nothing else: its data, style and script are in it."""

from __future__ import annotations

import html
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyneuron.tracing.op_waits import flash_waits_ns
from polyneuron.tracing.packing import PackedColumn, pack_column, pack_payload
from polyneuron.tracing.read_lanes import read_lanes
from polyneuron.tracing.read_uses import read_uses
from polyneuron.tracing.record_table import RecordTable, Words
from polyneuron.tracing.recording import Detail, Recording, Step
from polyneuron.tracing.summary import Figures

MAX_RECORDS = 800_000
"""Records of detail in a page: about 8 MB. Of a recording with more, evenly chosen steps stay."""
TICK_NS = 100
"""Unit of times in a page: finer ones would only make it bigger."""

SCRIPTS = (
    "unpack.js", "text.js", "chart.js", "draw_pipeline.js", "overview.js", "pointing.js",
    "pipeline.js", "page.js",
)  # fmt: skip
STYLES = ("colours.css", "page.css")
_PARTS = files("polyneuron.tracing") / "page"
_NULLABLE = (
    "compute_ns", "stall_ns", "wait_ns", "bytes", "reads", "hits", "misses",
)  # fmt: skip


def page_of(recording: Recording, figures: Figures, max_records: int = MAX_RECORDS) -> str:
    """The page; `figures` are those of `summarize`."""
    detail = thinned(recording.detail, max_records)
    columns = [*_columns(recording, detail)]
    head = _head(recording, figures, detail)
    text = _part("page.html")
    title = str(recording.run.get("model", "timeline"))
    for place, content in {
        "TITLE": html.escape(title.encode(errors="replace").decode()),
        "STYLE": "\n".join(_part(name) for name in STYLES),
        "SCRIPT": "\n".join(_part(name) for name in SCRIPTS),
        "DATA": pack_payload(head, columns),  # last: none of the others may hold its place
    }.items():
        text = text.replace(f"%{place}%", content)
    return text


def thinned(detail: Detail, max_records: int) -> Detail:
    """A detail with every n-th step that has one, so that at most so many records are left."""
    steps, counts = np.unique(
        np.concatenate([table.column("step") for table in _tables(detail)]), return_counts=True
    )
    every = 1
    while counts[::every].sum() > max_records and every < len(steps):
        every += 1
    if every == 1:
        return detail
    kept = steps[::every]
    return Detail(
        detail.kinds,
        detail.stages,
        {actor: _of_steps(table, kept) for actor, table in detail.ops.items()},
        {actor: _of_steps(table, kept) for actor, table in detail.clusters.items()},
        _of_steps(detail.reads, kept),
    )


def _tables(detail: Detail) -> list[RecordTable]:
    return [*detail.ops.values(), *detail.clusters.values(), detail.reads]


def _of_steps(table: RecordTable, steps: NDArray[np.int64]) -> RecordTable:
    return table.where(np.isin(table.column("step"), steps))


def _part(name: str) -> str:
    return (_PARTS / name).read_text(encoding="utf-8")


def _head(recording: Recording, figures: Figures, detail: Detail) -> dict[str, Any]:
    """What is not in columns; steps are, and need not be there twice."""
    return {
        "figures": {name: value for name, value in figures.items() if name != "steps"},
        "tick_ns": TICK_NS,
        "span": _ticks(recording.last_ns - recording.first_ns),
        "executors": detail.executors(),
        "kinds": detail.kinds,
        "stages": detail.stages,
        "phases": _words(step.phase for step in recording.steps),
        "graphs": _words(step.graph for step in recording.steps),
        "records": detail.num_records(),
        "records_recorded": recording.detail.num_records(),
    }


def _words(words: Iterator[str]) -> list[str]:
    numbered = Words()
    for word in words:
        numbered.number(word)
    return numbered.all()


def _ticks(ns: int) -> int:
    return ns // TICK_NS


def _columns(recording: Recording, detail: Detail) -> Iterator[PackedColumn]:
    first_ns = recording.first_ns
    yield from _step_columns(recording.steps, first_ns, _steps_of(detail))
    yield from _table_columns("tokens", recording.tokens, first_ns)
    yield from _table_columns("residency", recording.residency, first_ns)
    for index, actor in enumerate(detail.executors()):
        yield from _table_columns(f"ops{index}", detail.ops_of(actor), first_ns)
        flash = flash_waits_ns(detail, actor) // TICK_NS
        yield pack_column(f"ops{index}.flash", flash)
        yield from _table_columns(f"clusters{index}", detail.clusters_of(actor), first_ns)
    yield from _table_columns("reads", detail.reads, first_ns)
    yield pack_column("reads.lane", read_lanes(detail.reads))
    uses = read_uses(detail)
    yield pack_column("reads.executor", uses.executor)
    yield pack_column("reads.use_t", _since(uses.t_ns, first_ns) * (uses.executor >= 0))
    yield pack_column("reads.waited", uses.ended_wait.astype(np.int64))


def _table_columns(name: str, table: RecordTable, first_ns: int) -> Iterator[PackedColumn]:
    """Every column of a table; a time as ticks since the first event."""
    for column in table.names:
        values = table.column(column)
        if column == "t_ns":
            values = _since(values, first_ns)
        elif column in {"ns", "wait_ns", "stall_ns"}:
            values = values // TICK_NS
        yield pack_column(f"{name}.{_short(column)}", values)


def _short(column: str) -> str:
    return {"t_ns": "t", "ns": "d", "wait_ns": "wait", "stall_ns": "stall"}.get(column, column)


def _since(values: NDArray[np.int64], first_ns: int) -> NDArray[np.int64]:
    return (values - first_ns) // TICK_NS


def _steps_of(detail: Detail) -> set[int]:
    """The steps that have records."""
    found: set[int] = set()
    for table in _tables(detail):
        found.update(np.unique(table.column("step")).tolist())
    return found


def _step_columns(steps: list[Step], first_ns: int, detailed: set[int]) -> Iterator[PackedColumn]:
    """What was not measured is -1."""
    phases = _words(step.phase for step in steps)
    graphs = _words(step.graph for step in steps)
    found: dict[str, list[int]] = {
        "t": [_ticks(step.t_ns - first_ns) for step in steps],
        "d": [_ticks(step.ns) for step in steps],
        "step": [step.step for step in steps],
        "phase": [phases.index(step.phase) for step in steps],
        "graph": [graphs.index(step.graph) for step in steps],
        "tokens": [step.tokens for step in steps],
        "sequences": [step.sequences for step in steps],
        "executors": [step.executors for step in steps],
        "detail": [int(step.detail and step.step in detailed) for step in steps],
    }
    for name in _NULLABLE:
        measured = [getattr(step, name) for step in steps]
        unit = TICK_NS if name.endswith("_ns") else 1
        found[name.removesuffix("_ns")] = [-1 if v is None else v // unit for v in measured]
    for name, values in found.items():
        yield pack_column(f"steps.{name}", np.array(values, dtype=np.int64))
