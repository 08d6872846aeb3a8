"""Predictors for tests: a perfect one, and ones that know nothing."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from polyneuron.io.ncf_format import Layout
from polyneuron.io.ncf_reader import NcfFile, read_ncf
from polyneuron.io.predictor_file import (
    LayerPredictor,
    PredictorInfo,
    PredictorInput,
    model_key,
    predictor_path,
    write_predictors,
)
from polyneuron.kernels.quant import StorageType
from polyneuron.model.convert import convert
from polyneuron.model.ncf_spec import spec_of
from polyneuron.profiling.oracle_fit import oracle
from tests.support.synthetic import bundle_values
from tests.support.tiny_gguf import TinyModel, write_tiny_gguf


def write_oracle(model: Path) -> Path:
    """The deciding rows themselves as predictors: exactly the neurons that exact mode computes."""
    ncf = read_ncf(model)
    storage = _deciding_storage(ncf)
    info = PredictorInfo("oracle", PredictorInput.FFN, False, StorageType.Q8, storage, {})
    spec = spec_of(ncf)
    layers = [oracle(bundle_values(ncf, _deciding(ncf, index))) for index in range(spec.num_layers)]
    return _write(model, info, layers)


def write_oracle_models(folder: Path, models: Mapping[str, TinyModel]) -> dict[str, Path]:
    """A file in bundles of each model, perfect predictors beside it."""
    paths = {name: folder / f"{name}.ncf" for name in models}
    for name, path in paths.items():
        source = write_tiny_gguf(folder / f"{name}.gguf", models[name])
        convert(source, path, layout=Layout.BUNDLES)
        write_oracle(path)
    return paths


def write_random(
    model: Path,
    *,
    input: PredictorInput,
    rank: int,
    share: float,
    is_relu: bool = False,
    last_rank: int | None = None,
    fc1_type: StorageType = StorageType.Q8,
    is_twice: bool = False,
) -> Path:
    """Random matrices whose thresholds name about `share` of the neurons.

    The last layer's rank may be another one. `is_twice`: fc2 once more as a second matrix, and
    thresholds twice as high.
    """
    ncf, rng = read_ncf(model), np.random.default_rng(7)
    spec = spec_of(ncf)
    info = PredictorInfo("random", input, is_relu, fc1_type, StorageType.Q4, {}, is_twice)
    layers = []
    for layer in range(spec.num_layers):
        if layer == spec.num_layers - 1 and last_rank is not None:
            rank = last_rank
        fc1 = rng.standard_normal((rank, spec.d_model)).astype(np.float32) if rank else None
        fc2 = rng.standard_normal((spec.num_neurons, rank or spec.d_model)).astype(np.float32)
        level = np.float32(-1e9 if share >= 1 else np.quantile(rng.standard_normal(999), 1 - share))
        threshold = np.full(spec.num_neurons, level * np.sqrt(np.float32(spec.d_model)))
        threshold = ((1 + is_twice) * threshold).astype(np.float32)
        layers.append(LayerPredictor(fc1, fc2, threshold, fc2 if is_twice else None))
    return _write(model, info, layers)


def _deciding(ncf: NcfFile, layer: int) -> str:
    exps = "_exps" if ncf.manifest.spec.get("experts") else ""
    gate = f"blk.{layer}.ffn_gate{exps}.weight"
    return gate if gate in ncf.by_name else f"blk.{layer}.ffn_up{exps}.weight"


def _deciding_storage(ncf: NcfFile) -> StorageType:
    storage = ncf.tensor(_deciding(ncf, 0)).storage
    assert storage is not None
    return storage


def _write(model: Path, info: PredictorInfo, layers: list[LayerPredictor]) -> Path:
    ncf = read_ncf(model)
    spec, path = spec_of(ncf), predictor_path(model)
    ranks = [layer.rank for layer in layers]
    shape = (spec.num_neurons, spec.d_model)
    write_predictors(path, model_key(ncf.manifest), info, ranks, layers, shape, force=True)
    return path
