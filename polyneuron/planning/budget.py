"""The memory budget: what a run takes, how many layers stay, what each token reads (DESIGN §7)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from polyneuron.backends.spec import BackendKind, check_threads, parse_npu
from polyneuron.config import (
    DEFAULT_NUM_CTX,
    EngineConfig,
    FeedForwardMode,
    Phase,
)
from polyneuron.cores import Cores, this_machine
from polyneuron.errors import ConfigError
from polyneuron.io.ncf_format import Layout
from polyneuron.io.predictor_file import PredictorFile
from polyneuron.kernels.arena import MAX_EXECUTORS
from polyneuron.model.spec import ModelSpec
from polyneuron.planning.attention import check_kv_type
from polyneuron.planning.bundles import NeuronRows, Residency, neuron_rows
from polyneuron.planning.layout import ArenaLayout, plan_layout
from polyneuron.planning.residency import choose_residency
from polyneuron.planning.source import ModelSource
from polyneuron.sizes import show_size

MIB = 1 << 20
RAY_BYTES = 90 * MIB
"""Ray's daemons: measured 70 to 100 MiB."""
DRIVER_BYTES = 130 * MIB
"""The driver with tokenizer and vocabulary: measured 110 to 130 MiB."""
ACTOR_BYTES = 38 * MIB
"""Private memory of an actor once it works: measured 32 to 38 MiB."""
OPENVINO_BYTES = 256 * MIB
"""Of the NPU executor with its library and graphs: measured 90 to 250 MiB."""
OTHER_ACTORS = 4  # coordinator, NPU executor, I/O actor, cache actor
HEADROOM_SHARE = 0.02
"""Of the budget, left free: page tables, sockets, what grows while running."""
LEAST_ACTIVE_SHARE = 0.1
"""Of a layer's neurons, those a token of the sparsest models uses; others use more."""


def resolve_config(
    config: EngineConfig, spec: ModelSpec, machine: Cores | None = None
) -> EngineConfig:
    """Fill in what was left automatic, and refuse what model, arena or machine cannot do.

    `machine`: its cores; None: those of this process.
    """
    cores = machine or this_machine()
    for name in ("cores", "io_cores"):
        cores.check(getattr(config, name), name)
    if config.num_ctx > spec.context_length:
        raise ConfigError(
            f"-c {config.num_ctx}: the model was trained for {spec.context_length} positions; "
            f"give at most that"
        )
    check_kv_type(spec, config.kv_type)
    workers = config.num_workers or min(cores.num_workers(config.cores), MAX_EXECUTORS // 2)
    automatic = max(0, min(workers, MAX_EXECUTORS - workers))
    npu_threads = check_threads(config.npu, config.num_npu_threads, automatic)
    if workers + npu_threads > MAX_EXECUTORS:
        raise ConfigError(
            f"{workers} workers and {npu_threads} NPU threads: there are places for "
            f"{MAX_EXECUTORS} of both together"
        )
    return replace(
        config,
        num_ctx=config.num_ctx or min(spec.context_length, DEFAULT_NUM_CTX),
        num_workers=workers,
        num_npu_threads=npu_threads,
    )


def private_estimate(config: EngineConfig, measured_bytes: int = 0) -> int:
    """Bytes outside the arena; `measured_bytes`: what all takes that has been started.

    A back end's graphs come with the first prompts, after that.
    """
    is_openvino = parse_npu(config.npu).kind is BackendKind.OPENVINO
    actors = (OTHER_ACTORS + config.num_workers) * ACTOR_BYTES
    estimate = RAY_BYTES + DRIVER_BYTES + actors
    return max(measured_bytes, estimate) + (OPENVINO_BYTES if is_openvino else 0)


@dataclass(frozen=True, slots=True)
class Budget:
    """A layout inside a limit, with its account in bytes."""

    limit_bytes: int
    private_bytes: int
    """Ray's daemons, actors and driver outside the arena."""
    layout: ArenaLayout
    residency: Residency
    num_layers: int
    ffn_bytes: int
    """Of all feed-forward weights, as they would lie in memory."""

    @property
    def num_resident(self) -> int:
        """Layers in memory, whole or with the rows that decide."""
        return self.residency.num_resident

    @property
    def total_bytes(self) -> int:
        """All that is expected to be taken."""
        return self.private_bytes + self.layout.num_bytes

    @property
    def streamed_bytes(self) -> int:
        """Bytes read from the file for each token, beside neurons that are missed."""
        return sum(section.num_bytes for section in self.layout.loads(Phase.DECODE))

    @property
    def prompt_bytes(self) -> int:
        """Bytes read from the file for each chunk of a prompt."""
        return sum(section.num_bytes for section in self.layout.loads(Phase.PREFILL))

    @property
    def resident_ffn_fraction(self) -> float:
        """Share of the feed-forward bytes that stay in memory."""
        if self.layout.bundles:
            return self.layout.bundles.resident_bytes / self.ffn_bytes
        return 1.0 - self.streamed_bytes / self.ffn_bytes if self.ffn_bytes else 1.0

    @property
    def cold_slots(self) -> int:
        """Slots of the neuron cache."""
        return self.residency.cold_slots

    def slots_within(self, limit_bytes: int) -> int:
        """Slots of the neuron cache when everything together may take so much.

        Raises ConfigError below what one layer needs, and when there is no cache to shrink.
        """
        bundles = self.layout.bundles
        if bundles is None or not self.cold_slots:
            raise ConfigError("only the neuron cache can shrink while it runs; this run has none")
        least = bundles.rows.least_slots(self.layout.config.decode_tokens)
        slot_bytes = bundles.slot_rows.kept_bytes
        slots = self.cold_slots - -(-max(0, self.limit_bytes - limit_bytes) // slot_bytes)
        if slots < least:
            minimum = self.limit_bytes - (self.cold_slots - least) * slot_bytes
            raise ConfigError(
                f"{show_size(limit_bytes)}: while it runs this model needs at least "
                f"{show_size(minimum)}"
            )
        return slots

    @property
    def cached_share(self) -> float:
        """Share of the cached layers' neurons that the cache holds."""
        bundles = self.layout.bundles
        if bundles is None or not self.num_resident:
            return 0.0
        rows = bundles.rows
        cold = (rows.num_neurons - bundles.pinned_neurons) // rows.slot_neurons
        return self.cold_slots / max(1, self.num_resident * cold)

    @property
    def mode(self) -> FeedForwardMode:
        """What feed-forward blocks compute, resolved."""
        return self.layout.config.mode

    @property
    def has_experts(self) -> bool:
        """Whether the neuron cache would hold clusters of experts."""
        bundles = self.layout.bundles
        return bundles is not None and bundles.rows.has_experts

    @property
    def is_cache_small(self) -> bool:
        """Whether the neuron cache holds less than what one token uses, at the very least."""
        return self.layout.has_neuron_cache and self.cached_share < self.used_share

    @property
    def used_share(self) -> float:
        """Share of the neurons that one token uses: of experts as many as it has, else at least."""
        bundles = self.layout.bundles
        if bundles is None or not bundles.rows.has_experts:
            return LEAST_ACTIVE_SHARE
        rows = bundles.rows
        return rows.num_used / rows.num_experts * (LEAST_ACTIVE_SHARE if rows.is_named else 1.0)

    def warnings(self) -> list[str]:
        """What this budget will make slow."""
        if not self.is_cache_small:
            return []
        if self.has_experts:
            few = (
                f"the neuron cache holds {self.cached_share:.1%} of the experts' neurons and one "
                f"token uses {self.used_share:.1%} or more, so a part of them is read for every "
                f"token; give more --memory or --ffn-resident, or a smaller context with -c"
            )
            return [few]
        small = (
            f"the neuron cache holds {self.cached_share:.1%} of its layers' neurons and one token "
            f"uses about {LEAST_ACTIVE_SHARE:.0%} or more, so each token reads again what the one "
            f"before it used; give more --memory or --ffn-resident, or a smaller context with -c"
        )
        return [small]

    def _hot_row(self) -> str:
        """What the hot region has."""
        resident = f"({self.num_resident} of {self.num_layers})"
        if self.cold_slots and self.has_experts:
            return "resident experts"
        if self.mode is FeedForwardMode.PREDICTED and self.cold_slots:
            return f"hot clusters ({self.residency.pinned_clusters} of each layer)"
        if self.cold_slots:
            return f"gates of feed-forward layers {resident}"
        return f"resident feed-forward layers {resident}"

    def rows(self) -> list[tuple[str, int]]:
        """The table: what, bytes."""
        spans = self.layout.spans
        named = ("fixed", "hot", "cold", "stage", "kv")
        others = self.layout.num_bytes - sum(spans[name].num_bytes for name in named)
        predictors = spans["fixed.predictors"].num_bytes
        what = "the experts' neurons" if self.has_experts else "their neurons"
        cold = [(f"neuron cache ({self.cached_share:.0%} of {what})", spans["cold"].num_bytes)]
        return [
            ("fixed weights (embeddings, attention, norms, head)",
             spans["fixed"].num_bytes - predictors),
            *([("predictors", predictors)] if predictors else []),
            (self._hot_row(), spans["hot"].num_bytes),
            *(cold if self.cold_slots else []),
            ("stage buffers for streamed layers", spans["stage"].num_bytes),
            (f"KV cache ({self.layout.config.kv_type})", spans["kv"].num_bytes),
            ("activations, step boards, mailboxes, scratch", others),
            ("Ray and Python (measured once running)", self.private_bytes),
            ("headroom", self.limit_bytes - self.total_bytes),
        ]  # fmt: skip


def fit(source: ModelSource, config: EngineConfig, limit_bytes: int, private_bytes: int) -> Budget:
    """The layout that keeps the most inside the limit.

    `config.ffn_resident` lowers that. Raises ConfigError that names the minimum when not even
    streaming every layer fits.
    """
    mode = source.resolve_mode(config.mode)
    is_cut = mode is FeedForwardMode.THRESHOLD
    config = replace(config, mode=mode, bounds=source.bounds().values if is_cut else ())
    room = int(limit_bytes * (1 - HEADROOM_SHARE)) - private_bytes
    predicted = config.mode is FeedForwardMode.PREDICTED
    planner = _Planner(source, config, room, source.predictors() if predicted else None)
    residency = planner.most_bundles() if planner.rows else planner.most_layers()
    if residency is None:
        least = planner.least_bytes() + private_bytes
        raise ConfigError(
            f"--memory {show_size(limit_bytes)}: this model needs at least "
            f"{show_size(int(least / (1 - HEADROOM_SHARE)) + MIB)} with context {config.num_ctx}; "
            f"give more, or a smaller context with -c"
        )
    layout = planner.layout(residency)
    return Budget(
        limit_bytes, private_bytes, layout, residency, source.spec.num_layers, planner.ffn_bytes
    )


def fit_runnable(
    source: ModelSource,
    config: EngineConfig,
    limit_bytes: int,
    private_bytes: int,
    become: Callable[[Layout], ModelSource],
) -> tuple[ModelSource, Budget]:
    """`fit` what a run opens: a GGUF that cannot run as it is has to `become` another layout."""
    layout = source.layout_to_run(config.mode, streams=False)
    if layout is None:
        budget = fit(source, config, limit_bytes, private_bytes)
        layout = source.layout_to_run(config.mode, streams=budget.layout.is_streaming)
        if layout is None:
            return source, budget
    source = become(layout)
    return source, fit(source, config, limit_bytes, private_bytes)


@dataclass(frozen=True, slots=True)
class _Planner:
    """Looks for the most that fits into `room` bytes of arena."""

    source: ModelSource
    config: EngineConfig
    room: int
    predictors: PredictorFile | None = None

    @property
    def rows(self) -> NeuronRows | None:
        manifest = self.source.manifest
        return (
            neuron_rows(manifest, self.config.mode) if manifest.layout is Layout.BUNDLES else None
        )

    @property
    def num_layers(self) -> int:
        return self.source.spec.num_layers

    @property
    def ffn_bytes(self) -> int:
        """Of all feed-forward weights in memory."""
        if rows := self.rows:
            return self.num_layers * rows.resident_bytes
        return sum(section.num_bytes for section in self.source.manifest.sections[1:])

    def layout(self, residency: Residency) -> ArenaLayout:
        source = self.source
        return plan_layout(
            source.manifest, source.spec, self.config, residency, self.predictors
        )  # fmt: skip

    def num_bytes(self, residency: Residency) -> int:
        return self.layout(residency).num_bytes

    def fits(self, residency: Residency) -> bool:
        return self.num_bytes(residency) <= self.room

    def least_bytes(self) -> int:
        """The smallest arena: a model of a layer or two takes less than its stage buffers."""
        if self._is_whole:
            return self.num_bytes(self._least)
        return min(self.num_bytes(Residency(num)) for num in (0, self._most_whole()))

    def _most_whole(self) -> int:
        """Layers that may stay as a whole, by `ffn_resident`."""
        share = self.config.ffn_resident
        return self.num_layers if share is None else int(share * self.num_layers + 0.5)

    def most_layers(self) -> Residency | None:
        """The most whole layers; bytes grow with their number, but for the last step."""
        most = self._most_whole()
        low, high = -1, most
        while low < high:
            middle = (low + high + 1) // 2
            if self.fits(Residency(middle)):
                low = middle
            else:
                high = middle - 1
        if low < most and self.fits(Residency(most)):
            low = most  # without streamed layers there are no stage buffers
        return Residency(low) if low >= 0 else None

    @property
    def _is_whole(self) -> bool:
        """Whether slots hold whole bundles."""
        has_experts = self.source.spec.experts is not None
        return has_experts or self.config.mode is FeedForwardMode.PREDICTED

    @property
    def _least(self) -> Residency:
        """Of a file in bundles, the least that can run."""
        rows = self.rows
        assert rows is not None
        if self._is_whole:
            return Residency(self.num_layers, rows.least_slots(self.config.decode_tokens))
        return Residency(0)

    def _choose(self, room: int) -> Residency:
        rows = self.rows
        assert rows is not None
        hot = max(self.config.hot_clusters, default=0)
        return choose_residency(
            rows, self.config.mode, self.num_layers, room, hot, self.config.decode_tokens
        )

    def most_bundles(self) -> Residency | None:
        """Everything, or as many deciding rows and then as many cold slots as there is room for.

        In predicted mode everything, or the hot clusters and then slots of whole bundles.
        """
        share, least = self.config.ffn_resident, self._least
        everything = self._choose(1 << 62)
        if (share is None or share >= 1) and self.fits(everything):
            return everything
        if not self.fits(least):
            return None
        bundles = self.layout(least).bundles
        assert bundles is not None
        room = self.room - self.num_bytes(least) + bundles.resident_bytes
        if share is not None:
            room = min(room, int(share * self.ffn_bytes))
        return self._shrunk(self._choose(room), room)

    def _shrunk(self, residency: Residency, room: int) -> Residency:
        """The same with what the cache's own lists take, which is known only with its size."""
        rows = self.rows
        assert rows is not None
        while (over := self.num_bytes(residency) - self.room) > 0 and residency != self._least:
            room -= max(over, rows.slot_bytes)
            residency = self._choose(room)
        return residency
