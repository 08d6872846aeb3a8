"""Python's face of the simulated step (`kernels/src/simulation_api.h` has the rules).

A `StepSimulation` owns what a run needs: activity of every sequence, the cache, records. It decides
nothing: law, costs and regions are given, and numbers are whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from polyneuron.errors import ProtocolError
from polyneuron.kernels._kernels import ffi, lib
from polyneuron.kernels.neuron_cache import NeuronCache

if TYPE_CHECKING:
    from polyneuron.kernels._kernels import CData

U32 = NDArray[np.uint32]
MAX_SEQUENCES = 64
WORD_NEURONS = 64
"""A unit's neurons are a multiple of this."""

STEP_RECORD = np.dtype(
    [
        ("t_ns", np.int64), ("ns", np.int64), ("layer", np.int32), ("cluster", np.int32),
        ("stage", np.int32), ("core", np.int32), ("neurons", np.uint32), ("misses", np.uint32),
        ("bytes", np.uint32), ("pad", np.uint32),
    ]
)  # fmt: skip
JOINING = np.dtype([("share", np.uint32), ("neuron", np.uint16), ("other", np.uint16)])
assert JOINING.itemsize == ffi.sizeof("struct joining")
assert STEP_RECORD.itemsize == ffi.sizeof("struct step_record")


class CacheKind(IntEnum):
    """What is kept between tokens, as `enum cache_kind`."""

    ALL = 0
    NONE = 1
    NEURON = 2
    WINDOW = 3


class StepFlag(IntFlag):
    """How a layer's stages follow each other, as `enum simulation_flag`."""

    BARRIER = 1
    TWO_PHASE = 2
    LOOKAHEAD = 4


class Stage(IntEnum):
    """What a record is of, as `enum record_stage`."""

    PRED = 0
    GIO = 1
    GC = 2
    UDIO = 3
    UDC = 4
    NPU = 5
    ATTENTION = 6
    HOT = 7


@dataclass(frozen=True, slots=True, eq=False)
class LawTables:
    """`struct neuron_law` and `struct expert_law`; arrays as there."""

    num_neurons: int
    place: U32
    alias_share: U32
    alias_rank: U32
    leave: U32
    """(levels, neurons)."""
    num_draws: U32
    gate_share: int
    """Of 2^16."""
    num_experts: int = 1
    num_used: int = 1
    stay: int = 0
    expert_share: U32 | None = None
    expert_other: U32 | None = None


@dataclass(frozen=True, slots=True)
class StepTotals:
    """`struct step_totals`."""

    needed: int
    hits: int
    misses: int
    hot: int
    active: int
    reads: int
    bytes: int
    layers_ns: int
    compute_ns: int
    exposed_ns: int
    npu_ns: int
    wait_ns: int
    stall_ns: int
    io_free_ns: int


class StepSimulation:
    """One engine's feed-forward layers in model time."""

    def __init__(
        self,
        tables: LawTables | Sequence[LawTables],
        *,
        num_layers: int,
        cluster_neurons: int,
        max_sequences: int,
        cache_kind: CacheKind,
        num_slots: int,
        seed: int,
        max_records: int = 0,
    ) -> None:
        laws = [tables] if isinstance(tables, LawTables) else list(tables)
        if len(laws) not in (1, num_layers):
            raise ValueError(f"{len(laws)} laws for {num_layers} layers: one for all, or one each")
        tables = laws[0]
        if tables.num_neurons % WORD_NEURONS or cluster_neurons % WORD_NEURONS:
            raise ValueError(f"num_neurons and cluster_neurons: multiples of {WORD_NEURONS}")
        if not 0 < max_sequences <= MAX_SEQUENCES:
            raise ValueError(f"max_sequences {max_sequences}: 1 to {MAX_SEQUENCES}")
        self.num_units = num_layers * tables.num_experts
        self.num_neurons = self.num_units * tables.num_neurons
        made: Any = ffi.new("struct simulation *")
        self._c = made
        self._c.num_layers, self._c.cluster_neurons = num_layers, cluster_neurons
        self._c.cache_kind = cache_kind
        self._kept: dict[str, Any] = {}
        self.set_law(laws)
        self._allocate(tables, num_layers, max_sequences, seed, max_records)
        self._cache = self._make_cache(cache_kind, num_slots)

    def _keep(self, name: str, array: NDArray[Any], kind: str = "uint32_t *") -> CData:
        self._kept[name] = array
        return ffi.cast(kind, array.ctypes.data)

    def set_law(self, laws: LawTables | Sequence[LawTables]) -> None:
        """How neurons behave from now on; as many laws, and of the same sizes, as before."""
        laws = [laws] if isinstance(laws, LawTables) else laws
        tables, experts = laws[0], self._c.experts
        self._fill_law(self._c.law, tables, "")
        if len(laws) > 1:
            layers = ffi.new("struct neuron_law[]", len(laws))
            for layer, own in enumerate(laws):
                self._fill_law(layers[layer], own, f"{layer}.")
            self._kept["layers"] = layers
            self._c.layer_laws = layers
        experts.num_experts, experts.num_used = tables.num_experts, tables.num_used
        experts.stay = tables.stay
        if tables.expert_share is not None and tables.expert_other is not None:
            experts.alias_share = self._keep("expert_share", tables.expert_share)
            experts.alias_expert = self._keep("expert_other", tables.expert_other)

    def _fill_law(self, law: Any, tables: LawTables, prefix: str) -> None:
        law.num_neurons, law.num_levels = tables.num_neurons, len(tables.num_draws)
        joining = np.empty(tables.num_neurons, JOINING)
        joining["share"], joining["neuron"] = tables.alias_share, tables.place
        joining["other"] = tables.place[tables.alias_rank]
        law.joining = self._keep(f"{prefix}joining", joining, "struct joining *")
        for name in ("place", "leave", "num_draws"):
            array = np.ascontiguousarray(getattr(tables, name), np.uint32)
            setattr(law, name, self._keep(prefix + name, array))
        law.gate_share = tables.gate_share

    def _allocate(
        self, tables: LawTables, num_layers: int, max_sequences: int, seed: int, max_records: int
    ) -> None:
        words = self.num_units * tables.num_neurons // WORD_NEURONS
        bits = np.zeros((max_sequences, words), np.uint64)
        chosen = np.zeros((max_sequences, num_layers, tables.num_used), np.uint8)
        states = np.random.SeedSequence(seed).generate_state(max_sequences + 1, np.uint64)
        num_words = lib.simulation_scratch_words(tables.num_neurons, tables.num_experts)
        scratch = np.zeros(num_words + 2, np.uint32)
        self._c.bits = self._keep("bits", bits, "uint64_t *")
        self._c.random = self._keep("random", states, "uint64_t *")
        self._c.chosen = self._keep("chosen", chosen, "uint8_t *")
        self._c.scratch = self._keep("scratch", scratch)
        self._records = np.zeros(max_records, STEP_RECORD)
        self._totals = ffi.new("struct step_totals *")

    def _make_cache(self, kind: CacheKind, num_slots: int) -> NeuronCache | None:
        if kind is CacheKind.NEURON:
            cache = NeuronCache.allocate(self.num_neurons, max(1, num_slots))
            self._c.cache = ffi.cast("void *", cache.address)
            return cache
        if kind is CacheKind.WINDOW:
            window = np.zeros(lib.recent_bytes(self.num_neurons) // 8 + 1, np.uint64)
            self._c.cache = self._keep("window", window, "void *")
            lib.recent_format(self._c.cache, self.num_neurons, num_slots)
        return None

    @property
    def cache(self) -> NeuronCache | None:
        """The neuron cache, where there is one."""
        return self._cache

    def resize(self, num_slots: int) -> None:
        """Give the cache so many slots, as many as it began with at most."""
        if self._cache is not None:
            self._cache.resize(self._c.epoch, 0, num_slots)
        elif self._c.cache_kind == CacheKind.WINDOW:
            lib.recent_resize(self._c.cache, num_slots)

    def configure(
        self, costs: Mapping[str, int], *, num_cores: int, flags: StepFlag, hot_neurons: int,
        first_bytes: int, second_bytes: int, bundle_bytes: int, merge_gap: int, queue_depth: int,
        pinned_neurons: int = 0,
    ) -> None:  # fmt: skip
        """What steps cost from now on; `costs` are all fields of `struct cluster_costs`.

        The first `pinned_neurons` of a unit stay without the cache, as the hot ones do.
        """
        for name, value in costs.items():
            setattr(self._c.costs, name, value)
        self._c.num_cores, self._c.flags, self._c.hot_neurons = num_cores, flags, hot_neurons
        self._c.pinned_neurons = max(hot_neurons, pinned_neurons)
        self._c.first_bytes, self._c.second_bytes = first_bytes, second_bytes
        self._c.bundle_bytes, self._c.merge_gap = bundle_bytes, merge_gap
        self._c.queue_depth = queue_depth

    def set_attention(self, attention_ns: int) -> None:
        """A layer's attention, which grows with the context."""
        self._c.costs.attention_ns = attention_ns

    def play_recorded(self, bits: NDArray[np.uint64], task_neurons: int = 0) -> None:
        """Neurons as recorded from now on, instead of drawn: (layers, tokens, words).

        Every sequence is at the first token; `task_neurons` are looked up together, 0: a layer's
        all at once. Of a model without experts, of these very sizes.
        """
        layers, tokens, words = bits.shape
        wanted = (self.num_units, self._c.law.num_neurons // WORD_NEURONS)
        if self._c.experts.num_experts != 1 or (layers, words) != wanted or not tokens:
            raise ValueError(f"a recording {bits.shape}: layers and words must be {wanted}")
        whole = np.ascontiguousarray(bits, "<u8")
        self._c.recorded = self._keep("recorded", whole, "uint64_t *")
        self._c.num_recorded, self._c.task_neurons = tokens, task_neurons
        places = np.zeros(len(self._kept["bits"]), np.uint32)
        self._c.next_recorded = self._keep("next_recorded", places)

    def go_to_recorded(self, sequence: int, token: int) -> None:
        """The recorded token that a sequence comes to in its next step; over the end it goes on
        at the beginning."""
        self._kept["next_recorded"][sequence] = token % self._c.num_recorded

    def next_recorded(self, sequence: int) -> int:
        """The recorded token that a sequence comes to in its next step."""
        return int(self._kept["next_recorded"][sequence])

    def begin(self, sequence: int) -> None:
        """A sequence's neurons, as its first token needs them."""
        lib.simulation_begin(self._c, sequence)

    def warm(self, num_ranks: int) -> None:
        """The cache takes the hottest neurons of every unit."""
        lib.simulation_warm(self._c, num_ranks)

    def step(
        self, sequences: Sequence[int], levels: Sequence[int], is_detailed: bool = False
    ) -> StepTotals:
        """One decode step; `records` are of it if it is detailed."""
        self._c.records = ffi.cast("struct step_record *", self._records.ctypes.data)
        if not is_detailed:
            self._c.records = ffi.NULL
        self._c.max_records, n = len(self._records), len(sequences)
        ids, news = ffi.new("uint32_t[]", list(sequences)), ffi.new("uint32_t[]", list(levels))
        if lib.simulation_step(self._c, ids, news, n, self._totals) != 0:
            raise ProtocolError("a simulated step has more clusters or records than there is room")
        return StepTotals(*(int(getattr(self._totals, f)) for f in StepTotals.__slots__))

    @property
    def records(self) -> NDArray[np.void]:
        """What the last step did, if it was detailed, in the order it was found."""
        return self._records[: self._c.num_records]

    def chosen_experts(self, sequence: int) -> NDArray[np.uint8]:
        """(layers, used) of a sequence's last token."""
        chosen: NDArray[np.uint8] = self._kept["chosen"][sequence]
        return chosen

    def active_bits(self, sequence: int) -> NDArray[np.uint64]:
        """(units * neurons / 64) a bit for each neuron that a sequence's last token needed."""
        bits: NDArray[np.uint64] = self._kept["bits"][sequence]
        return bits
