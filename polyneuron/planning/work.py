"""What a decode step of a model multiplies and reads, in bytes: the cost model's view of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from polyneuron.io.ncf_format import Layout, NcfTensor
from polyneuron.kernels.quant import KV_BLOCK_TOKENS, kv_block_bytes, row_bytes
from polyneuron.planning.bundles import NeuronRows, neuron_rows
from polyneuron.planning.source import ModelSource

EMBEDDING, HEAD = "token_embd.weight", "output.weight"


@dataclass(frozen=True, slots=True)
class Matrix:
    """Weights that lie as tiles."""

    storage: str
    cols: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class RowWork:
    """A layer whose weights lie neuron by neuron; bytes of one neuron's rows."""

    num_neurons: int
    cluster_neurons: int
    cols: int
    decide_type: str
    up_type: str
    down_type: str
    decide_row: int
    up_row: int
    """0 where the deciding row is the up row."""
    down_row: int
    slot_bytes: int
    """What is read of a neuron whose deciding row is in memory."""
    whole_bytes: int
    """What is read of a neuron in whole."""
    num_experts: int = 1
    num_used: int = 1
    """Experts of a token."""
    slot_neurons: int = 1
    """Neurons that are read together: of experts a cluster."""

    def chosen_share(self, batch: int) -> float:
        """Of a layer's experts, those that some of `batch` tokens use, if all are used alike."""
        return 1.0 - (1.0 - self.num_used / self.num_experts) ** batch

    @property
    def num_clusters(self) -> int:
        """Tasks of a layer."""
        return -(-self.num_neurons // self.cluster_neurons)

    @property
    def decide(self) -> Matrix:
        """A layer's deciding rows as tiles."""
        return Matrix(self.decide_type, self.cols, self.num_neurons * self.decide_row)

    @property
    def resident_bytes(self) -> int:
        """A whole layer in memory."""
        return self.num_neurons * (self.decide_row + self.slot_bytes)


@dataclass(frozen=True, slots=True)
class ModelWork:
    """One model's decode step."""

    num_layers: int
    attention: tuple[Matrix, ...]
    """Of one layer; with the router and the shared expert of a mixture."""
    feed_forward: tuple[Matrix, ...]
    """Of one layer in tiles; none in bundles."""
    head: Matrix
    kv_bytes: int
    """Keys and values of one position in one layer."""
    layer_bytes: int
    """What is read of the file for a layer that is streamed."""
    rows: RowWork | None
    """The layers of a file in bundles."""


def model_work(source: ModelSource) -> ModelWork:
    """Add up a model's tensors; layers count as their mean."""
    spec, manifest = source.spec, source.manifest
    tensors = {tensor.name: tensor for tensor in manifest.tensors}
    layers = max(1, spec.num_layers)
    rows = neuron_rows(manifest) if manifest.layout is Layout.BUNDLES else None
    in_layers = [t for t in manifest.tensors if t.name.startswith("blk.") and t.storage is not None]
    always = [t for t in in_layers if ".attn_" in t.name or (rows and t.section_index == 0)]
    feed_forward = [t for t in in_layers if ".ffn_" in t.name] if rows is None else []
    sections = manifest.sections[1:]
    kv_block = spec.num_kv_heads * kv_block_bytes(spec.head_dim)
    return ModelWork(
        num_layers=spec.num_layers,
        attention=_means(always, layers),
        feed_forward=_means(feed_forward, layers),
        head=_matrix(_head(tensors)),
        kv_bytes=kv_block // KV_BLOCK_TOKENS,
        layer_bytes=sum(section.num_bytes for section in sections) // layers,
        rows=_row_work(rows) if rows else None,
    )


def _head(tensors: Mapping[str, NcfTensor]) -> NcfTensor:
    return tensors.get(HEAD, tensors[EMBEDDING])


def _matrix(tensor: NcfTensor) -> Matrix:
    assert tensor.storage is not None
    return Matrix(tensor.storage.name.lower(), tensor.cols, tensor.num_bytes)


def mean_matrix(tensors: Sequence[NcfTensor], layers: int) -> Matrix:
    """Matrices of one type in several layers, as if each layer had its part of them."""
    first = tensors[0]
    assert first.storage is not None
    total = sum(tensor.num_bytes for tensor in tensors)
    cols = round(fmean(tensor.cols for tensor in tensors))
    return Matrix(first.storage.name.lower(), cols, total // layers)


def _means(tensors: Iterable[NcfTensor], layers: int) -> tuple[Matrix, ...]:
    """One layer's matrices, those of one type and width together."""
    totals: dict[tuple[str, int], int] = {}
    for matrix in map(_matrix, tensors):
        key = (matrix.storage, matrix.cols)
        totals[key] = totals.get(key, 0) + matrix.num_bytes
    return tuple(Matrix(*key, total // layers) for key, total in sorted(totals.items()))


def _row_work(rows: NeuronRows) -> RowWork:
    has_gate = rows.decide_row != rows.up_row
    return RowWork(
        num_neurons=rows.num_neurons,
        cluster_neurons=rows.cluster_neurons,
        cols=rows.cols,
        decide_type=rows.decide_type.name.lower(),
        up_type=rows.up_type.name.lower(),
        down_type=rows.down_type.name.lower(),
        decide_row=row_bytes(rows.decide_type, rows.cols),
        up_row=row_bytes(rows.up_type, rows.cols) if has_gate else 0,
        down_row=row_bytes(rows.down_type, rows.cols),
        slot_bytes=rows.slot_bytes,
        whole_bytes=rows.whole().slot_bytes,
        num_experts=rows.num_experts,
        num_used=rows.num_used,
        slot_neurons=rows.slot_neurons,
    )
