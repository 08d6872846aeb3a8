"""Trace records on their way from the arena's rings to the timeline.

The coordinator copies them as they are into a file, which costs next to nothing between steps; they
become lines when the timeline is closed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, TextIO

import msgpack
import numpy as np
from numpy.typing import NDArray

from polyneuron.errors import DeviceError, FormatError
from polyneuron.kernels.arena import OpKind
from polyneuron.kernels.trace import TRACE_RECORD, TraceStage, TraceWhat
from polyneuron.timeline import AppendedFile, merge_parts, part_path
from polyneuron.timeline_events import Event
from polyneuron.timeline_hold import Hold

BATCH = 1 << 14
HEAD_LENGTH_BYTES = 4
KINDS = {int(kind): kind.name.lower() for kind in OpKind}
STAGES = {int(stage): stage.name.lower() for stage in TraceStage}
UNKNOWN_STEP = (1 << 32) - 1


def spool_path(path: Path) -> Path:
    """Where a timeline's records are while it is written."""
    return path.with_name(f"{path.name}.records")


class RecordSpool:
    """The file of raw records: a head with names, then records with the number of their step."""

    def __init__(self, path: Path, executors: Sequence[str], num_layers: int) -> None:
        self._file = AppendedFile(spool_path(path))
        head = msgpack.packb([num_layers, *executors])
        self._file.append(len(head).to_bytes(HEAD_LENGTH_BYTES, "little") + head)

    def write(self, records: NDArray[np.void], steps: Mapping[int, int]) -> None:
        """Append records (n > 0,); `steps` has the number of the step behind each step_seq."""
        first = int(records["step_seq"][0])
        if (records["step_seq"] == first).all():  # nearly always
            records["step_seq"] = steps.get(first, UNKNOWN_STEP)
        else:
            seqs, places = np.unique(records["step_seq"], return_inverse=True)
            found = [steps.get(step_seq, UNKNOWN_STEP) for step_seq in seqs.tolist()]
            records["step_seq"] = np.array(found, np.uint32)[places]
        self._file.append(records.tobytes())

    def close(self) -> None:
        """No more records will come."""
        self._file.close()


def convert_records(path: Path) -> None:
    """Turn a timeline's raw records, where there are any, into a part of it.

    DeviceError when the disk has no room for it: then the records stay, and nothing of it.
    """
    spool, part = spool_path(path), part_path(path, "records")
    if not spool.exists():
        return
    try:
        with spool.open("rb") as source, part.open("w") as target:
            _convert(source, target, spool)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink()
        raise DeviceError(
            f"{path}: cannot be written: {error.strerror}; its parts stay: with more room, "
            "polyneuron trace puts them together"
        ) from error
    spool.unlink()


def _convert(source: BinaryIO, target: TextIO, spool: Path) -> None:
    num_bytes = int.from_bytes(source.read(HEAD_LENGTH_BYTES), "little")
    head = source.read(num_bytes)
    if not head or len(head) < num_bytes:  # broken off before the first record
        return
    num_layers, executors = _head(head, spool)
    seq = 0
    while data := source.read(BATCH * TRACE_RECORD.itemsize):
        whole = len(data) // TRACE_RECORD.itemsize * TRACE_RECORD.itemsize
        records = np.frombuffer(data[:whole], TRACE_RECORD)
        target.writelines(_lines(records, executors, num_layers, seq))
        seq += len(records)


def finish_timeline(path: Path) -> int:
    """Put together what a run that was broken off left beside `path`; the number of events.

    ConfigError when the run goes on, or nothing can be written there.
    """
    hold = Hold(part_path(path, "driver"), path)
    try:
        convert_records(path)
        return merge_parts(path)
    finally:
        hold.release()


def _head(head: bytes, spool: Path) -> tuple[int, list[str]]:
    try:
        num_layers, *executors = msgpack.unpackb(head)
        return int(num_layers), [str(name) for name in executors]
    except (ValueError, TypeError):
        raise FormatError(f"{spool}: is no file of trace records") from None


def _lines(
    records: NDArray[np.void], executors: Sequence[str], num_layers: int, seq: int
) -> Iterator[str]:
    """A line for each record; written by hand, since there may be millions of plain numbers."""
    for number, record in enumerate(records.tolist(), seq):
        start_ns, end_ns, wait_ns, value, step, what, kind, layer, index, count, executor, _ = (
            record
        )
        head = (
            f'{{"t_ns":{start_ns},"seq":{number},"actor":"%s","event":"%s","ns":{end_ns - start_ns}'
        )
        step = -1 if step == UNKNOWN_STEP else step
        if what == TraceWhat.OP:
            # Of what is before or behind all layers the programs say 0 or one too many.
            is_outside = kind == OpKind.EMBED or layer >= num_layers
            yield (
                head
                % (executors[executor], Event.OP)
                + f',"wait_ns":{wait_ns},"stall_ns":{value},"step":{step},"op":{index}'
                f',"kind":"{KINDS.get(kind, kind)}","layer":{-1 if is_outside else layer}'
                f',"units":{count}}}\n'
            )
        elif what == TraceWhat.CLUSTER:
            yield (
                head
                % (executors[executor], Event.CLUSTER)
                + f',"step":{step},"layer":{layer},"cluster":{index}'
                f',"stage":"{STAGES.get(kind, kind)}","neurons":{count},"misses":{value}}}\n'
            )
        else:
            neuron = -1 if value == (1 << 64) - 1 else value
            yield (
                head % ("io", Event.READ) + f',"read":{number},"layer":{layer},"neuron":{neuron}'
                f',"bytes":{count},"status":{kind},"step":{step}}}\n'
            )
