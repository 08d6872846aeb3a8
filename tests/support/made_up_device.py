"""A made-up device, and models' shapes without their files, for what plans."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from polyneuron.config import EngineConfig
from polyneuron.io.ncf_format import (
    NcfSection,
    NcfTensor,
    SectionKind,
    round_up,
    stored_bytes,
)
from polyneuron.io.predictor_file import (
    PredictorFile,
    PredictorInfo,
    PredictorInput,
    tensor_name,
)
from polyneuron.kernels.quant import StorageType
from polyneuron.planning.budget import resolve_config
from polyneuron.planning.cost_model import CostModel
from polyneuron.planning.device import (
    CacheSpeed,
    DeviceKey,
    DeviceProfile,
    Kernel,
    KernelSpeed,
    ReadSpeed,
    StepSpeed,
)
from polyneuron.planning.known_model import known_model, predictor_work
from polyneuron.planning.planner import Planner
from polyneuron.planning.source import ModelSource
from polyneuron.synth.shapes import shape_spec
from polyneuron.synth.weights import WeightSource
from polyneuron.synth.write import SynthSettings, plan_synth

MIB = 1 << 20
SPEEDS = {
    Kernel.MEMORY: 25e9, Kernel.TILES: 24e9, Kernel.DOT: 12e9, Kernel.AXPY: 9e9,
    Kernel.ATTENTION: 8e9,
}  # fmt: skip


def make_device(
    *,
    cores: int = 2,
    reads_per_s: float = 50e3,
    bytes_per_s: float = 2e9,
    cpu_ns: float = 4e3,
    speed: float = 1.0,
) -> DeviceProfile:
    """Kernels scale with the threads, reads with the depth up to 32."""
    threads = sorted({1, cores})
    kernels = [
        KernelSpeed(kernel, storage, cols, tokens, n, speed * rate * n * tokens**-0.25)
        for (kernel, rate), storage, cols, n in product(
            SPEEDS.items(), ("q4", "q8"), (576, 4096), threads
        )
        for tokens in ((1, 2, 4, 8) if kernel is Kernel.TILES and n == cores else (1,))
    ]
    reads = [
        ReadSpeed(True, size, depth, 0, 0, _reads(size, depth, reads_per_s, bytes_per_s),
                  round(depth * 1e9 / _reads(size, depth, reads_per_s, bytes_per_s)), cpu_ns)
        for size, depth in product((4096, 16384, 65536, MIB), (1, 8, 32, 64))
    ]  # fmt: skip
    in_order = ReadSpeed(False, MIB, 8, 0, 0, bytes_per_s / MIB, 4_000_000, 15e3)
    return DeviceProfile(
        DeviceKey("Fast 9000", cores, "scalar", "0", "6.1", "8:1"), 1 << 30,
        (tuple(range(cores)),), (*reads, in_order), tuple(kernels),
        tuple(StepSpeed(n, 100.0 * n, 10e3) for n in threads), CacheSpeed(8.0, 300.0),
    )  # fmt: skip


def _reads(size: int, depth: int, reads_per_s: float, bytes_per_s: float) -> float:
    return min(reads_per_s * min(1.0, depth / 32) ** 0.8, bytes_per_s / size)


@lru_cache(maxsize=4)
def shape_source(shape: str = "bamboo-7b", num_layers: int | None = None) -> ModelSource:
    """The model a synthetic file would hold, laid out and not written."""
    spec = shape_spec(shape, num_layers=num_layers)
    settings = SynthSettings(spec, is_hot_first=shape == "bamboo-7b")
    weights = WeightSource(spec, settings.quant, settings.chosen_sparsity, 0)
    manifest = plan_synth(settings, weights).manifest
    return ModelSource(Path(f"{shape}.ncf"), spec, {}, manifest, None)


def make_predictors(source: ModelSource, rank: int = 1024) -> PredictorFile:
    """Two matrices of 4 bits in each layer, as of published predictors, and no file of them."""
    spec, q4 = source.spec, StorageType.Q4
    report = {"layers": [{"recall": 0.97, "predicted": 0.18}] * spec.num_layers}
    info = PredictorInfo("made up", PredictorInput.ATTENTION, False, q4, q4, report)
    sizes = {"fc1": (q4, rank, spec.d_model), "fc2": (q4, spec.d_ff, rank),
             "threshold": (None, 1, spec.d_ff)}  # fmt: skip
    tensors = [
        NcfTensor(tensor_name(layer, role), layer, f"predictor.{role}", kind, rows, cols, 0, 0,
                  stored_bytes(kind, rows, cols), 0, "F32")
        for layer in range(spec.num_layers) for role, (kind, rows, cols) in sizes.items()
    ]  # fmt: skip
    num_bytes = round_up(sum(tensor.num_bytes for tensor in tensors), 4096)
    section = NcfSection("predictors", SectionKind.FIXED, 0, num_bytes, np.zeros(0, np.uint32))
    names = {tensor.name: tensor for tensor in tensors}
    return PredictorFile(source.path, info, (rank,) * spec.num_layers, section, names)


@contextmanager
def with_predictors() -> Iterator[None]:
    """As if every model had predictors beside it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelSource, "predictors", make_predictors)
        yield


def make_model(
    source: ModelSource, device: DeviceProfile | None = None, *, predicts: bool = False
) -> CostModel:
    """The cost model of a shape, with predictors or without."""
    known = known_model(source, device or make_device(), 4096)
    if not predicts or known.hotness is None:
        return known
    return replace(known, predictor=predictor_work(make_predictors(source), known.hotness))


def make_planner(
    memory_bytes: int,
    source: ModelSource | None = None,
    device: DeviceProfile | None = None,
    *,
    predicts: bool = False,
    **settings: object,
) -> Planner:
    """A planner of a shape in so much memory."""
    source, device = source or shape_source(), device or make_device()
    config = EngineConfig(
        num_ctx=1024,
        max_sequences=1,
        num_workers=device.num_cores,
        **settings,  # type: ignore[arg-type]
    )
    config = resolve_config(config, source.spec)
    return Planner(source, config, memory_bytes, make_model(source, device, predicts=predicts))
