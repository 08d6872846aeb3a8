"""One engine's timeline: opened before its actors, finished when they are gone."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from polyneuron.backends.notice import read_notice
from polyneuron.config import EngineConfig
from polyneuron.timeline import Timeline, check_writable
from polyneuron.timeline_events import FORMAT, Event

if TYPE_CHECKING:
    from polyneuron.engine import Engine


def with_trace_path(config: EngineConfig) -> EngineConfig:
    """The configuration with an absolute path of the timeline, since actors have other folders.

    ConfigError when it cannot be written.
    """
    if config.trace is None:
        return config
    path = Path(config.trace).resolve()  # of a link, the file it leads to is written
    check_writable(path)
    return replace(config, trace=str(path))


@contextmanager
def recorded(config: EngineConfig) -> Iterator[Timeline | None]:
    """The timeline that the configuration wants, whole at the end; None without one."""
    if config.trace is None:
        yield None
        return
    # Imported late: the actors' modules are not needed without a timeline.
    from polyneuron.actors.trace_records import convert_records, spool_path

    path = Path(config.trace)
    timeline = Timeline(path)
    try:
        spool_path(path).unlink(missing_ok=True)  # of a run that was broken off
        yield timeline
    finally:
        try:
            convert_records(path)
        except BaseException:
            timeline.leave_parts()
            raise
        timeline.close()


def tell_npu(engine: Engine) -> None:
    """Say on stderr, once, why the NPU executor's back end gave up."""
    actors = engine.actors
    if actors.npu_notice:
        return
    actors.npu_notice = read_notice(actors.arena, engine.layout.at("inputs.npu_notice"))
    if actors.npu_notice:
        said = f"{engine.config.npu} failed ({actors.npu_notice}): native kernels go on"
        print(f"polyneuron: NPU: {said}", file=sys.stderr, flush=True)


def tell_run(engine: Engine) -> None:
    """The first line of an engine's timeline, where it has one: what runs, and on what."""
    timeline, config, layout = engine.timeline, engine.config, engine.layout
    if timeline is None:
        return
    rows = layout.bundles.rows if layout.bundles else None
    timeline.logger("driver").emit(
        Event.RUN, t_ns=timeline.started_ns, format=FORMAT, clock="monotonic",
        model=engine.source.path.name, mode=str(layout.config.mode), isa=engine.isa,
        workers=config.num_workers, npu_threads=config.num_npu_threads,
        layers=engine.spec.num_layers,
        clusters=-(-rows.num_neurons // rows.cluster_neurons) if rows else 0,
        neurons=rows.num_neurons if rows else 0,
        cluster_neurons=rows.cluster_neurons if rows else 0,
        memory_bytes=engine.budget.limit_bytes, arena_bytes=layout.num_bytes,
        cold_slots=layout.bundles.cold_slots if layout.bundles else 0, policy="engine",
    )  # fmt: skip
    timeline.flush()  # what is told of a run that is killed begins with it
