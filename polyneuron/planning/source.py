"""A model file as the engine sees it: description, metadata, and what to read where."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from polyneuron.config import FeedForwardMode
from polyneuron.errors import ConfigError
from polyneuron.io.arena_loader import Reads
from polyneuron.io.bundle_reader import BundleRead, SlotRun
from polyneuron.io.file_kind import is_ncf
from polyneuron.io.gguf_file import GgufHeader, check_supported
from polyneuron.io.ncf_format import Layout, NcfManifest, NcfSource
from polyneuron.io.ncf_reader import read_ncf
from polyneuron.io.predictor_file import (
    PredictorFile,
    model_key,
    predictor_path,
    read_predictors,
)
from polyneuron.io.profile_file import ActivationBounds, Profile, profile_path, read_profile
from polyneuron.io.section_reader import SectionRead
from polyneuron.io.weight_reader import WeightRead
from polyneuron.model.architecture import describe
from polyneuron.model.model_header import read_model_header
from polyneuron.model.ncf_plan import SPARSE_KINDS, has_rows, plan_gguf
from polyneuron.model.ncf_spec import spec_of
from polyneuron.model.powerinfer import is_turned
from polyneuron.model.spec import ModelSpec
from polyneuron.planning.bundles import BundlePlan, neuron_rows
from polyneuron.planning.layout import ArenaLayout

SPARSE_MODES = (FeedForwardMode.EXACT, FeedForwardMode.PREDICTED)
"""Those that leave out neurons which are often exactly zero."""
ROW_MODES = (*SPARSE_MODES, FeedForwardMode.THRESHOLD)
"""Those that need a file in bundles."""


@dataclass(frozen=True, slots=True, eq=False)
class ModelSource:
    """One model file; a GGUF is laid out as the neuron-cluster file it would become."""

    path: Path
    spec: ModelSpec
    metadata: Mapping[str, Any]
    manifest: NcfManifest
    header: GgufHeader | None
    """Of a GGUF: its tensors are packed while they are read, so it can only be resident."""

    @property
    def can_stream(self) -> bool:
        """Whether layers lie in the file as they lie in memory."""
        return self.header is None

    @property
    def is_parted(self) -> bool:
        """Whether its tensors lie in several files, or not as they are wanted."""
        return self.header is not None and not self.header.files.is_plain

    @property
    def is_in_bundles_only(self) -> bool:
        """Whether it cannot be laid out as tiles: experts, and down matrices that lie turned."""
        return bool(self.spec.experts) or (self.header is not None and is_turned(self.header))

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights as stored in memory."""
        return sum(tensor.num_bytes for tensor in self.manifest.tensors)

    @property
    def is_sparse(self) -> bool:
        """Whether neurons of this model are often exactly zero, and can be left out."""
        return self.spec.feed_forward in SPARSE_KINDS and has_rows(self.spec)

    def resolve_mode(self, wanted: FeedForwardMode) -> FeedForwardMode:
        """Exact where the file is in bundles, unless told otherwise; ConfigError with the cure."""
        if wanted is FeedForwardMode.THRESHOLD:
            check_boundable(self.spec)
        if wanted in SPARSE_MODES and not has_rows(self.spec):
            raise ConfigError(
                f"--mode {wanted}: neurons of {self.spec.family} are not read one by one; use "
                "--mode dense"
            )
        if wanted in SPARSE_MODES and not self.is_sparse:
            raise ConfigError(
                f"--mode {wanted}: {self.spec.feed_forward.name.lower()} activations are never "
                f"exactly zero, so nothing could be left out; use --mode dense, or see "
                f"polyneuron profile --threshold"
            )
        if self.manifest.layout is Layout.BUNDLES:
            best = FeedForwardMode.EXACT if self.is_sparse else FeedForwardMode.DENSE
            return best if wanted is FeedForwardMode.AUTO else wanted
        if wanted not in ROW_MODES:
            return FeedForwardMode.DENSE
        raise ConfigError(
            f"--mode {wanted}: {self.path} keeps its feed-forward weights as tiles; convert its "
            f"source with --layout bundles, or use --mode dense"
        )

    def layout_to_run(self, wanted: FeedForwardMode, *, streams: bool) -> Layout | None:
        """The layout a GGUF is converted to before it runs; None: it runs as it is."""
        if self.can_stream:
            return None
        if self.is_in_bundles_only:
            return Layout.BUNDLES
        if wanted is FeedForwardMode.THRESHOLD:
            return Layout.BUNDLES
        if self.is_sparse and (wanted in SPARSE_MODES or streams):
            return Layout.TILES if wanted is FeedForwardMode.DENSE else Layout.BUNDLES
        return Layout.TILES if streams else None

    def predictors(self) -> PredictorFile:
        """The predictors beside the file; ConfigError with the cure when there are none for it."""
        return _predictors_of(self)

    def profile(self) -> Profile | None:
        """What was counted of the model, beside the file; None where nothing was.

        Raises ConfigError when it is another model's, FormatError when it is damaged.
        """
        path = profile_path(self.path)
        return _profile_of(self, path.stat().st_mtime_ns) if path.exists() else None

    def bounds(self) -> ActivationBounds:
        """Those in the profile beside the file; ConfigError with the cure when there are none."""
        profile = self.profile()
        found = profile.bounds if profile else None
        if found is None:
            raise ConfigError(
                f"--mode threshold: no bounds at {profile_path(self.path)}; make them with "
                f"polyneuron profile --threshold, or use --mode dense"
            )
        return found

    def reads(self, layout: ArenaLayout) -> Reads:
        """What must be read before the first step, and to where."""
        if self.header is None:
            sections = [SectionRead(place.section, place.offset) for place in layout.resident]
            if found := layout.predictors:
                offset = layout.at("fixed.predictors")
                sections.append(SectionRead(found.section, offset, found.path))
            return [*sections, *(_bundle_reads(layout) if layout.bundles else [])]
        files = self.header.files if self.is_parted else None
        return [
            WeightRead(
                self.header.tensor(name), place.storage, place.offset, place.num_bytes, files
            )
            for name, place in layout.weights.items()
        ]


def check_boundable(spec: ModelSpec) -> None:
    """ConfigError for a model that threshold mode is not for."""
    if spec.experts:
        raise ConfigError(
            "--mode threshold: experts are read whole, so nothing could be left out; use --mode "
            "auto"
        )
    if spec.feed_forward in SPARSE_KINDS:
        raise ConfigError(
            f"--mode threshold: {spec.feed_forward.name.lower()} activations are often exactly "
            f"zero; use --mode exact, which leaves those out and loses nothing"
        )
    if not spec.block.is_profiled:
        raise ConfigError(
            f"--mode threshold: layers of {spec.family} are made otherwise than Llama's, and "
            "bounds are not measured for them; use --mode dense"
        )


@lru_cache(maxsize=1)  # a plan lays a model out dozens of times, and its key sums all it says
def _predictors_of(source: ModelSource) -> PredictorFile:
    path = predictor_path(source.path)
    if not path.exists():
        raise ConfigError(
            f"--mode predicted: no predictors at {path}; make them with polyneuron profile, "
            f"or use --mode exact"
        )
    shape = (source.spec.num_neurons, source.spec.d_model)
    return read_predictors(path, model_key(source.manifest), source.spec.num_layers, shape)


@lru_cache(maxsize=1)  # read and summed up once, however often a plan lays the model out
def _profile_of(source: ModelSource, changed_ns: int) -> Profile:
    key = model_key(source.manifest)
    return read_profile(
        profile_path(source.path), key, source.spec.num_layers, source.spec.num_neurons
    )


def open_source(path: Path, layout: Layout = Layout.TILES) -> ModelSource:
    """Open a GGUF or a neuron-cluster file; nothing but its head is read.

    A GGUF is laid out as a file of `layout`: it is run as tiles, for bundles it is converted.
    """
    if is_ncf(path):
        ncf = read_ncf(path)
        spec = spec_of(ncf)
        if ncf.manifest.layout is Layout.BUNDLES:
            neuron_rows(ncf.manifest)  # refuses layers that are not alike
        return ModelSource(path, spec, ncf.metadata, ncf.manifest, None)
    header = read_model_header(path)
    check_supported(header)
    spec = describe(header)
    layout = Layout.BUNDLES if spec.experts or is_turned(header) else layout
    plan = plan_gguf(header, spec, layout, NcfSource(header.format, header.file_bytes, ""))
    if layout is Layout.BUNDLES:
        neuron_rows(plan.manifest)
    return ModelSource(path, spec, header.metadata, plan.manifest, header)


def _bundle_reads(layout: ArenaLayout) -> list[BundleRead]:
    """The layers of a file in bundles that are resident; cached ones warm the cache evenly."""
    bundles = layout.bundles
    assert bundles is not None
    resident = [
        (index, layer)
        for index, layer in enumerate(bundles.layers)
        if not layer.rows_are.passes_through
    ]
    if bundles.rows.has_experts and bundles.cold_slots:
        return []  # experts come as tokens choose them
    num_warm = bundles.cold_slots // max(1, len(resident))
    return [_bundle_read(layout, bundles, index, num_warm) for index, _ in resident]


def _bundle_read(layout: ArenaLayout, bundles: BundlePlan, index: int, num_warm: int) -> BundleRead:
    layer, rows, slots = bundles.layers[index], bundles.rows, bundles.slot_rows
    has_tiles = layer.tiles_offset > 0
    place = (slots.read_begin, slots.slot_bytes)
    first_warm = bundles.pinned_neurons
    pinned = range(first_warm if bundles.is_whole else rows.num_neurons)
    warm = range(first_warm, min(first_warm + num_warm, rows.num_neurons))
    return BundleRead(
        section=layer.section, cols=rows.cols, decide_type=rows.decide_type,
        decide_row=rows.decide_row, tiles_offset=layer.tiles_offset,
        num_tiled=rows.num_neurons if has_tiles else 0,
        pinned=SlotRun(pinned, layer.rows_offset, *place) if layer.rows_offset else None,
        warm=SlotRun(warm, bundles.slots_offset, *place) if bundles.cold_slots else None,
        cache_offset=layout.at("boards.cache") if bundles.cold_slots else 0,
        first_neuron=index * rows.num_neurons,
    )  # fmt: skip
