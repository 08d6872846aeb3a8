"""A device as the simulator knows it: processors, memory bandwidth, flash (docs/SIMULATOR.md).

A device file gives each figure with its source. What could not be found in a source and had to be
fitted stands apart, under `[fitted]`, each with its reason.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Self

from polyneuron.errors import ConfigError
from polyneuron.planning.device import DeviceProfile, Kernel
from polyneuron.scenarios.included import merged
from polyneuron.scenarios.script_table import ScriptTable
from polyneuron.sizes import parse_size

Points = tuple[tuple[float, float], ...]
"""(x, y), x ascending."""


@dataclass(frozen=True, slots=True)
class CpuModel:
    """CPU cores; rates are bytes of weights a second."""

    cores: int
    """That compute; with a reader of its own, one less."""
    bandwidth: float
    """Of the memory, all cores together."""
    dense_share: float
    """Of the bandwidth that dense kernels get."""
    core_rate: float
    """Of one core over scattered rows."""
    core_macs: float
    """Multiplications and additions a second of one core, a batch's further tokens."""
    prefill_macs: float
    """Of all cores, prompts."""
    neuron_ns: float
    """Of one core for each neuron it finds through the neuron cache."""
    miss_ns: float
    """Of one core for each neuron that is admitted."""
    barrier_ns: float
    """Until all cores have met."""
    layer_ns: float
    """Of a layer beyond its bytes."""
    step_ns: float
    """Of a step beyond its layers."""


@dataclass(frozen=True, slots=True)
class NpuModel:
    """The NPU, dense work only."""

    bandwidth: float
    """Alone on the memory."""
    joint_bandwidth: float
    """Of CPU and NPU together."""
    dense_share: float
    prefill_macs: float
    call_ns: float
    """From the call of a graph to its begin and back."""
    swap_ns: float
    """Of a graph swap that attention does not hide."""


@dataclass(frozen=True, slots=True)
class StorageModel:
    """Flash behind one command queue; rates in bytes a second."""

    page_reads: Points
    """(bytes that reads spread over, rate of random reads of a page) from the reader's core, a deep
    queue."""
    large_rate: float
    """Of random reads so large that their number no longer counts."""
    page: int
    """Bytes of a page: less costs as much."""
    merges: bool
    """Whether neighbours in the file are read as one."""
    cores: Mapping[str, float]
    """Share of the rate by the kind of core that issues."""
    reader: str
    """The kind of the reader's core."""
    shared: float
    """Share of the rate when several cores issue."""
    depth: int
    latency_ns: float
    """Of a read alone, beyond its place in the queue."""
    tail_ns: float
    """How much later a slow read completes."""
    tail_share: float
    """Of reads, those that are slow."""
    map_rate: float
    """Of pages that are read because somebody touched them."""
    stream_rate: float
    """Of whole layers, read ahead while others compute."""

    def _share(self, is_shared: bool) -> float:
        return self.cores.get(self.reader, 1.0) * (self.shared if is_shared else 1.0)

    def command_ns(self, range_bytes: int, is_shared: bool) -> float:
        """The queue's time for each random read over such a range, beyond moving its bytes."""
        page_ns = self.page * 1e9 / interpolated(self.page_reads, range_bytes)
        return max(0.0, page_ns - self.page * 1e9 / self.large_rate) / self._share(is_shared)

    def moving_ns(self, read_bytes: float, is_shared: bool) -> float:
        """The queue's time for so many bytes of one read."""
        return max(read_bytes, self.page) * 1e9 / self.large_rate / self._share(is_shared)


@dataclass(frozen=True, slots=True)
class DeviceModel:
    """One device."""

    name: str
    memory: int
    """Bytes a model may use."""
    cpu: CpuModel
    npu: NpuModel | None
    storage: StorageModel
    fitted: Mapping[str, str]
    """Dotted key -> why it had to be fitted."""
    profile: DeviceProfile | None = None
    """Of this machine: the planner's cost model counts with it."""

    @classmethod
    def from_table(cls, table: Mapping[str, Any], where: str) -> Self:
        """A device file's tables; ConfigError names file and key."""
        whole, reasons = with_fitted(table, where)
        top = ScriptTable(whole, where)
        top.only(("name", "profile", "about", "source", "memory", "cpu", "npu", "storage"))
        sections = {
            key: ScriptTable(_section(top, key), where, key) for key in ("cpu", "npu", "storage")
        }
        npu = sections["npu"]
        return cls(
            name=top.text("name", top.text("profile", "device")),
            memory=parse_size(str(top.need("memory", "a size")), f"{where}: memory"),
            cpu=CpuModel(**_numbers(sections["cpu"], CpuModel, {"cores"})),
            npu=NpuModel(**_numbers(npu, NpuModel, set())) if npu.values else None,
            storage=_storage(sections["storage"]),
            fitted=reasons,
        )

    @classmethod
    def of_profile(cls, profile: DeviceProfile, memory: int) -> Self:
        """This machine, as `polyneuron profile --device` measured it: nothing is fitted."""
        return cls(
            "here", memory, _measured_cpu(profile), None, _measured_storage(profile), {}, profile
        )


def with_fitted(table: Mapping[str, Any], where: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Tables with what stands under `[fitted]` in its place, and the reasons by dotted key."""
    found = {key: value for key, value in table.items() if key != "fitted"}
    reasons: dict[str, str] = {}
    for dotted, entry in table.get("fitted", {}).items():
        if not isinstance(entry, Mapping) or set(entry) != {"value", "reason"}:
            raise ConfigError(f'{where}: fitted."{dotted}": give {{ value = …, reason = "…" }}')
        reasons[dotted] = str(entry["reason"])
        place: Any = entry["value"]
        for part in reversed(dotted.split(".")):
            place = {part: place}
        found = merged(place, found)  # what a scenario sets itself goes before
    return found, reasons


def _section(table: ScriptTable, key: str) -> Mapping[str, Any]:
    found = table.values.get(key, {})
    if not isinstance(found, Mapping):
        table.refuse(key, f"is {found!r}: give a table")
    return found


def _numbers(table: ScriptTable, kind: Any, whole: set[str]) -> dict[str, Any]:
    names = tuple(kind.__slots__)
    table.only((*names, "source"))
    return {
        name: table.whole(name, None, 1, 1024) if name in whole else table.number(name, None)
        for name in names
    }


def _storage(table: ScriptTable) -> StorageModel:
    table.only((*StorageModel.__slots__, "source"))
    cores = table.need("cores", "a table: share of the rate by kind of core")
    if not isinstance(cores, Mapping):
        table.refuse("cores", f"is {cores!r}: give a table")
    numbers = (
        "large_rate", "shared", "latency_ns", "tail_ns", "tail_share", "map_rate", "stream_rate",
    )  # fmt: skip
    return StorageModel(
        page_reads=_points(table, "page_reads"),
        page=table.whole("page", None, 512, 1 << 24),
        merges=table.flag("merges", default=True),
        cores={str(kind): float(share) for kind, share in cores.items()},
        reader=table.text("reader"),
        depth=table.whole("depth", None, 1, 4096),
        **{name: table.number(name, None) for name in numbers},
    )


def _points(table: ScriptTable, key: str) -> Points:
    rows = table.need(key, "a list of [bytes, figure]")
    try:
        points = tuple((float(x), float(y)) for x, y in rows)
    except (TypeError, ValueError):
        table.refuse(key, f"is {rows!r}: give a list of [bytes, figure]")
    if not points or any(a[0] >= b[0] for a, b in pairwise(points)) or min(map(min, points)) <= 0:
        table.refuse(key, "give figures above 0, the smallest number of bytes first")
    return points


def interpolated(points: Points, x: float) -> float:
    """y at x, straight in logarithms; the ends hold beyond them."""
    if x <= points[0][0]:
        return points[0][1]
    for (x0, y0), (x1, y1) in pairwise(points):
        if x <= x1:
            share = math.log(x / x0) / math.log(x1 / x0)
            return math.exp(math.log(y0) + (math.log(y1) - math.log(y0)) * share)
    return points[-1][1]


# ---- this machine

Q4 = "q4"
WIDTH = 4096


def _measured_cpu(profile: DeviceProfile) -> CpuModel:
    cores = profile.num_cores

    def rate(kernel: Kernel, tokens: int = 1) -> float:
        return profile.kernel_bytes_per_s(kernel, Q4, WIDTH, cores, tokens)

    memory, tiles = rate(Kernel.MEMORY), rate(Kernel.TILES)
    rows = 3.0 / (2.0 / rate(Kernel.DOT) + 1.0 / rate(Kernel.AXPY))
    weights_a_byte = 32 / 18
    step = profile.step(cores)
    return CpuModel(
        cores, memory, min(1.0, tiles / memory), rows / cores,
        rows / cores * weights_a_byte, rate(Kernel.TILES, 512) * weights_a_byte * 512,
        profile.cache.hit_ns, profile.cache.miss_ns, step.op_ns, 10 * step.op_ns, step.step_ns,
    )  # fmt: skip


def _measured_storage(profile: DeviceProfile) -> StorageModel:
    sizes = sorted({row.read_bytes for row in profile.reads if row.is_random})
    depth = max(row.depth for row in profile.reads if row.is_random)
    page, large = (profile.random_reads(size, depth) for size in (sizes[0], sizes[-1]))
    layers = profile.layer_reads()
    alone = profile.random_reads(sizes[0], 1).latency_ns
    return StorageModel(
        page_reads=((float(profile.probed_bytes), page.reads_per_s * sizes[0]),),
        large_rate=max(large.reads_per_s * sizes[-1], page.reads_per_s * sizes[0] * 1.01),
        page=sizes[0], merges=False, cores={"any": 1.0}, reader="any", shared=1.0, depth=depth,
        latency_ns=max(0.0, alone - 1e9 / page.reads_per_s), tail_ns=0.0, tail_share=0.0,
        map_rate=sizes[0] * 1e9 / max(1.0, alone),
        stream_rate=layers.reads_per_s * layers.read_bytes,
    )  # fmt: skip
