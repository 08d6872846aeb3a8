"""Writes a neuron-cluster file of random weights, and its GGUF twin."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from polyneuron.errors import ConfigError
from polyneuron.io.ncf_format import Layout, NcfSource
from polyneuron.io.ncf_pieces import READ_BYTES
from polyneuron.io.ncf_writer import NcfPlan, NcfWriter, is_planned
from polyneuron.io.output_file import OutputFile, Progress, write_output
from polyneuron.io.piece_writer import check_free_space, check_output
from polyneuron.model.ncf_plan import SPARSE_KINDS, NeuronOrder, choose_layout, plan_ncf
from polyneuron.model.spec import ModelSpec
from polyneuron.synth.codings import CODINGS
from polyneuron.synth.pieces import SynthPieces
from polyneuron.synth.rates import MAX_SPARSITY, MIN_SPARSITY
from polyneuron.synth.twin import twin_file, twin_keys
from polyneuron.synth.vocabulary import file_keys
from polyneuron.synth.weights import WeightSource

RECIPE = "synth-2"
"""Changes whenever the same settings give other bytes."""
DEFAULT_SPARSITY, EXPERTS_SPARSITY = 0.9, 0.85
"""Of dense models, and within each chosen expert (PAPER §4.4)."""
MAX_SEED = (1 << 32) - 1


@dataclass(frozen=True, slots=True)
class SynthSettings:
    """What decides every byte of the files."""

    spec: ModelSpec
    quant: str = "q4"
    sparsity: float | None = None
    """Share of neurons that a token leaves inactive, of experts of those it has chosen; None: 0.9,
    of experts 0.85, or none planted for SiLU."""
    seed: int = 0
    layout: Layout | None = None
    """None: bundles where neurons can be inactive, else tiles."""
    is_hot_first: bool = False
    """Bundles lie in the order of their neurons' activity instead of the model's."""

    def __post_init__(self) -> None:
        if self.quant not in CODINGS:
            raise ConfigError(f"--quant {self.quant}: give {', '.join(CODINGS)}")
        if not 0 <= self.seed <= MAX_SEED:
            raise ConfigError(f"--seed {self.seed}: give 0 to {MAX_SEED}")
        if self.sparsity is not None and not self.is_sparse:
            raise ConfigError(
                f"--sparsity {self.sparsity}: the neurons of {self.spec.name} are never exactly "
                "zero; give a shape with ReLU activations, such as bamboo-7b"
            )
        if self.sparsity is not None and not MIN_SPARSITY <= self.sparsity <= MAX_SPARSITY:
            raise ConfigError(f"--sparsity {self.sparsity}: give {MIN_SPARSITY} to {MAX_SPARSITY}")
        layout = choose_layout(self.spec, self.layout)  # refuses what cannot be
        if layout is Layout.BUNDLES and not self.is_sparse and not self.spec.experts:
            raise ConfigError(
                f"--layout bundles: {self.spec.feed_forward.name.lower()} activations of random "
                "weights are never near zero, so no neuron could be left out; use --layout tiles"
            )
        if self.is_hot_first and layout is not Layout.BUNDLES:
            raise ConfigError("--hot-first: only bundles have an order; use --layout bundles")
        if self.is_hot_first and not self.is_sparse:
            raise ConfigError(
                f"--hot-first: no neuron of {self.spec.name} is hotter than others; leave it out"
            )

    @property
    def is_sparse(self) -> bool:
        """Whether neurons can be exactly zero."""
        return self.spec.feed_forward in SPARSE_KINDS

    @property
    def chosen_layout(self) -> Layout:
        """How the feed-forward weights lie."""
        return choose_layout(self.spec, self.layout)

    @property
    def chosen_sparsity(self) -> float | None:
        """None: nothing is planted."""
        if not self.is_sparse:
            return None
        usual = EXPERTS_SPARSITY if self.spec.experts else DEFAULT_SPARSITY
        return usual if self.sparsity is None else self.sparsity

    @property
    def key(self) -> str:
        """Names the weights: equal keys, equal weights."""
        spec, sparsity = repr(self.spec), self.chosen_sparsity
        text = f"{RECIPE} {spec} {self.quant} {sparsity} {self.seed}"
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class SynthReport:
    """What writing one file came to."""

    output: Path
    kind: str
    """`bundles`, `tiles` or `GGUF`."""
    file_bytes: int
    resumed_bytes: int
    was_there: bool
    seconds: float


def synthesize(
    settings: SynthSettings,
    output: Path,
    gguf: Path | None = None,
    *,
    force: bool = False,
    progress: Callable[[Path], Progress] = lambda path: lambda done, total: None,
    on_wait: Callable[[], None] = lambda: None,
) -> Iterator[SynthReport]:
    """Write `output`, and its twin `gguf`, or go on where an earlier run was broken off.

    Nothing is written unless there is room for all. Yields a report as each file is complete.
    """
    source = WeightSource(settings.spec, settings.quant, settings.chosen_sparsity, settings.seed)
    files = {str(settings.chosen_layout): _ncf_file(settings, source, output, on_wait)}
    if gguf is not None:
        if gguf.resolve() == output.resolve():
            raise ConfigError(f"--gguf {gguf}: the same file as --output")
        keys = twin_keys(source, settings.quant, settings.key)
        files["GGUF"] = twin_file(source, gguf, keys, RECIPE, on_wait)
    for file in files.values():
        check_output(file.path)
    check_free_space({f.path: f.num_bytes for f in files.values() if not f.is_there(force)})
    for kind, file in files.items():
        started = time.monotonic()
        written = write_output(file, force, progress(file.path))
        seconds = time.monotonic() - started
        yield SynthReport(
            file.path, kind, file.num_bytes, written.resumed_bytes, written.was_there, seconds
        )


def _ncf_file(
    settings: SynthSettings, source: WeightSource, path: Path, on_wait: Callable[[], None]
) -> OutputFile:
    plan = plan_synth(settings, source)
    return OutputFile(
        path,
        plan.file_bytes,
        open_writer=lambda: NcfWriter(path, plan, f"{RECIPE} {READ_BYTES}", on_wait),
        pieces=SynthPieces(source, plan.manifest).made,
        holds=lambda: is_planned(path, plan),
    )


def plan_synth(settings: SynthSettings, source: WeightSource) -> NcfPlan:
    """Lay the file out."""
    order: NeuronOrder = {}
    if settings.is_hot_first and source.planting is not None:
        planting = source.planting
        order = {i: planting.hottest_first(i) for i in range(settings.spec.num_layers)}
    return plan_ncf(
        settings.spec,
        settings.chosen_layout,
        {name: tensor.type_name for name, tensor in source.tensors.items()},
        {
            name: source.coding(name).storage
            for name, t in source.tensors.items()
            if len(t.shape) > 1
        },
        file_keys(settings.spec),
        NcfSource("synth", sum(t.num_bytes for t in source.tensors.values()), settings.key),
        order,
    )
