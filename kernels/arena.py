"""Python's face of the arena: the shared memory all actors work in (DESIGN §3).

An `Arena` is a base address and what keeps it mapped. It gives typed views of regions and the calls
of the step board (`kernels/src/engine_api.h`); it decides nothing.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from polyneuron.errors import DeviceError, ProtocolError
from polyneuron.kernels._kernels import ffi, lib

if TYPE_CHECKING:
    from polyneuron.kernels._kernels import CData
    from polyneuron.kernels.backend_calls import BackendCalls

PAGE_BYTES = 4096
HEADER_BYTES = 4096
MAX_EXECUTORS = 64  # places on the board, as in board.h
MAX_EXPERTS = 1024  # as in engine_api.h
SPIN_LIMIT = 2000  # polls before a waiter sleeps, about 50 µs


class Unit(IntEnum):
    """Who runs an op."""

    CPU = 0
    NPU = 1


class OpKind(IntEnum):
    """What an op does; the fields each reads are told in `program.c` and `neuron_*.c`."""

    EMBED = 1
    NORM = 2
    MATMUL = 3
    ROPE_KV = 4
    ATTENTION = 5
    QUANTIZE = 6
    FEED_FORWARD = 7
    CLUSTERS = 8
    LATE_CLUSTERS = 9
    MERGE = 10
    ROWS_UP = 11
    ROWS_DOWN = 12
    PREDICT = 13
    AWAIT_ROWS = 14
    ROUTE = 20
    EXPERTS = 21
    GATHER = 22
    SIGMOID = 23


class OpFlag(IntEnum):
    """Bits of `step_op.flags`."""

    RESIDUAL = 1
    LOGIT_ROWS = 2
    WRITE_ACTS = 4
    WRITE_F32 = 8
    STREAM_LAST = 16
    GATE_TILES = 32
    ALL_NEURONS = 64
    FIRST_ROWS = 128
    LAST_ROWS = 256
    PREDICTED = 512
    RELU = 1024
    FORGET = 2048
    LAYER_NORM = 4096
    WHOLE_CLUSTERS = 65536


class RouteKind(IntEnum):
    """How the logits of a token's experts become their weights."""

    SHARES = 0
    NORMALISED = 1
    SIGMOID = 2


class StepFlag(IntEnum):
    """Bits of `step_params.flags`."""

    TRACE = 1
    DRY = 2
    TIMED = 4


class StepStatus(IntEnum):
    """How a wait for a step ended."""

    DONE = 0
    TIMEOUT = 1
    ABORTED = 2


class ServeStatus(IntEnum):
    """Why an executor came back to Python."""

    STOPPED = 0
    STALE = 1
    SLICE = 2


@dataclass(frozen=True, slots=True)
class NeuronRead:
    """An order: read this neuron's rows into this slot."""

    neuron: int
    slot: int


def routes_bytes(num_experts: int, num_used: int, max_tokens: int) -> int:
    """Bytes of what up to `max_tokens` tokens chose of a layer's experts."""
    return int(lib.routes_bytes(num_experts, num_used, max_tokens))


def neuron_reads_bytes(capacity: int) -> int:
    """Bytes of a ring of `capacity` orders, a power of two."""
    return int(lib.neuron_reads_bytes(capacity))


def board_bytes(max_ops: int) -> int:
    """Bytes of the step board for programs of up to `max_ops` ops."""
    return int(lib.board_bytes(max_ops))


def monotonic_ns() -> int:
    """CLOCK_MONOTONIC, the clock of every trace record."""
    return int(lib.monotonic_ns())


def prefer_short_slices(slice_ns: int) -> bool:
    """Have this thread run soon after it wakes, where the scheduler knows slices (Linux 6.12).

    Returns whether the kernel took the wish; nothing depends on it but when reads begin.
    """
    return int(lib.prefer_short_slices(slice_ns)) == 0


class Arena:
    """One arena mapped in this process; `keep` is whatever must live as long as the mapping."""

    def __init__(self, address: int, num_bytes: int, keep: object) -> None:
        if address % PAGE_BYTES:
            raise ValueError(f"arena base {address:#x} is not page aligned")
        self.address = address
        self.num_bytes = num_bytes
        self._keep = keep
        self.base = ffi.cast("char *", address)

    @classmethod
    def over(cls, array: NDArray[np.uint8], keep: object = None) -> Arena:
        """The arena inside a byte array: from its first page boundary on.

        Every process maps the same object at the same offset within a page, so all agree on it.
        """
        start = int(array.ctypes.data)
        pad = -start % PAGE_BYTES
        return cls(start + pad, array.nbytes - pad, (array, keep))

    def format(self, board: int, max_ops: int, num_executors: int) -> None:
        """Write header and board; what was in the arena before is forgotten."""
        lib.arena_format(self.base, self.num_bytes, board, max_ops, num_executors)

    def check(self) -> None:
        """Raise `ProtocolError` unless an arena of this layout is here."""
        if not lib.arena_valid(self.base):
            raise ProtocolError("the shared object holds no arena of this version")

    @property
    def header(self) -> Any:
        """`struct arena_header`, live."""
        return lib.arena_header_at(self.base)

    @property
    def step(self) -> Any:
        """`struct step_params`, live; written between `open_step` and `ring`."""
        return lib.step_params_at(self.base)

    def executor(self, index: int) -> Any:
        """`struct executor_record` of one executor, live."""
        return lib.executor_at(self.base, index)

    def op(self, program: int, index: int) -> Any:
        """`struct step_op` number `index` of the program at offset `program`, live."""
        return ffi.addressof(ffi.cast("struct step_op *", self.base + program)[index])

    def view(self, offset: int, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """A writable array over the arena's own bytes."""
        num_bytes = int(np.dtype(dtype).itemsize * np.prod(shape, dtype=np.int64))
        if offset < 0 or offset + num_bytes > self.num_bytes:
            raise ValueError(f"[{offset}, {offset + num_bytes}) is outside the arena")
        buffer = ffi.buffer(self.base + offset, num_bytes)
        return np.frombuffer(buffer, dtype=dtype).reshape(shape)

    def bytes_at(self, offset: int, num_bytes: int) -> memoryview:
        """The same bytes as a writable memoryview, for reads that land in place."""
        if offset < 0 or offset + num_bytes > self.num_bytes:
            raise ValueError(f"[{offset}, {offset + num_bytes}) is outside the arena")
        return memoryview(ffi.buffer(self.base + offset, num_bytes)).cast("B")

    def release(self, start: int, end: int) -> None:
        """Give whole pages of [start, end) back to the system; they read as zeros afterwards."""
        first, last = -(-start // PAGE_BYTES) * PAGE_BYTES, end // PAGE_BYTES * PAGE_BYTES
        if first < last and (error := lib.arena_release(self.base, first, last - first)):
            raise DeviceError(error, f"giving memory back failed: {os.strerror(error)}")

    # ---- the coordinator's side of the board

    def open_step(self) -> int:
        """Announce a new step; fill `step` next, then `ring`."""
        return int(lib.step_open(self.base))

    def ring(self, step_seq: int) -> None:
        """Start the step whose parameters have been written."""
        lib.step_ring(self.base, step_seq)

    def wait_step(self, step_seq: int, timeout_ns: int) -> StepStatus:
        """Wait in C, without the GIL, until the step ends or the time is over."""
        return StepStatus(lib.step_wait(self.base, step_seq, timeout_ns))

    def abort(self) -> None:
        """Make every executor unwind the running step."""
        lib.step_abort(self.base)

    def clear_abort(self) -> None:
        """Let steps run again."""
        lib.step_clear_abort(self.base)

    def stop(self) -> None:
        """Make every executor leave."""
        lib.arena_stop(self.base)

    # ---- the executors' side

    def attach(self, executor: int, unit: Unit, pid: int) -> int:
        """Take an executor's place; returns the generation to serve with."""
        return int(lib.executor_attach(self.base, executor, unit, pid))

    def serve(
        self, executor: int, generation: int, slice_ns: int, backend: BackendCalls | None = None
    ) -> ServeStatus:
        """Run steps until told to leave or `slice_ns` are over (blocks, without the GIL).

        `backend` computes the ops it takes; the GIL is held while it is asked.
        """
        calls = backend.pointer if backend else ffi.NULL
        status = lib.executor_serve(self.base, executor, generation, slice_ns, calls)
        return ServeStatus(status)

    def set_backend(self, has_backend: bool) -> None:
        """Say whether an executor of the NPU has a back end that others must wait for."""
        lib.backend_set(self.base, has_backend)

    # ---- streamed layers

    def layer_stream(self, offset: int) -> Any:
        """`struct layer_stream`, live."""
        return lib.layer_stream_at(self.base, offset)

    def wait_free_buffer(self, offset: int, load: int, timeout_ns: int) -> bool:
        """Wait until load number `load` has a free buffer; False when the time is over."""
        return bool(lib.layer_stream_wait_free(self.base, offset, load, timeout_ns))

    def land_layer(self, offset: int) -> None:
        """The next load is in its buffer."""
        lib.layer_stream_land(self.base, offset)

    def end_pass(self, offset: int) -> int:
        """Skip what an aborted step left; returns the next step's stream base."""
        return int(lib.layer_stream_end_pass(self.base, offset))

    def switch_stream(self, offset: int, schedule: int, num_loads: int) -> None:
        """Want another list of loads; the reader says in `serving` that it has begun it."""
        lib.layer_stream_switch(self.base, offset, schedule, num_loads)

    def wait_serving(self, offset: int, timeout_ns: int) -> bool:
        """Wait until the reader has begun the list wanted last; False when the time is over."""
        return bool(lib.layer_stream_wait_serving(self.base, offset, timeout_ns))

    def routed_loads(self, offset: int) -> int:
        """Loads below this number are of layers whose experts are chosen, as far as they matter."""
        return int(lib.layer_stream_routed(self.base, offset))

    def begin_stream(self, offset: int) -> None:
        """The reader: begin the list of loads that is wanted."""
        lib.layer_stream_begin(self.base, offset)

    def stop_stream(self, offset: int) -> None:
        """Make the layer reader leave."""
        lib.layer_stream_stop(self.base, offset)

    def fail_stream(self, offset: int, error: int) -> None:
        """A load failed for good with this errno."""
        lib.layer_stream_fail(self.base, offset, error)

    # ---- reads of missed neurons

    def format_neuron_reads(self, offset: int, capacity: int) -> None:
        """Write an empty ring; its file and cache are filled in through `neuron_reads`."""
        lib.neuron_reads_format(self.base, offset, capacity)

    def neuron_reads(self, offset: int) -> Any:
        """`struct neuron_reads`, live."""
        return lib.neuron_reads_at(self.base, offset)

    def resume_neuron_reads(self, offset: int) -> int:
        """Order anew what a reader that is gone had taken; the cache's lock is held."""
        return int(lib.neuron_reads_resume(self.base, offset))

    def pop_neuron_reads(self, offset: int, max_orders: int, timeout_ns: int) -> list[NeuronRead]:
        """Take up to `max_orders`; waits for the first without the GIL, empty when time is over."""
        orders = ffi.new("struct neuron_miss[]", max_orders)
        count = lib.neuron_reads_pop(self.base, offset, orders, max_orders, timeout_ns)
        return [NeuronRead(orders[index].neuron, orders[index].slot) for index in range(count)]

    def end_neuron_read(self, offset: int, neuron: int, error: int) -> None:
        """A neuron has landed (0), or its read failed for good with this errno."""
        lib.neuron_reads_end(self.base, offset, neuron, error)

    def run_neuron_reader(self, offset: int, engine: CData, slice_ns: int) -> int:
        """Perform orders in C, without the GIL: 1 stopped, 0 slice over, or a negative errno."""
        return int(lib.neuron_reader_run(self.base, offset, engine, slice_ns))

    def stop_neuron_reads(self, offset: int) -> None:
        """Make the neuron reader leave."""
        lib.neuron_reads_stop(self.base, offset)

    def layer_activity(self, offset: int, layer: int) -> Any:
        """`struct layer_activity` of one layer, live."""
        return ffi.addressof(ffi.cast("struct layer_activity *", self.base + offset)[layer])

    # ---- single words

    def wait_word(self, offset: int, expected: int, timeout_ns: int) -> int:
        """Wait while the 32-bit word equals `expected`; returns its value."""
        return int(lib.word_wait(self.base + offset, expected, timeout_ns))

    def store_word(self, offset: int, value: int) -> None:
        """Write a 32-bit word and wake who waits on it."""
        lib.word_store_wake(self.base + offset, value)
