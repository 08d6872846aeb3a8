"""A profile as a table and as JSON."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table

from polyneuron.cli.inspect_activations import percent
from polyneuron.cli.shown import amount, result_console

if TYPE_CHECKING:
    from polyneuron.profiling.profile import Made

PLAIN_WIDTH = 120
COLUMNS = ("gated", "active", "batch 4", "top 20 %", "overlap", "tail")
PREDICTED = ("rank", "named", "recall", "kept", "precise")


def show(made: Made) -> None:
    """Print the table and what its columns are."""
    console = result_console(PLAIN_WIDTH)
    console.print(profile_table(made))
    for line in legend(made):
        console.print(line, soft_wrap=True)


def profile_table(made: Made) -> Table:
    """A row for each layer, the means below."""
    rows = [_cells(layer.facts) for layer in made.profile.layers]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_footer=True)
    table.add_column("layer", justify="right", footer="mean")
    for index, heading in enumerate(COLUMNS):
        mean = sum(row[index] for row in rows) / len(rows)
        footer = f"{mean:.2f}" if heading == "tail" else percent(mean)
        table.add_column(heading, justify="right", footer=footer)
    reports = made.report.get("layers", [])
    if reports:
        for heading, footer in zip(PREDICTED, _report_cells(made.report["mean"]), strict=True):
            table.add_column(heading, justify="right", footer=footer)
    for index, row in enumerate(rows):
        cells = [percent(value) for value in row[:-1]] + [f"{row[-1]:.2f}"]
        more = _report_cells(reports[index]) if reports else []
        table.add_row(str(index), *cells, *more)
    return table


def _cells(facts: Any) -> list[float]:
    lift = facts["tail_together"] / facts["tail_expected"] if facts["tail_expected"] else 0.0
    return [
        facts["gated_share"], facts["active_share"], facts["batch_share"]["4"],
        facts["carried"]["20%"], facts["overlap"], lift,
    ]  # fmt: skip


def _report_cells(report: Any) -> list[str]:
    shares = [percent(report[name]) for name in ("predicted", "recall", "kept", "precision")]
    return [f"{report['rank']:.0f}", *shares]


def legend(made: Made) -> list[str]:
    """What the columns are, and where the files are."""
    lines = [
        f"over {made.profile.num_tokens} tokens",
        "gated: the value that decides is above zero",
        "active: what meets the down row is not zero; batch 4: for some of four tokens far apart",
        "top 20 %: of all activations, those the hottest fifth carries",
        "overlap: of a token's active neurons, those that were active one token before",
        "tail: how much likelier two neurons of the cold half are active together than by chance",
        f"profile: {made.profile_path}",
    ]
    if made.recorded is not None:
        size = amount(made.recorded.num_bytes)
        lines.append(f"recording: {made.recorded.path}, {made.recorded.num_tokens} tokens, {size}")
    if bounds := made.profile.bounds:
        lines.append(
            f"bounds: {bounds.share:.0%} of the neurons count as zero in --mode threshold; "
            f"perplexity {bounds.dense_ppl:.2f} -> {bounds.ppl:.2f} ({bounds.cost:+.1%}), over "
            f"text that they were not chosen by"
        )
    if made.predictors_path is None:
        return lines
    mean = made.report["mean"]
    size, work = amount(int(mean["num_bytes"])), mean["multiply_adds"] / 1e6
    return [
        *lines,
        "named: neurons the predictor names; recall: of the active ones those it names",
        "kept: of |activation| times down row, what is kept; precise: of the named, those active",
        f"predictors: {made.predictors_path}, {size}, {work:,.1f} M multiply-adds a token",
    ]


def as_object(path: Path, made: Made) -> dict[str, Any]:
    """The same as data; shares from 0 to 1."""
    return {
        "file": str(path),
        "tokens": made.profile.num_tokens,
        "profile": str(made.profile_path),
        "predictors": None if made.predictors_path is None else str(made.predictors_path),
        "recording": None
        if made.recorded is None
        else {
            "file": str(made.recorded.path),
            "tokens": made.recorded.num_tokens,
            "bytes": made.recorded.num_bytes,
        },
        "threshold": _bounds_object(made),
        "predictor": dict(made.report.get("mean", {})) or None,
        "layers": [
            {"layer": index, **layer.facts, "predictor": report}
            for index, (layer, report) in enumerate(
                zip(
                    made.profile.layers,
                    made.report.get("layers") or [None] * len(made.profile.layers),
                    strict=True,
                )
            )
        ],
    }


def _bounds_object(made: Made) -> dict[str, Any] | None:
    bounds = made.profile.bounds
    if bounds is None:
        return None
    return {
        "share": bounds.share,
        "ppl": bounds.ppl,
        "dense_ppl": bounds.dense_ppl,
        "cost": bounds.cost,
        "bounds": list(bounds.values),
    }
