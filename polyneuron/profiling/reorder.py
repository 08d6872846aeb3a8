"""Writes a model with its bundles in another order, its profile and predictors beside it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from polyneuron.errors import ConfigError
from polyneuron.io.file_device import open_device
from polyneuron.io.ncf_format import EXTENT_BYTES, Layout, NcfSection
from polyneuron.io.ncf_pieces import MadePiece
from polyneuron.io.ncf_reader import NcfFile, read_ncf
from polyneuron.io.ncf_writer import NcfPlan, NcfWriter, is_planned, laid_out, stripped
from polyneuron.io.output_file import OutputFile, Progress, write_output
from polyneuron.io.piece_writer import check_free_space, check_output
from polyneuron.io.predictor_file import (
    LayerPredictor,
    PredictorFile,
    model_key,
    predictor_path,
    read_predictors,
    tensor_name,
    write_predictors,
)
from polyneuron.io.profile_file import LayerProfile, Profile, profile_path, write_profile
from polyneuron.io.section_range import SectionRange
from polyneuron.model.ncf_spec import spec_of
from polyneuron.model.spec import ModelSpec
from polyneuron.profiling.layer_weights import TiledMatrix

Order = NDArray[np.uint32]
RECIPE = "reorder-1"


def check_reorder(path: Path, output: Path, force: bool) -> None:
    """Raise ConfigError before any work when a reordered file cannot be written there."""
    ncf = read_ncf(path)
    if ncf.manifest.layout is not Layout.BUNDLES:
        raise ConfigError(
            f"--reorder {output}: only bundles have an order, and {path} keeps its feed-forward "
            "weights as tiles; convert its source with --layout bundles"
        )
    if ncf.manifest.spec.get("experts"):
        raise ConfigError(
            f"--reorder {output}: neurons of experts are cached one by one wherever they lie, so "
            "an order would gain nothing; leave it out"
        )
    check_output(output)
    if output.exists() and output.samefile(path):
        raise ConfigError(f"--reorder {output}: the model itself; give another name")
    if output.exists() and not force:
        raise ConfigError(f"--reorder {output}: exists; give another name, or --force")
    check_free_space({output: ncf.file_bytes})


def reorder_model(
    path: Path,
    profile: Profile,
    output: Path,
    *,
    force: bool = False,
    progress: Progress = lambda done, total: None,
) -> None:
    """Write `output`: the bundles of each layer in the order its profile names.

    Its profile, and the predictors if `path` has some that are its own, are written beside it.
    Raises ConfigError, FormatError or DeviceError naming the file.
    """
    ncf = read_ncf(path)
    spec = spec_of(ncf)
    predictors = _own_predictors(ncf, spec)
    orders = [layer.order for layer in profile.layers]
    plan = plan_reordered(ncf, orders)
    file = OutputFile(
        output,
        plan.file_bytes,
        open_writer=lambda: NcfWriter(output, plan, RECIPE),
        pieces=lambda first: _pieces(ncf, orders, first),
        holds=lambda: is_planned(output, replace(plan, manifest=stripped(plan.manifest))),
    )
    write_output(file, force, progress)
    key = model_key(read_ncf(output).manifest)
    if predictors is not None:
        _reorder_predictors(predictors, orders, output, key, (spec.d_ff, spec.d_model))
    layers = tuple(permuted(layer) for layer in profile.layers)
    write_profile(profile_path(output), replace(profile, model_key=key, layers=layers))


def permuted(layer: LayerProfile) -> LayerProfile:
    """A layer's counts in the order it names, which then is the file's own."""
    order = layer.order
    return LayerProfile(
        active=layer.active[:, order],
        gated=layer.gated[:, order],
        mean_abs=layer.mean_abs[order],
        down_norm=layer.down_norm[order],
        order=np.arange(len(order), dtype=np.uint32),
        facts=layer.facts,
    )


def plan_reordered(ncf: NcfFile, orders: list[Order]) -> NcfPlan:
    """Lay the file out as the old one, with the neurons' numbers beside each layer."""
    fixed, *layers = ncf.sections
    sections = (fixed, *map(_renumbered, layers, orders))
    return laid_out(replace(ncf.manifest, sections=sections))


def _renumbered(section: NcfSection, order: Order) -> NcfSection:
    ids = section.neuron_ids
    return replace(section, neuron_ids=order if ids is None else ids[order])


def _pieces(ncf: NcfFile, orders: list[Order], first: int) -> Iterator[MadePiece]:
    """A piece for each section, verified as it is read."""
    with open_device(ncf.path, EXTENT_BYTES) as device:
        for index, section in enumerate(ncf.sections):
            if index < first:
                continue
            data = np.empty(section.num_bytes, np.uint8)
            SectionRange(ncf, device, section).read_into(0, data)
            if index > 0:
                _permute(data, section, orders[index - 1])
            yield MadePiece(data.data, {})


def _permute(data: NDArray[np.uint8], section: NcfSection, order: Order) -> None:
    shape = section.bundles
    assert shape is not None
    used = shape.num_neurons * shape.bundle_bytes
    bundles = data[:used].reshape(shape.num_neurons, -1)
    bundles[:] = bundles[order]


def _own_predictors(ncf: NcfFile, spec: ModelSpec) -> PredictorFile | None:
    """Those beside a file; None when there are none, or another model's."""
    path = predictor_path(ncf.path)
    if not path.exists():
        return None
    try:
        shape = (spec.d_ff, spec.d_model)
        return read_predictors(path, model_key(ncf.manifest), spec.num_layers, shape)
    except ConfigError:
        return None


def _reorder_predictors(
    found: PredictorFile, orders: list[Order], output: Path, key: str, shape: tuple[int, int]
) -> None:
    layers = (
        replace(
            layer,
            fc2=layer.fc2[order],
            threshold=layer.threshold[order],
            up=None if layer.up is None else layer.up[order],
        )
        for layer, order in zip(stored_layers(found), orders, strict=True)
    )
    target, named = predictor_path(output), found.named
    if named is not None:
        named = np.take_along_axis(named, np.stack(orders), axis=1)
    write_predictors(target, key, found.info, found.ranks, layers, shape, named=named, force=True)


def stored_layers(found: PredictorFile) -> Iterator[LayerPredictor]:
    """The predictors of a file in floats, layer by layer; packed again they are the same bytes."""
    ncf = read_ncf(found.path)
    with open_device(ncf.path, EXTENT_BYTES) as device:
        data = SectionRange(ncf, device, found.section)
        for layer, rank in enumerate(found.ranks):
            fc1 = _values(found, data, tensor_name(layer, "fc1")) if rank else None
            fc2 = _values(found, data, tensor_name(layer, "fc2"))
            threshold = _values(found, data, tensor_name(layer, "threshold"))[0]
            up = _values(found, data, tensor_name(layer, "up")) if found.info.has_up else None
            yield LayerPredictor(fc1, fc2, threshold, up)


def _values(found: PredictorFile, data: SectionRange, name: str) -> NDArray[np.float32]:
    tensor = found.tensors[name]
    raw = np.empty(tensor.num_bytes, np.uint8)
    data.read_into(tensor.offset, raw)
    if tensor.storage is None:
        return raw.view(np.float32)[None, : tensor.cols]
    return TiledMatrix(tensor.storage, raw, tensor.rows, tensor.cols).values()
