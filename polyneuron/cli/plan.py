"""`polyneuron plan`: what a run would take and read, with nothing allocated."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich import box
from rich.table import Table

from polyneuron.cli import options
from polyneuron.cli.core_options import core_settings
from polyneuron.cli.options import OUTPUT, option
from polyneuron.cli.shown import result_console
from polyneuron.config import FeedForwardMode, KvType
from polyneuron.sizes import show_size

if TYPE_CHECKING:
    from polyneuron.io.ncf_format import Layout
    from polyneuron.planning.budget import Budget
    from polyneuron.planning.source import ModelSource

PLAIN_WIDTH = 100


def plan(
    model: options.Model,
    memory: options.Memory = "0",
    ffn_resident: options.FfnResident = -1.0,
    mode: options.Mode = FeedForwardMode.AUTO,
    kv_type: options.KvTypeOption = KvType.F16,
    ctx_size: options.CtxSize = 0,
    threads: options.Threads = 0,
    threads_batch: options.ThreadsBatch = -1,
    cpu_mask: options.CpuMask = "",
    cpu_range: options.CpuRange = "",
    output: Annotated[
        str | None,
        option("--output", "-o", panel=OUTPUT, text="write the plan: a TOML file for run --plan"),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Show what stays in memory, what is read for each token, and how fast that can be."""
    from polyneuron.cli.plan_choice import check_plan_output, choose, expectations, write_plan
    from polyneuron.config import EngineConfig
    from polyneuron.cores import this_machine
    from polyneuron.host_memory import HostMemory
    from polyneuron.model.locate import locate_model
    from polyneuron.planning.budget import fit_runnable, private_estimate, resolve_config
    from polyneuron.planning.source import open_source

    path = locate_model(model)
    if output is not None:
        check_plan_output(Path(output))
    source = open_source(path)
    wanted = options.budget(memory, ffn_resident, mode, model)
    wanted |= core_settings(model, threads, threads_batch, cpu_mask, cpu_range)
    config = EngineConfig(num_ctx=ctx_size, max_sequences=1, kv_type=kv_type, **wanted)
    config = resolve_config(config, source.spec)
    limit = config.memory_bytes or HostMemory().default_budget()
    source, budget = fit_runnable(
        source, config, limit, private_estimate(config), lambda layout: _as_run(path, layout)
    )
    rate = disk_rate(source.path) if budget.layout.is_streaming and source.can_stream else None
    counts = this_machine().worker_counts(config.cores) if not threads else ()
    chosen = choose(source, config, budget, counts, must_measure=output is not None)
    if output is not None:
        write_plan(Path(output), chosen, open_source(path))
    if as_json:
        expected = expectations(chosen)
        sys.stdout.write(json.dumps(as_object(budget, rate) | expected) + "\n")
        return
    console = result_console(PLAIN_WIDTH)
    console.print(table(budget))
    for line in [*promises(budget, rate, can_stream=source.can_stream), *chosen.lines()]:
        console.print(line, soft_wrap=True)


def _as_run(path: Path, layout: Layout) -> ModelSource:
    """A GGUF as what it becomes: the file in the cache, if it is there, with all beside it."""
    from polyneuron.model.model_cache import converted
    from polyneuron.planning.source import open_source

    entry = converted(path, layout)
    return open_source(path, layout) if entry is None else open_source(entry)


def disk_rate(path: Path) -> float | None:
    """Bytes a second of large sequential reads, measured; None of a file too small for it."""
    import random

    from polyneuron.io.device_probe import LAYER_READS, probe_device

    if path.stat().st_size < LAYER_READS.read_bytes:
        return None
    return probe_device(path, random.Random(0), cases=[LAYER_READS]).rows[0].bytes_per_s


def table(budget: Budget) -> Table:
    """The account, a row each."""
    shown = Table(box=box.SIMPLE_HEAD)
    shown.add_column("memory")
    shown.add_column("", justify="right")
    for what, num_bytes in budget.rows():
        shown.add_row(what, show_size(num_bytes))
    shown.add_row("budget", show_size(budget.limit_bytes))
    return shown


def promises(budget: Budget, rate: float | None, *, can_stream: bool) -> list[str]:
    """What follows for every token."""
    if not budget.layout.is_streaming:
        return ["everything stays in memory: nothing is read while it runs"]
    lines = [*reading(budget), *bounds(budget, rate)]
    if not can_stream:
        lines.append("a run converts the model once into the cache folder")
    return [*lines, *(f"warning: {warning}" for warning in budget.warnings())]


def reading(budget: Budget) -> list[str]:
    """What is read for a token, and for a prompt."""
    chunk = f"each chunk of a prompt (up to {budget.layout.config.max_tokens} tokens)"
    prompt = f"{show_size(budget.prompt_bytes)} from the file"
    if not budget.layout.has_neuron_cache and budget.streamed_bytes == budget.prompt_bytes:
        return [f"each token, and {chunk}, reads {prompt}"]
    parts = [f"{show_size(budget.streamed_bytes)} from the file"] if budget.streamed_bytes else []
    if budget.layout.has_neuron_cache:
        parts.append("the neurons it misses")
    return [f"each token reads {' and '.join(parts)}", f"{chunk} reads {prompt}"]


def bounds(budget: Budget, rate: float | None) -> list[str]:
    """How fast that can be when the disk gives `rate` bytes a second; nothing if not measured."""
    if rate is None:
        return []
    parts = [f"a chunk of a prompt takes {budget.prompt_bytes / rate:.1f} s or more"]
    if budget.streamed_bytes:
        parts.insert(0, f"at most {rate / budget.streamed_bytes:.2f} tok/s")
    return [f"the disk gives {rate / 1e6:.0f} MB/s: {', '.join(parts)}"]


def as_object(budget: Budget, rate: float | None) -> dict[str, Any]:
    """The same as data; null where nothing was measured or can be known beforehand."""
    has_cache, streamed = budget.layout.has_neuron_cache, budget.streamed_bytes
    return {
        "budget_bytes": budget.limit_bytes,
        "rows": [{"what": what, "bytes": num_bytes} for what, num_bytes in budget.rows()],
        "mode": str(budget.mode),
        "num_layers": budget.num_layers,
        "num_resident_layers": budget.num_resident,
        "resident_ffn_fraction": budget.resident_ffn_fraction,
        "kv_type": str(budget.layout.config.kv_type),
        "kv_bytes": budget.layout.spans["kv"].num_bytes,
        "neuron_cache_bytes": budget.layout.spans["cold"].num_bytes,
        "neuron_cache_share": budget.cached_share if has_cache else None,
        "streamed_bytes_per_token": streamed,
        "bytes_per_token": None if has_cache else streamed,
        "prompt_bytes_per_chunk": budget.prompt_bytes,
        "disk_bytes_per_second": rate,
        "tokens_per_second_at_most": rate / streamed if rate and streamed else None,
        "warnings": budget.warnings(),
    }
