"""`polyneuron profile --device`: what this machine gives, measured and kept for `plan`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table

from polyneuron.cli.shown import result_console

if TYPE_CHECKING:
    from polyneuron.planning.device import DeviceProfile

PLAIN_WIDTH = 100


def measure(model: str, *, as_json: bool) -> None:
    """Measure the machine with the disk of a model, or of the cache folder where none is named."""
    from polyneuron.config import cache_folder
    from polyneuron.measure.disk_probe import nearest_folder
    from polyneuron.model.locate import locate_model

    path = locate_model(model) if model else nearest_folder(cache_folder())
    profile_device(path, as_json=as_json)


def profile_device(path: Path, *, as_json: bool) -> None:
    """Measure the machine, and the disk of a folder or the file `path`; show it, and keep it."""
    from polyneuron.measure.device_store import measure_and_store, stored_path

    profile = measure_and_store(path, say)
    if as_json:
        sys.stdout.write(json.dumps(profile.as_dict()) + "\n")
        return
    console = result_console(PLAIN_WIDTH)
    for table in (read_table(profile), kernel_table(profile)):
        console.print(table)
    for line in lines(profile):
        console.print(line, soft_wrap=True)
    say(f"kept in {stored_path(profile.key)}; polyneuron plan uses it")


def say(text: str) -> None:
    """A line about what is going on."""
    print(f"profile: {text}", file=sys.stderr, flush=True)


def read_table(profile: DeviceProfile) -> Table:
    """Reads by range, size and depth: what each gives, and its processor time."""
    table = _table("reads", "from MiB", "KiB", "depth", "core", "MB/s", "reads/s", "p50 ms",
                   "CPU us")  # fmt: skip
    for row in profile.reads:
        table.add_row(
            "random" if row.is_random else "in order",
            str((row.range_bytes or profile.probed_bytes) >> 20),
            str(row.read_bytes >> 10),
            str(row.depth),
            str(row.core),
            f"{row.reads_per_s * row.read_bytes / 1e6:.0f}",
            f"{row.reads_per_s:.0f}",
            f"{row.latency_ns / 1e6:.2f}",
            f"{row.cpu_ns / 1e3:.1f}",
        )
    return table


def kernel_table(profile: DeviceProfile) -> Table:
    """Kernels by type and width, GB/s for each number of threads and of tokens."""
    columns = sorted({(row.threads, row.tokens) for row in profile.kernels})
    table = _table(
        "GB/s", "type", "columns",
        *(f"{t} thr" if tokens == 1 else f"{t} thr, {tokens} tok" for t, tokens in columns),
    )  # fmt: skip
    cells: dict[tuple[str, str, int], dict[tuple[int, int], float]] = {}
    for row in profile.kernels:
        key = (str(row.kernel), row.storage, row.cols)
        cells.setdefault(key, {})[row.threads, row.tokens] = row.bytes_per_s
    for (kernel, storage, cols), speeds in sorted(cells.items()):
        found = [f"{speeds[key] / 1e9:.1f}" if key in speeds else "" for key in columns]
        table.add_row(kernel, storage, str(cols), *found)
    return table


def lines(profile: DeviceProfile) -> list[str]:
    """What is neither a read nor a kernel."""
    kinds = " | ".join(",".join(map(str, kind)) for kind in profile.core_kinds)
    steps = [
        f"{row.threads} executor{'s' if row.threads > 1 else ''}: an op "
        f"{row.op_ns / 1e3:.2f} us, a step {row.step_ns / 1e3:.1f} us"
        for row in profile.steps
    ]
    cache = profile.cache
    return [
        f"cores that are alike: {kinds}; {profile.key.cpu}, {profile.key.isa}",
        f"step board: {'; '.join(steps)}",
        f"neuron cache: a hit {cache.hit_ns:.0f} ns, a miss {cache.miss_ns:.0f} ns",
    ]


def _table(*names: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for index, name in enumerate(names):
        table.add_column(name, justify="left" if index == 0 else "right")
    return table
