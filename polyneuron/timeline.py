"""Timelines: what happened when, one JSON object a line, ordered by time (docs/TIMELINE.md).

Every process that has something to tell writes a part of its own; the parts are merged into one
file at the end. Coarse events go through structlog with an explicit chain.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import mmap
import os
import threading
from collections.abc import Iterator
from glob import escape
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import structlog

from polyneuron.clock import Clock, MonotonicClock
from polyneuron.errors import ConfigError, DeviceError
from polyneuron.timeline_events import Event, TimelineEvent, parse_event
from polyneuron.timeline_hold import Hold, check_free

__all__ = ["Event", "EventLogger", "Timeline", "TimelineEvent", "TimelinePart", "read_timeline"]

MAX_TOLD = 64
"""Events a part keeps before it writes them. Made into lines together they cost a fifth of what
each would alone, between steps that have filled the processor's caches with weights."""
MAX_NAME_BYTES = 255
"""Of a file's name, in the file systems of Linux."""


_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


class EventLogger(structlog.BoundLoggerBase):
    """Tells events of one actor; made inside the actor, since it holds a file."""

    def emit(self, event: Event, **keys: Any) -> None:
        """Tell an event that begins now, or at `t_ns` where that is among its keys."""
        self._logger.take(self, event, keys)

    def process(self, event: Event, keys: dict[str, Any]) -> None:
        """Run the processors behind the stamp; the part gets the line."""
        self._proxy_to_logger("emit", event, **keys)


def stamp(clock: Clock) -> structlog.typing.Processor:
    """A processor that gives events without a time the present one."""

    def processor(_: Any, __: str, keys: structlog.typing.EventDict) -> Any:
        keys.setdefault("t_ns", clock.now_ns())
        return keys

    return processor


def number(numbers: Iterator[int]) -> structlog.typing.Processor:
    """A processor that numbers events in the order in which they were told."""

    def processor(_: Any, __: str, keys: structlog.typing.EventDict) -> Any:
        keys["seq"] = next(numbers)
        return keys

    return processor


def to_jsonl(_: Any, __: str, keys: structlog.typing.EventDict) -> str:
    """The last processor: the event's line, the keys that every event has in front."""
    heads = {name: keys.pop(name) for name in ("t_ns", "seq", "actor", "event")}
    return event_line({**heads, **keys})


def event_line(keys: dict[str, Any]) -> str:
    """An event as one line of a timeline."""
    return _ENCODER.encode(keys) + "\n"


class AppendedFile:
    """A file that grows by whole pieces until the disk refuses one: then by none any more.

    Who is traced goes on; the timeline's close meets the full disk again and says so.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._file = path.open("wb", buffering=0)
        except OSError as error:
            raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error

    def append(self, data: bytes) -> None:
        """Hand bytes to the system: they survive the process."""
        try:
            if not self._file.closed and self._file.write(data) != len(data):
                self._file.close()
        except OSError:
            self._file.close()

    def close(self) -> None:
        """What comes later is dropped."""
        self._file.close()


class TimelinePart:
    """One process's events on their way to the timeline; any thread may tell some.

    The chain is [stamp(clock), number, to_jsonl]: an event is stamped when it is told, the others
    run for many together.
    """

    def __init__(self, path: Path, clock: Clock | None = None) -> None:
        self._stamp = stamp(clock or MonotonicClock())
        self._chain = [number(itertools.count()), to_jsonl]
        self._told: list[tuple[EventLogger, Event, dict[str, Any]]] = []
        self._lines: list[str] = []
        self._lock = threading.Lock()
        self._file = AppendedFile(path)

    def logger(self, actor: str) -> EventLogger:
        """What tells events of an actor into this part."""
        lazy = structlog.wrap_logger(self, processors=self._chain, wrapper_class=EventLogger)
        logger: EventLogger = lazy.bind(actor=actor)  # once: a lazy one would at every event
        return logger

    def take(self, logger: EventLogger, event: Event, keys: dict[str, Any]) -> None:
        """Take an event; called by the loggers."""
        self._stamp(None, "emit", keys)
        with self._lock:
            self._told.append((logger, event, keys))
            if len(self._told) >= MAX_TOLD:
                self._write()

    def emit(self, line: str) -> None:
        """Take a finished line; what the chain ends in."""
        self._lines.append(line)

    def flush(self) -> None:
        """Hand what is buffered to the system: it survives the process."""
        with self._lock:
            self._write()

    def _write(self) -> None:
        told, self._told = self._told, []
        for logger, event, keys in told:
            logger.process(event, keys)
        text, self._lines = "".join(self._lines), []
        if text:
            self._file.append(text.encode())

    def close(self) -> None:
        """Write what is left; events told later are dropped."""
        self.flush()
        self._file.close()


class Timeline:
    """The timeline's file: a part of its own, and at the end all parts merged.

    Whoever else has events writes a `TimelinePart` to `part_path(path, name)` and closes it before.
    The file appears whole, when it is closed; until then, and after a crash, the parts hold what
    was told. ConfigError when another run is writing it.
    """

    def __init__(self, path: Path, clock: Clock | None = None) -> None:
        check_writable(path)
        driver = part_path(path, "driver")
        self._hold = Hold(driver, path)
        for part in find_parts(path):  # of a run that was broken off
            if part != driver:
                part.unlink()
        self.path = path
        self.started_ns = (clock or MonotonicClock()).now_ns()
        """Before all of its events."""
        self._part = TimelinePart(driver, clock)
        self._is_closed = False

    def logger(self, actor: str) -> EventLogger:
        """What tells events of an actor into the file's own part."""
        return self._part.logger(actor)

    def flush(self) -> None:
        """Hand what was told so far to the system: it survives the process."""
        self._part.flush()

    def close(self) -> None:
        """Merge all parts into the file and remove them. Safe to call again."""
        if not self._is_closed:
            self._is_closed = True
            self._part.close()
            try:
                merge_parts(self.path)
            finally:
                self._hold.release()

    def leave_parts(self) -> None:
        """Close without a file: whatever keeps it from being made, the parts can still be read."""
        if not self._is_closed:
            self._is_closed = True
            self._part.close()
            self._hold.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def part_path(path: Path, name: str) -> Path:
    """Where one process's part of a timeline is while the timeline is written."""
    return path.with_name(f"{path.name}.{name}.part")


def find_parts(path: Path) -> list[Path]:
    """The parts of a timeline that lie beside it, in the order of their names."""
    return sorted(path.parent.glob(f"{escape(path.name)}.*.part"))


def check_writable(path: Path) -> None:
    """Raise ConfigError unless a timeline can be written here, and nobody else is about it."""
    try:
        _check_place(path)
    except OSError as error:
        raise ConfigError(f"--trace {path}: cannot be written: {error.strerror}") from None
    check_free(part_path(path, "driver"), path)


def _check_place(path: Path) -> None:
    longest = len(os.fsencode(f"{path.name}.coordinator.part"))
    if longest > MAX_NAME_BYTES:
        raise ConfigError(
            f"--trace {path}: the name is too long by {longest - MAX_NAME_BYTES} bytes; name "
            "another file"
        )
    if path.is_dir():
        raise ConfigError(f"--trace {path}: is a folder; name a file in it")
    if path.exists() and not path.is_file():  # a new file would take a device's place
        raise ConfigError(f"--trace {path}: is no plain file; name another one")
    if not path.parent.is_dir():
        raise ConfigError(f"--trace {path}: there is no folder {path.parent}; make it first")
    if path.exists() and path.stat().st_size and not _is_timeline(path):
        raise ConfigError(f"--trace {path}: is there and is no timeline; name another file")
    if not os.access(path.parent, os.W_OK) or (path.exists() and not os.access(path, os.W_OK)):
        raise ConfigError(f"--trace {path}: may not be written; name a file in a folder of yours")


def _is_timeline(path: Path) -> bool:
    with contextlib.suppress(OSError), path.open("rb") as file:
        return file.read(len(_TIME)) == _TIME
    return False


def merge_parts(path: Path) -> int:
    """Put the lines of all parts in order of time, numbered anew, into the file; their number.

    Where there are none no file is made. Only places and times of lines are in memory, 32 bytes
    each.
    """
    parts = find_parts(path)
    places = np.fromiter(
        itertools.chain.from_iterable(_lines_of(part, i) for i, part in enumerate(parts)),
        dtype=np.dtype((np.int64, 4)),
    )  # time, part, offset, bytes
    if len(places) == 0:
        _remove(parts)
        return 0
    order = np.lexsort((places[:, 2], places[:, 1], places[:, 0]))
    staged = path.with_name(f"{path.name}.tmp")
    try:
        with contextlib.ExitStack() as opened, staged.open("wb") as target:
            maps = {index: _mapped(parts[index], opened) for index in np.unique(places[:, 1])}
            for seq, place in enumerate(order.tolist()):
                _, index, offset, num_bytes = places[place].tolist()
                target.write(_numbered(maps[index][offset : offset + num_bytes], seq))
            target.flush()
            os.fsync(target.fileno())
        staged.replace(path)
    except BaseException as error:  # Ctrl-C among them
        with contextlib.suppress(OSError):
            staged.unlink()
        if not isinstance(error, OSError):
            raise
        raise DeviceError(f"{path}: cannot be written: {error.strerror}; its parts stay") from error
    driver = part_path(path, "driver")
    if driver in parts:
        os.truncate(driver, 0)  # if this process ends here, nobody takes the rest for a whole run
    _remove(parts)
    return len(places)


def _remove(parts: list[Path]) -> None:
    """Remove parts, the driver's, by which they are held, as the last."""
    for part in sorted(parts, key=lambda part: part.name.endswith(".driver.part")):
        part.unlink()


def is_broken_off(path: Path) -> bool:
    """Whether parts lie beside a timeline that are not in it, those of a run that goes on too."""
    driver = part_path(path, "driver")
    with contextlib.suppress(OSError):  # as of names that are too long
        has_told = driver.exists() and driver.stat().st_size > 0
        return has_told or (bool(find_parts(path)) and not path.exists())
    return False


def _mapped(part: Path, opened: contextlib.ExitStack) -> mmap.mmap:
    """A part's bytes; they are system's memory, not the process's."""
    file = opened.enter_context(part.open("rb"))
    return opened.enter_context(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


_TIME = b'{"t_ns":'
_SEQ = b',"seq":'


def _lines_of(part: Path, index: int) -> Iterator[tuple[int, int, int, int]]:
    """(time, part, offset, bytes) of every whole line of a part; a crash may have cut the last."""
    offset = 0
    with part.open("rb") as file:
        for line in file:
            if line.endswith(b"\n") and line.startswith(_TIME):
                yield int(line[len(_TIME) : line.index(b",")]), index, offset, len(line)
            offset += len(line)


def _numbered(line: bytes, seq: int) -> bytes:
    head, _, rest = line.partition(_SEQ)
    return head + _SEQ + str(seq).encode() + rest[rest.index(b",") :]


def read_timeline(path: Path) -> Iterator[TimelineEvent]:
    """The events of a timeline, or of a part of one, in order.

    FormatError names the file, line and key; ConfigError a file that cannot be read.
    """
    try:
        with path.open("rb") as file:
            for index, line in enumerate(file, 1):
                yield parse_event(line, f"{path}:{index}")
    except OSError as error:
        parts = find_parts(path)
        cure = "; its run was broken off: polyneuron trace puts together what is there"
        cure = cure if parts else ""
        raise ConfigError(f"{path}: cannot be read: {error.strerror}{cure}") from error
