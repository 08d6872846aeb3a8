"""Progress on stderr: a bar on a terminal, plain lines otherwise."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

LINE_EVERY_S = 2.0


class LoadProgress:
    """Call it with bytes read so far and bytes to read."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._bar: Progress | None = None
        self._last_line = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, done: int, total: int) -> None:
        """Show the state; a plain line at most every two seconds."""
        if sys.stderr.isatty():
            self._show_bar(done, total)
        elif time.monotonic() - self._last_line >= LINE_EVERY_S:
            self._last_line = time.monotonic()
            share = f"{done >> 20} of {total >> 20} MiB"
            print(f"{self._label}: {share}", file=sys.stderr, flush=True)

    def _show_bar(self, done: int, total: int) -> None:
        if self._bar is None:
            columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(True))
            console = Console(stderr=True)
            self._bar = Progress(*columns, TransferSpeedColumn(), console=console, transient=True)
            self._bar.add_task(self._label, total=total)
            self._bar.start()
        self._bar.update(self._bar.task_ids[0], completed=done)
