"""Plays a scenario on the real actors: real kernels, real reads, real losses, in wall time."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from polyneuron.engine import Engine
from polyneuron.scenarios.replay_figures import run_figures, tokens_equal
from polyneuron.scenarios.replay_model import check_replayable, engine_config, replay_model
from polyneuron.scenarios.replay_run import ReplayRun
from polyneuron.scenarios.result import Figures
from polyneuron.scenarios.script import Script

PREFIX = "polyneuron-replay-"


def replay(script: Script, timeline: Path | None) -> Figures:
    """The figures of one run, its timeline into that file; nothing else is left of it.

    Where the script expects `tokens_equal`, or disturbs the engine, a second engine plays the same
    requests undisturbed. Raises ConfigError for what only a simulation can do, and EngineError when
    the engine itself was lost.
    """
    check_replayable(script)
    with _model(script) as path:
        run = _play(script, path, timeline, disturbed=True)
        figures = run_figures(run)
        if script.events or _wants_equal(script):
            undisturbed = _play(script, path, None, disturbed=False)
            figures["tokens_equal"] = float(tokens_equal(run, undisturbed))
    return figures


def _wants_equal(script: Script) -> bool:
    return any(wanted.figure == "tokens_equal" for wanted in script.expectations)


@contextlib.contextmanager
def _model(script: Script) -> Iterator[Path]:
    """The model's file, in a temporary folder where it has to be written."""
    with tempfile.TemporaryDirectory(prefix=PREFIX) as folder:
        yield replay_model(script, Path(folder))


def _play(script: Script, path: Path, timeline: Path | None, *, disturbed: bool) -> ReplayRun:
    trace = None if timeline is None else str(timeline)
    with Engine(str(path), engine_config(script, path), trace=trace) as engine:
        run = ReplayRun(engine, script, disturbed)
        run.run()
    return run
