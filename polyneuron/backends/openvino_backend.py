"""OpenVINO as a back end: `CPU`, and `NPU` or `GPU` where its drivers are installed.

A graph's weights are inputs bound to the arena's own tiles: nothing is repacked, none is copied.
What the arena holds as structures of scales and quants is bound once as bytes and once as halves,
and the graph takes both apart. Activations are the values of the int8 blocks that the native
kernels read. So it multiplies the very numbers that those do, in floats, and differs from them by
the order of float32 additions alone; precision f16, of other devices, adds its own rounding.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyneuron.backends.backend import Buffers, Capabilities, Graph, ShapeBucket
from polyneuron.backends.spec import OPENVINO_MISSING, precision_of
from polyneuron.errors import BackendError, ConfigError
from polyneuron.kernels.quant import BLOCK_COLS, TILE_ROWS, StorageType, tile_bytes

STORAGES = frozenset(
    {StorageType.F32, StorageType.F16, StorageType.Q8, StorageType.Q4, StorageType.Q4M}
)
MAX_GRAPHS = 12
"""Each keeps about twice its weights as floats: 8 to 10 MiB."""
HALVES_BYTES = 2 * TILE_ROWS
"""Of one row of scales, or of minima, in a tile block."""


def load_openvino() -> Any:
    """The module; ConfigError with the cure where it is not installed."""
    try:
        import openvino
    except ImportError:
        raise ConfigError(OPENVINO_MISSING) from None
    return openvino


def device_names(openvino: Any) -> dict[str, str]:
    """Devices by the name that `--npu openvino:DEVICE` takes -> their own names."""
    core = openvino.Core()
    return {
        device: str(core.get_property(device, "FULL_DEVICE_NAME"))
        for device in core.available_devices
    }


def stated_capabilities(device: str, name: str) -> Capabilities:
    """What is asked of a device, whose own name this is."""
    return Capabilities(
        f"openvino:{device}", name, precision_of(device), STORAGES, max_graphs=MAX_GRAPHS,
        takes_floats=True,
    )  # fmt: skip


@dataclass(slots=True, eq=False)
class OpenvinoGraph(Graph):
    """One compiled shape with its one request."""

    request: Any
    views: list[tuple[str, np.dtype[Any], tuple[int, ...]]]
    """Of each input: the buffer it is bound to, as what type and shape."""
    bound: list[Any] = field(default_factory=list)
    """What keeps the bound arrays alive."""


class OpenvinoBackend:
    """One device of OpenVINO; ConfigError when there is no such device here."""

    def __init__(self, device: str, num_threads: int) -> None:
        self._openvino = load_openvino()
        names = device_names(self._openvino)
        if device not in names:
            found = ", ".join(names) or "none"
            raise ConfigError(
                f"--npu openvino:{device}: no such device here, found: {found}; install its driver "
                "or name another"
            )
        self._device, self._name = device, names[device]
        self._core = self._openvino.Core()
        self._options: dict[str, Any] = {
            "INFERENCE_PRECISION_HINT": precision_of(device),
            "PERFORMANCE_HINT": "LATENCY",
        }
        if device == "CPU":
            self._options |= {
                "INFERENCE_NUM_THREADS": num_threads, "NUM_STREAMS": 1, "ENABLE_CPU_PINNING": False
            }  # fmt: skip

    def capabilities(self) -> Capabilities:
        """As `Backend`."""
        return stated_capabilities(self._device, self._name)

    def compile(self, bucket: ShapeBucket) -> OpenvinoGraph:
        """As `Backend`; about 50 ms on a CPU, once a shape."""
        model, views = _Model(bucket).build(self._openvino)
        compiled = self._core.compile_model(model, self._device, self._options)
        return OpenvinoGraph(bucket, compiled.create_infer_request(), views)

    def bind(self, graph: Graph, buffers: Buffers) -> None:
        """As `Backend`: every buffer is shared, none is copied here."""
        assert isinstance(graph, OpenvinoGraph)
        tensor = self._openvino.Tensor
        arrays = [_as(getattr(buffers, name), dtype, shape) for name, dtype, shape in graph.views]
        graph.bound = [tensor(array, shared_memory=True) for array in (*arrays, buffers.out)]
        for index, bound in enumerate(graph.bound[:-1]):
            graph.request.set_input_tensor(index, bound)
        graph.request.set_output_tensor(0, graph.bound[-1])

    def run(self, graph: Graph) -> None:
        """As `Backend`."""
        assert isinstance(graph, OpenvinoGraph)
        if not graph.bound:
            raise BackendError("openvino: a graph was run before it was bound")
        graph.request.infer()


def _as(array: NDArray[Any], dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """The same bytes as another type and shape."""
    return array.reshape(-1).view(dtype).reshape(shape)


@dataclass(slots=True)
class _Model:
    """Builds out (tokens, rows) = x times the transposed tiles."""

    bucket: ShapeBucket
    views: list[tuple[str, np.dtype[Any], tuple[int, ...]]] = field(default_factory=list)
    parameters: list[Any] = field(default_factory=list)
    op: Any = None
    """OpenVINO's operations."""

    def build(self, openvino: Any) -> tuple[Any, list[tuple[str, np.dtype[Any], tuple[int, ...]]]]:
        from openvino import opset8

        self.op = opset8
        x = self.input("x", np.float32, self.bucket.tokens, self.bucket.cols)
        product = opset8.matmul(x, self.weights(), False, True)
        return openvino.Model([product], self.parameters, "tiles"), self.views

    def input(self, buffer: str, dtype: Any, *shape: int) -> Any:
        node = self.op.parameter(list(shape), dtype)
        self.views.append((buffer, np.dtype(dtype), shape))
        self.parameters.append(node)
        return node

    def floats(self, node: Any) -> Any:
        return self.op.convert(node, "f32")

    def constant(self, *values: float) -> Any:
        return self.op.constant(np.array(values, np.float32))

    def shaped(self, node: Any, *shape: int) -> Any:
        return self.op.reshape(node, self.op.constant(np.array(shape, np.int64)), False)

    def last(self, node: Any, start: int, stop: int) -> Any:
        """[start, stop) of the last of three axes."""
        bounds = [self.op.constant(np.array([value], np.int64)) for value in (start, stop, 1, 2)]
        return self.op.slice(node, *bounds)

    def weights(self) -> Any:
        """Float32 (rows, cols) of the tiles (blocks.h tells how they lie)."""
        rows, cols, storage = self.bucket.rows, self.bucket.cols, self.bucket.storage
        tiles = rows // TILE_ROWS
        if not storage.is_quantised:
            dtype: Any = np.float16 if storage is StorageType.F16 else np.float32
            columns = self.floats(self.input("weight", dtype, tiles, cols, TILE_ROWS))
            return self.shaped(self.turned(columns, 0, 2, 1), rows, cols)
        blocks, block_bytes = cols // BLOCK_COLS, tile_bytes(storage, BLOCK_COLS)
        halves = self.input("weight", np.float16, tiles, blocks, block_bytes // 2)
        scales = self.by_row(halves, 0)
        begin = HALVES_BYTES * (2 if storage is StorageType.Q4M else 1)
        dtype = np.int8 if storage is StorageType.Q8 else np.uint8
        stored = self.input("weight", dtype, tiles, blocks, block_bytes)
        quants = self.floats(self.last(stored, begin, block_bytes))
        if storage is not StorageType.Q8:
            quants = self.nibbles(quants)
        if storage is StorageType.Q4:
            quants = self.op.subtract(quants, self.constant(8.0))
        # Byte [g * 128 + row * 4 + i] of a block is column 4 g + i.
        values = self.op.multiply(self.shaped(quants, tiles, blocks, 8, TILE_ROWS, 4), scales)
        if storage is StorageType.Q4M:
            values = self.op.add(values, self.by_row(halves, TILE_ROWS))
        return self.shaped(self.turned(values, 0, 3, 1, 2, 4), rows, cols)

    def by_row(self, halves: Any, start: int) -> Any:
        """32 halves of each block, from `start` on, to go with quants (…, 8, 32, 4)."""
        shape = (self.bucket.rows // TILE_ROWS, self.bucket.cols // BLOCK_COLS, 1, TILE_ROWS, 1)
        return self.shaped(self.floats(self.last(halves, start, start + TILE_ROWS)), *shape)

    def nibbles(self, quants: Any) -> Any:
        """Low nibbles, then high ones, by exact float arithmetic, which every device has."""
        high = self.op.floor(self.op.multiply(quants, self.constant(1 / 16)))
        low = self.op.subtract(quants, self.op.multiply(high, self.constant(16.0)))
        return self.op.concat([low, high], 2)

    def turned(self, node: Any, *axes: int) -> Any:
        return self.op.transpose(node, self.op.constant(np.array(axes, np.int64)))
