"""Progress on stderr: a bar on a terminal, plain lines otherwise."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

LINE_EVERY_S = 2.0


class LoadProgress:
    """Call it with bytes done so far and bytes in all; or with units, where they have a name."""

    def __init__(self, label: str, unit: str = "") -> None:
        self._label = label
        self._unit = unit
        self._bar: Progress | None = None
        self._last_line: float | None = None
        self._last_done = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Take the bar away; safe to call again."""
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, done: int, total: int) -> None:
        """Show the state; a plain line at most every two seconds."""
        if sys.stderr.isatty():
            self._show_bar(done, total)
            return
        now = time.monotonic()
        if self._last_line is None:  # what came before the first byte is no part of the speed
            self._last_line, self._last_done = now, done
        elif now - self._last_line >= LINE_EVERY_S:
            rate = (done - self._last_done) / (now - self._last_line)
            self._last_line, self._last_done = now, done
            line = progress_line(self._label, done, total, rate, self._unit)
            print(line, file=sys.stderr, flush=True)

    def _show_bar(self, done: int, total: int) -> None:
        if self._bar is None:
            amounts = (
                [MofNCompleteColumn(), TextColumn(self._unit)]
                if self._unit
                else [DownloadColumn(True), TransferSpeedColumn()]
            )
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                *amounts,
                TimeRemainingColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            self._bar.add_task(self._label, total=total)
            self._bar.start()
        self._bar.update(self._bar.task_ids[0], completed=done)


def progress_line(label: str, done: int, total: int, rate: float, unit: str = "") -> str:
    """One line: how far, how fast (bytes or units a second), how long still at this speed."""
    line = (
        f"{label}: {done:,} of {total:,} {unit}, {rate:,.0f} a second"
        if unit
        else f"{label}: {done >> 20} of {total >> 20} MiB, {rate / 1e6:.0f} MB/s"
    )
    if rate <= 0:
        return line
    left = round((total - done) / rate)
    return f"{line}, {left // 60}:{left % 60:02} left"
