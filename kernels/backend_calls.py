"""How C asks a back end in Python, from inside a step (`kernels/src/backend.h`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from polyneuron.kernels._kernels import ffi, lib

if TYPE_CHECKING:
    from polyneuron.kernels._kernels import CData


class OpServer(Protocol):
    """Whom an executor asks; neither method may raise."""

    def takes(self, op: Any, num_rows: int) -> bool:
        """Whether to compute this `struct step_op` with so many input rows."""

    def run(self, op: Any, num_rows: int) -> bool:
        """Compute an op that was taken; False when the kernels must do all of it."""


class BackendCalls:
    """`struct backend_calls` of a server, which lives as long as this."""

    def __init__(self, server: OpServer) -> None:
        self._handle = ffi.new_handle(server)
        functions = (lib.python_backend_takes, lib.python_backend_run)
        self.pointer = ffi.new("struct backend_calls *", (self._handle, *functions))


@ffi.def_extern(error=0)
def python_backend_takes(handle: CData, op: CData, num_rows: int) -> int:
    """`backend_calls.takes`."""
    server: OpServer = ffi.from_handle(handle)
    return int(server.takes(op, num_rows))


@ffi.def_extern(error=-1)
def python_backend_run(handle: CData, op: CData, num_rows: int) -> int:
    """`backend_calls.run`."""
    server: OpServer = ffi.from_handle(handle)
    return 0 if server.run(op, num_rows) else -1
