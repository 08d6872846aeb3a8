"""`polyneuron doctor`: what the machine has, what is in the way, and the cure."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from polyneuron.cli import options
from polyneuron.cli.options import option
from polyneuron.config import cache_folder
from polyneuron.errors import ConfigError

if TYPE_CHECKING:
    from polyneuron.io.device_probe import DeviceProbe
    from polyneuron.measure.check import Check
    from polyneuron.measure.disk_probe import DiskProbe

STYLES = {"ok": "green", "warning": "yellow", "problem": "bold red"}
FAILED = 1


def doctor(
    path: Annotated[
        str, option("--path", text="folder or file whose disk is probed; default: the model cache")
    ] = "",
    as_json: options.Json = False,
) -> None:
    """Check this machine; a line each with the cure, exit code 1 if something will not work."""
    from polyneuron.measure.doctor import examine
    from polyneuron.measure.host import Host

    checks, disk = examine(Host(), _place(path), _say)
    if as_json:
        sys.stdout.write(json.dumps(as_object(checks, disk)) + "\n")
    else:
        show(checks, disk)
    if any(check.status == "problem" for check in checks):
        raise typer.Exit(FAILED)


def _place(path: str) -> Path:
    """The folder or file that was named, else the cache folder or the nearest around it."""
    from polyneuron.measure.disk_probe import nearest_folder

    if not path:
        return nearest_folder(cache_folder())
    if not Path(path).exists():
        raise ConfigError(f"--path {path}: no such file or folder")
    return Path(path).absolute()


def _say(text: str) -> None:
    print(f"doctor: {text}", file=sys.stderr, flush=True)


def show(checks: list[Check], disk: DiskProbe) -> None:
    """A line a check, its cure below; then the disk's figures."""
    console = Console(file=sys.stdout, highlight=False, markup=False, emoji=False)
    indent = max(len(check.name) for check in checks) + 2
    for check in checks:
        line = Text.assemble(
            (f"{check.status:<9}", STYLES[check.status]),
            f"{check.name:<{indent}}{check.found}",
        )
        console.print(line, soft_wrap=True)
        if check.cure:
            console.print(f"{'':9}{'':{indent}}-> {check.cure}", soft_wrap=True)
    if disk.probe is not None:
        console.print(speed_table(disk.probe))
    console.print(closing_line(checks))


def closing_line(checks: list[Check]) -> str:
    """How many problems and warnings there are."""
    counts = {status: sum(check.status == status for check in checks) for status in STYLES}
    parts = [
        f"{counts[status] or 'no'} {status}{'' if counts[status] == 1 else 's'}"
        for status in ("problem", "warning")
    ]
    return ", ".join(parts)


def speed_table(probe: DeviceProbe) -> Table:
    """The disk's figures, a row a case."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("reads", "KiB", "depth", "MB/s", "reads/s", "p50 ms", "p99 ms", "CPU us"):
        table.add_column(name, justify="left" if name == "reads" else "right")
    for row in probe.rows:
        table.add_row(
            row.case.pattern.value,
            str(row.case.read_bytes >> 10),
            str(row.case.depth),
            f"{row.bytes_per_s / 1e6:.0f}",
            f"{row.reads_per_s:.0f}",
            f"{row.latency_p50_ns / 1e6:.2f}",
            f"{row.latency_p99_ns / 1e6:.2f}",
            f"{row.cpu_ns_per_read / 1e3:.1f}",
        )
    return table


def as_object(checks: list[Check], disk: DiskProbe) -> dict[str, Any]:
    """The same as data; null where nothing was measured."""
    from polyneuron.measure.disk_checks import info_figures, row_figures

    probe = disk.probe
    return {
        "ok": not any(check.status == "problem" for check in checks),
        "checks": [
            {
                "name": check.name,
                "status": check.status.value,
                "found": check.found,
                "cure": check.cure or None,
            }
            for check in checks
        ],
        "disk": {
            "path": str(disk.path),
            "file_system": disk.mount.type or None,
            "free_bytes": disk.free_bytes,
            "probed_bytes": disk.probed_bytes or None,
            "device": info_figures(probe.info) if probe else None,
            "rows": [row_figures(row) for row in probe.rows] if probe else None,
        },
    }
