"""What a machine gives, measured once: the figures the cost model counts with (PAPER §1.10).

Values between measured ones are interpolated by powers, outside of them the nearest one counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any, Self

from polyneuron.errors import FormatError

FORMAT_VERSION = 2


class Kernel(StrEnum):
    """What was timed."""

    MEMORY = "memory"
    """Every byte is looked at and nothing computed."""
    TILES = "tiles"
    """`matmul_tiles`."""
    DOT = "dot"
    """`dot_rows` over rows at random."""
    AXPY = "axpy"
    """`axpy_rows` over rows at random."""
    ATTENTION = "attention"
    """`attention_heads`, bytes of keys and values."""


@dataclass(frozen=True, slots=True)
class DeviceKey:
    """What must be the same for a profile to hold."""

    cpu: str
    cores: int
    isa: str
    version: str
    """Of polyneuron, whose kernels were timed."""
    system: str
    """The operating system's kernel."""
    disk: str
    """The file system's device number."""


@dataclass(frozen=True, slots=True)
class ReadSpeed:
    """Reads of one size, so many at once, from one core."""

    is_random: bool
    read_bytes: int
    depth: int
    range_bytes: int
    """How much of the file was read; 0: all of it."""
    core: int
    reads_per_s: float
    latency_ns: int
    """Median, at that depth."""
    cpu_ns: float
    """Of the thread that submits and reaps, for each read."""


@dataclass(frozen=True, slots=True)
class KernelSpeed:
    """One kernel over weights of one type and width; `bytes_per_s` is of all threads together."""

    kernel: Kernel
    storage: str
    cols: int
    tokens: int
    """Rows of activations that one pass over the weights serves."""
    threads: int
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class StepSpeed:
    """The step board, beyond the work that is shared."""

    threads: int
    op_ns: float
    """Of each op: claims, counting, and waiting for the others."""
    step_ns: float
    """Of a step with a single op: ringing and answering."""


@dataclass(frozen=True, slots=True)
class CacheSpeed:
    """The neuron cache, for each neuron that is asked for."""

    hit_ns: float
    miss_ns: float
    """With eviction; without the read."""


@dataclass(frozen=True, slots=True, eq=False)
class DeviceProfile:
    """All measured figures of one machine."""

    key: DeviceKey
    probed_bytes: int
    """Length of the file that was read."""
    core_kinds: tuple[tuple[int, ...], ...]
    """Cores that are alike, a group each."""
    reads: tuple[ReadSpeed, ...]
    kernels: tuple[KernelSpeed, ...]
    steps: tuple[StepSpeed, ...]
    cache: CacheSpeed

    @property
    def num_cores(self) -> int:
        """Cores that could be used when this was measured."""
        return self.key.cores

    def random_reads(self, read_bytes: float, depth: float) -> ReadSpeed:
        """What random reads all over the file give, from the fastest kind of core."""
        return _between_reads(self, read_bytes, depth)

    def reading_order(self) -> tuple[int, ...]:
        """All cores, those first whose kind does the most random reads; none if all are alike."""
        if len(self.core_kinds) < 2:
            return ()
        kinds = sorted(self.core_kinds, key=lambda kind: -_reads_of(self.reads, kind))
        return tuple(core for kind in kinds for core in kind)

    def layer_reads(self) -> ReadSpeed:
        """What large reads one after another give at their best."""
        rows = [row for row in self.reads if not row.is_random] or list(_widest(self.reads))
        return max(rows, key=lambda row: row.reads_per_s * row.read_bytes)

    def kernel_bytes_per_s(
        self, kernel: Kernel, storage: str, cols: int, threads: int, tokens: int = 1
    ) -> float:
        """Bytes of weights a second of `threads` threads together.

        A type or width that was not timed counts as the nearest one; more tokens than were timed
        cost in proportion.
        """
        return _kernel_speed(self, kernel, storage, cols, threads, tokens)

    def step(self, threads: int) -> StepSpeed:
        """The step board with so many executors."""
        xs = [row.threads for row in self.steps]
        return StepSpeed(
            threads,
            _between(threads, xs, [row.op_ns for row in self.steps]),
            _between(threads, xs, [row.step_ns for row in self.steps]),
        )

    def as_dict(self) -> dict[str, Any]:
        """What JSON can hold; `from_dict` reads it."""
        return {
            "format_version": FORMAT_VERSION,
            "key": asdict(self.key),
            "probed_bytes": self.probed_bytes,
            "core_kinds": [list(group) for group in self.core_kinds],
            "reads": [asdict(row) for row in self.reads],
            "kernels": [asdict(row) for row in self.kernels],
            "steps": [asdict(row) for row in self.steps],
            "cache": asdict(self.cache),
        }

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Self:
        """Read `as_dict`'s object back; FormatError when it is another version's or damaged."""
        try:
            if found["format_version"] != FORMAT_VERSION:
                raise FormatError(f"device profile of version {found['format_version']}")
            profile = cls(
                DeviceKey(**found["key"]),
                int(found["probed_bytes"]),
                tuple(tuple(group) for group in found["core_kinds"]),
                tuple(ReadSpeed(**row) for row in found["reads"]),
                tuple(
                    KernelSpeed(**{**row, "kernel": Kernel(row["kernel"])})
                    for row in found["kernels"]
                ),
                tuple(StepSpeed(**row) for row in found["steps"]),
                CacheSpeed(**found["cache"]),
            )
            figures = [*profile.reads, *profile.kernels, *profile.steps, profile.cache]
            if not profile.steps or not profile.reads or not all(map(_is_sane, figures)):
                raise ValueError("a figure is missing or not above zero")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise FormatError(f"damaged device profile: {error}") from None
        return profile


def _is_sane(row: Any) -> bool:
    """Whether every figure of a row is a number that can be divided by."""
    floats = [value for name, value in asdict(row).items() if name.endswith(("_ns", "_per_s"))]
    return all(isinstance(v, int | float) and math.isfinite(v) and v >= 0 for v in floats) and all(
        value > 0 for name, value in asdict(row).items() if name.endswith("_per_s")
    )


def _widest(reads: Iterable[ReadSpeed]) -> tuple[ReadSpeed, ...]:
    """Random reads over the widest range, from the core that reads the most."""
    random = [row for row in reads if row.is_random]
    widest = max((row.range_bytes or 1 << 62) for row in random)
    rows = [row for row in random if (row.range_bytes or 1 << 62) == widest]
    cores = {row.core for row in rows}
    best = max(cores, key=lambda c: (sum(r.reads_per_s for r in rows if r.core == c), -c))
    return tuple(row for row in rows if row.core == best)


def _reads_of(reads: Iterable[ReadSpeed], kind: Sequence[int]) -> float:
    """Random reads a second from a kind of core, all cases together."""
    return sum(row.reads_per_s for row in reads if row.is_random and row.core in kind)


@lru_cache(maxsize=4096)
def _between_reads(profile: DeviceProfile, read_bytes: float, depth: float) -> ReadSpeed:
    rows, figures = _widest(profile.reads), {}
    for name in ("reads_per_s", "latency_ns", "cpu_ns"):
        depths = sorted({row.depth for row in rows})
        at_depth = []
        for each in depths:
            sizes = sorted(
                (row.read_bytes, getattr(row, name)) for row in rows if row.depth == each
            )
            at_depth.append(_between(read_bytes, [s for s, _ in sizes], [v for _, v in sizes]))
        if name == "reads_per_s":  # a deeper queue can do what a shallower one does
            at_depth = list(accumulate(at_depth, max))
        figures[name] = _between(depth, depths, at_depth)
    return ReadSpeed(
        True, round(read_bytes), round(depth), rows[0].range_bytes, rows[0].core,
        figures["reads_per_s"], round(figures["latency_ns"]), figures["cpu_ns"],
    )  # fmt: skip


@lru_cache(maxsize=4096)
def _kernel_speed(
    profile: DeviceProfile, kernel: Kernel, storage: str, cols: int, threads: int, tokens: int
) -> float:
    known = [row for row in profile.kernels if row.kernel is kernel]
    if not known:
        raise FormatError(f"damaged device profile: nothing about {kernel}")
    types = {row.storage for row in known}
    stand_in = {"q4m": "q4", "f16": "q8", "f32": "q8"}.get(storage, storage)
    chosen = stand_in if stand_in in types else "q4" if "q4" in types else min(types)
    known = [row for row in known if row.storage == chosen]
    width = min({row.cols for row in known}, key=lambda c: abs(math.log(c / cols)))
    known = [row for row in known if row.cols == width]
    single = sorted((row.threads, row.bytes_per_s) for row in known if row.tokens == 1)
    speed = _between(threads, [t for t, _ in single], [s for _, s in single])
    if tokens <= 1:
        return speed
    most = max(row.threads for row in known)
    batch = {row.tokens: row.bytes_per_s for row in known if row.threads == most}
    xs = sorted(batch)
    shared = _between(min(tokens, xs[-1]), xs, [batch[x] for x in xs]) / batch[1]
    return speed * shared * min(1.0, xs[-1] / tokens)


def _between(x: float, xs: Sequence[float], ys: Sequence[float]) -> float:
    """ys at x, straight in logarithms; the ends hold beyond them."""
    pairs = sorted(zip(xs, ys, strict=True))
    if x <= pairs[0][0]:
        return pairs[0][1]
    for (x0, y0), (x1, y1) in pairwise(pairs):
        if x <= x1:
            share = math.log(x / x0) / math.log(x1 / x0)
            if y0 <= 0 or y1 <= 0:
                return y0 + (y1 - y0) * share
            return math.exp(math.log(y0) + (math.log(y1) - math.log(y0)) * share)
    return pairs[-1][1]
