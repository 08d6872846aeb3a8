"""Where everything will lie in a neuron-cluster file: computed from the source's header alone."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyneuron.errors import ConfigError
from polyneuron.io.gguf_file import GgufHeader, GgufTensor
from polyneuron.io.ncf_format import (
    LINE_BYTES,
    PAGE_BYTES,
    Layout,
    NcfManifest,
    NcfSection,
    NcfSource,
    NcfTensor,
    SectionKind,
    bundle_shape,
    neuron_row_bytes,
    round_up,
    stored_bytes,
)
from polyneuron.io.ncf_writer import NcfPlan, laid_out
from polyneuron.io.pack import storage_type
from polyneuron.kernels.gemv import FeedForwardKind
from polyneuron.kernels.quant import BLOCK_COLS, StorageType
from polyneuron.model.ncf_spec import FIXED, plain_spec
from polyneuron.model.spec import ModelSpec, tensor_map, tensor_shapes

METADATA_PREFIXES = ("general.", "tokenizer.")
UNCUT = (StorageType.Q4, StorageType.Q8)
"""Quantised types that down's columns keep where the source has them by neuron."""
SPARSE_KINDS = (FeedForwardKind.REGLU, FeedForwardKind.DRELU, FeedForwardKind.RELU)
WEIGHT_TYPES = (StorageType.Q8, StorageType.Q4, StorageType.F16, StorageType.F32)
"""What matrices of float sources may be stored as."""
FLOAT_ROLES = ("ffn_gate_inp", "position_embd")
TABLES = ("token_embd", "output")
FED_ROLES = ("ffn_gate", "ffn_up", "ffn_down")

NeuronOrder = Mapping[int, NDArray[np.uint32]]
"""Layer -> its neurons, hottest first; layers that are not named keep the model's order."""
StorageOf = Mapping[str, StorageType]
"""Tensor name -> storage type."""


def choose_layout(spec: ModelSpec, wanted: Layout | None = None) -> Layout:
    """Bundles for models whose neurons are often exactly zero, and of experts; else tiles.

    Bundles of other models serve threshold mode.
    """
    is_sparse = spec.feed_forward in SPARSE_KINDS or spec.experts is not None
    if wanted is Layout.BUNDLES and not has_rows(spec):
        raise ConfigError(
            f"--layout bundles: {spec.family} norms what feed forward gives before it is added, "
            "and neurons are added one by one; use --layout tiles"
        )
    if wanted is Layout.TILES and spec.experts:
        raise ConfigError("--layout tiles: experts are read one by one; use --layout bundles")
    return wanted or (Layout.BUNDLES if is_sparse and has_rows(spec) else Layout.TILES)


def has_rows(spec: ModelSpec) -> bool:
    """Whether neurons are added to the stream as they are, so that they can be read one by one."""
    return not spec.block.has_post_norms


def check_down(layout: Layout, d_model: int, wanted: StorageType) -> None:
    """Raise ConfigError when down's columns cannot be stored as `wanted`."""
    flag = f"--down {wanted.name.lower()}"
    if not wanted.is_for_weights:
        raise ConfigError(f"{flag}: signs alone are no weights; use --down q8, q4 or f16")
    if layout is Layout.TILES:
        raise ConfigError(
            f"{flag}: tiles keep down's rows as the source has them; use --layout bundles"
        )
    if wanted.is_quantised and d_model % BLOCK_COLS:
        raise ConfigError(
            f"{flag}: columns of {d_model} values do not fill blocks of {BLOCK_COLS}; use "
            "--down f16"
        )


def down_storage(
    tensor: GgufTensor, d_model: int, wanted: StorageType | None = None
) -> StorageType:
    """Storage of down's columns: float sources keep their type, quantised ones become q8.

    Quantisation blocks of the source run along rows and are cut by the change to columns, so its
    values are rounded once more; columns that do not fill blocks of 32 are kept in f16. Where the
    source has columns as rows nothing is cut.
    """
    if wanted is not None:
        return wanted
    own = storage_type(tensor)
    if not own.is_quantised or (tensor.is_turned and own in UNCUT):
        return own
    return StorageType.F16 if d_model % BLOCK_COLS else StorageType.Q8


def matrix_storage(tensor: GgufTensor, wanted: StorageType | None = None) -> StorageType:
    """Storage of a matrix: `wanted` where the source has floats, else the source's own.

    Embedding and head take no less than q8; routers, positions and rows that do not fill blocks of
    32 keep their floats.
    """
    own = storage_type(tensor)
    if wanted is None or own.is_quantised or len(tensor.shape) == 1:
        return own
    _, role = layer_and_role(tensor.name)
    if role in FLOAT_ROLES or (wanted.is_quantised and tensor.num_cols % BLOCK_COLS):
        return own
    return StorageType.Q8 if wanted is StorageType.Q4 and role in TABLES else wanted


def plan_ncf(
    spec: ModelSpec,
    layout: Layout,
    source_types: Mapping[str, str],
    storage: StorageOf,
    metadata: Mapping[str, Any],
    source: NcfSource,
    order: NeuronOrder | None = None,
) -> NcfPlan:
    """Lay a file out; `storage` names the matrices' types, in bundles that of down's columns."""
    planner = _Planner(spec, layout, source_types, storage, order or {})
    planner.lay_out()
    manifest = NcfManifest(
        layout=layout,
        spec=plain_spec(spec),
        metadata=metadata,
        source=source,
        sections=tuple(planner.sections),
        tensors=tuple(planner.tensors),
    )
    return laid_out(manifest)


def plan_gguf(
    header: GgufHeader,
    spec: ModelSpec,
    layout: Layout,
    source: NcfSource,
    order: NeuronOrder | None = None,
    down: StorageType | None = None,
    weights: StorageType | None = None,
) -> NcfPlan:
    """Lay out the file that a GGUF becomes.

    `weights`: of matrices that the source has in floats; `down`: of down's columns in bundles.
    """
    tensors = {name: header.tensor(name) for name in tensor_shapes(spec)}
    storage = {name: matrix_storage(tensor, weights) for name, tensor in tensors.items()}
    if layout is Layout.BUNDLES:
        for layer in tensor_map(spec).layers:
            tensor = tensors[layer.ffn_down]
            is_float = weights is not None and not storage_type(tensor).is_quantised
            fits = spec.d_model % BLOCK_COLS == 0 or weights in (StorageType.F16, StorageType.F32)
            chosen = weights if down is None and is_float and fits else down
            storage[layer.ffn_down] = down_storage(tensor, spec.d_model, chosen)
    source_types = {name: tensor.type_name for name, tensor in tensors.items()}
    return plan_ncf(
        spec, layout, source_types, storage, kept_metadata(header.metadata), source, order
    )


def kept_metadata(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that go into the file: the tokenizer's, the template's, the name and licence."""
    return {key: value for key, value in metadata.items() if key.startswith(METADATA_PREFIXES)}


class _Planner:
    """Places tensors one after another; offsets of sections count from the first one."""

    def __init__(
        self,
        spec: ModelSpec,
        layout: Layout,
        source_types: Mapping[str, str],
        storage: StorageOf,
        order: NeuronOrder,
    ) -> None:
        self.spec = spec
        self.layout = layout
        self.source_types = source_types
        self.storage = storage
        self.order = order
        self.sections: list[NcfSection] = []
        self.tensors: list[NcfTensor] = []

    def lay_out(self) -> None:
        """The fixed section, then one for each layer."""
        shapes = tensor_shapes(self.spec)
        fed: dict[int, list[str]] = {i: [] for i in range(self.spec.num_layers)}
        fixed = []
        for name in shapes:
            layer_id, role = layer_and_role(name)
            if layer_id is not None and role in FED_ROLES:
                fed[layer_id].append(name)
            else:
                fixed.append(name)
        self._run(FIXED, SectionKind.FIXED, fixed, shapes)
        for layer_id, names in fed.items():
            if self.layout is Layout.TILES:
                self._run(f"layer.{layer_id}", SectionKind.TILES, names, shapes)
            else:
                self._bundles(layer_id, names)

    def _run(
        self,
        section: str,
        kind: SectionKind,
        names: Iterable[str],
        shapes: Mapping[str, tuple[int, ...]],
    ) -> None:
        """Tensors as they lie in memory, each at a cache line."""
        offset = 0
        for name in names:
            shape = shapes[name]
            storage = self.storage[name] if len(shape) > 1 else None
            rows, cols = math.prod(shape[:-1]), shape[-1]
            num_bytes = stored_bytes(storage, rows, cols)
            offset = round_up(offset, LINE_BYTES)
            self._add(name, storage, (rows, cols), offset, num_bytes)
            offset += num_bytes
        num_bytes = round_up(offset, PAGE_BYTES)
        self.sections.append(NcfSection(section, kind, 0, num_bytes, _NOT_YET))

    def _bundles(self, layer_id: int, names: Iterable[str]) -> None:
        """One bundle for each neuron, expert after expert."""
        d_ff, d_model = self.spec.num_neurons, self.spec.d_model
        by_role = {layer_and_role(name)[1]: name for name in names}
        row = {role: neuron_row_bytes(self.storage[n], d_model) for role, n in by_role.items()}
        shape = bundle_shape(d_ff, row.get("ffn_gate"), row["ffn_up"], row["ffn_down"])
        offsets = (shape.gate_offset, shape.up_offset, shape.down_offset)
        for role, offset in zip(FED_ROLES, offsets, strict=True):
            if offset is not None:
                name = by_role[role]
                num_bytes = row[role] * d_ff
                stride = shape.bundle_bytes
                self._add(name, self.storage[name], (d_ff, d_model), offset, num_bytes, stride)
        num_bytes = round_up(d_ff * shape.bundle_bytes, PAGE_BYTES)
        kind = SectionKind.BUNDLES
        ids = self.order.get(layer_id)
        section = NcfSection(f"layer.{layer_id}", kind, 0, num_bytes, _NOT_YET, shape, ids)
        self.sections.append(section)

    def _add(
        self,
        name: str,
        storage: StorageType | None,
        shape: tuple[int, int],
        offset: int,
        num_bytes: int,
        row_stride: int = 0,
    ) -> None:
        layer_id, role = layer_and_role(name)
        tensor = NcfTensor(
            name, layer_id, role, storage, shape[0], shape[1], len(self.sections), offset,
            num_bytes, row_stride, self.source_types[name],
        )  # fmt: skip
        self.tensors.append(tensor)


_NOT_YET = np.zeros(0, np.uint32)
"""Checksums of a section that has no place yet."""


def layer_and_role(name: str) -> tuple[int | None, str]:
    """Layer and role of a GGUF tensor name: `blk.3.ffn_up.weight` is (3, "ffn_up").

    The matrices of experts have the roles of those they stand for.
    """
    role = name.removesuffix(".weight").removesuffix("_exps")
    if not name.startswith("blk."):
        return None, role
    _, layer, role = role.split(".", 2)
    return int(layer), role
