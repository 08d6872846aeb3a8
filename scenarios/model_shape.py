"""What a simulator must know of a model: its sizes in bytes, not its weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from polyneuron.errors import ConfigError
from polyneuron.scenarios.activity import Activity
from polyneuron.scenarios.counted_activity import CountedActivity
from polyneuron.scenarios.recorded_activity import RecordedActivity
from polyneuron.scenarios.script_table import ScriptTable
from polyneuron.sizes import parse_size
from polyneuron.synth.shapes import SHAPES, shape_spec

COUNTS = ("layers", "hidden", "neurons", "experts", "experts_used", "matrices", "vocab")
SIZES = (
    "row", "scales", "slot", "bundle", "first_read", "second_read", "attention", "embedding",
    "head", "predictors", "resident", "kv_token",
)  # fmt: skip
PAGE_BYTES = 4096
Q4_BLOCK = 32
"""Weights that share a scale of two bytes."""
SCALE_BYTES = 2
F16_BYTES = 2
PREDICTOR_RANK = 1024


@dataclass(frozen=True, slots=True)
class ModelShape:
    """One model's sizes; bytes unless it says otherwise."""

    name: str
    layers: int
    hidden: int
    neurons: int
    """Of one expert of one layer."""
    experts: int
    experts_used: int
    """By each token."""
    matrices: int
    """Rows and columns of one neuron: 3 with a gate, else 2."""
    row: int
    """One neuron in one matrix, without scales."""
    scales: int
    """Of such a row."""
    slot: int
    """What the neuron cache keeps of a neuron."""
    bundle: int
    """From one neuron to the next in the file."""
    first_read: int
    """The gate's read of two, or all."""
    second_read: int
    """Of up and down, where the gate is not zero; 0: there is one read."""
    attention: int
    """Of one layer, its router and norms too."""
    embedding: int
    head: int
    predictors: int
    """Of all layers."""
    resident: int
    """Whatever else stays: scales that are not in the bundles, buffers."""
    kv_token: int
    """Keys and values of one token, all layers."""
    activity: Activity | CountedActivity | RecordedActivity

    @property
    def units(self) -> int:
        """Experts of all layers."""
        return self.layers * self.experts

    @property
    def total_neurons(self) -> int:
        """Of the whole model."""
        return self.units * self.neurons

    @property
    def neuron_bytes(self) -> int:
        """What computing a neuron reads from memory."""
        return self.matrices * (self.row + self.scales)

    @property
    def ffn_slots_bytes(self) -> int:
        """All neurons in slots."""
        return self.total_neurons * self.slot

    @property
    def mapped_bytes(self) -> int:
        """Of the dense model in one file, what every token or some token touches."""
        ffn = self.total_neurons * self.neuron_bytes
        return ffn + self.layers * self.attention + self.head

    @property
    def layer_bundles(self) -> int:
        """One layer's bundles in the file, all experts."""
        return self.experts * self.neurons * self.bundle

    @property
    def dense_ffn(self) -> int:
        """What a dense token reads of feed forward: all neurons of the experts it uses."""
        return self.layers * self.experts_used * self.neurons * self.neuron_bytes

    @property
    def other_bytes(self) -> int:
        """In memory whatever the plan: all but neurons, predictors and the KV cache."""
        return self.layers * self.attention + self.embedding + self.head + self.resident

    @property
    def predictor_neuron(self) -> float:
        """Bytes of predictors for each neuron."""
        return self.predictors / self.total_neurons

    @property
    def layer_weights(self) -> tuple[int, int]:
        """Weights of attention, and of the feed forward a token uses, in one layer."""
        per_weight = (self.row + self.scales) / self.hidden
        used = self.experts_used * self.neurons * self.matrices * self.hidden
        return round(self.attention / per_weight), used

    @classmethod
    def from_table(
        cls, table: Mapping[str, Any], where: str, activity: Mapping[str, Any] | None = None
    ) -> Self:
        """A `[model]` table, whole or with the name of a `synth` shape; ConfigError names the key.

        `activity` lies over the model's own statistics.
        """
        known = ScriptTable(table, where)
        known.only(("name", "shape", "source", "about", "activity", "bytes", "fitted", *COUNTS))
        stats = {**_table(table, "activity", where), **(activity or {})}
        shape = table.get("shape")
        if "bytes" not in table and shape in SHAPES:
            return cls(**_of_synth(str(shape), known), activity=_activity(stats, where))
        sizes = ScriptTable(_table(table, "bytes", where), where, "bytes")
        sizes.only(("source", *SIZES))
        counts = {name: known.whole(name, _default(name), 1, 1 << 24) for name in COUNTS}
        counts.pop("vocab")
        return cls(
            name=known.text("name", str(shape or "model")),
            **counts,
            **{name: _size(sizes, name) for name in SIZES},
            activity=_activity(stats, where),
        )


def _default(count: str) -> int | None:
    return {"experts": 1, "experts_used": 1, "matrices": 3, "vocab": 1}.get(count)


def _table(table: Mapping[str, Any], key: str, where: str) -> Mapping[str, Any]:
    found = table.get(key, {})
    if not isinstance(found, Mapping):
        raise ConfigError(f"{where}.{key} is {found!r}: give a table [model.{key}]")
    return found


def _activity(stats: Mapping[str, Any], where: str) -> Activity:
    supposed = {"active": 0.1, "skew": 5.0, "overlap": 0.7, "burst": 0.4, "gate": 0.8}
    return Activity.from_table({**supposed, **stats}, f"{where}.activity")


def _size(table: ScriptTable, key: str) -> int:
    value = table.need(key, "bytes: a whole number, or a size as 2.6GiB")
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    if not isinstance(value, str):
        table.refuse(key, f"is {value!r}: give bytes, or a size as 2.6GiB")
    return parse_size(value, f"{table.where}: {table.key_path(key)}")


def _of_synth(shape: str, table: ScriptTable) -> dict[str, Any]:
    """A shape that `polyneuron synth` writes, in 4 bits with 8-bit down columns and predictors."""
    changes = {
        "layers": "num_layers",
        "hidden": "d_model",
        "neurons": "d_ff",
        "vocab": "vocab_size",
    }
    spec = shape_spec(
        shape, **{field: table.whole(key, getattr(SHAPES[shape], field), 1) for key, field in
                  changes.items()}
    )  # fmt: skip
    width, neurons = spec.d_model, spec.d_ff
    q4 = width // 2 + width // Q4_BLOCK * SCALE_BYTES
    q8 = width + width // Q4_BLOCK * SCALE_BYTES
    bundle = -(-(2 * q4 + q8) // 512) * 512
    attention = (2 * spec.q_dim + 2 * spec.kv_dim) * q4
    rank = min(PREDICTOR_RANK, width // 4)
    return {
        "name": shape, "layers": spec.num_layers, "hidden": width, "neurons": neurons,
        "experts": 1, "experts_used": 1, "matrices": 3, "row": (2 * q4 + q8) // 3, "scales": 0,
        "slot": bundle, "bundle": bundle, "first_read": bundle, "second_read": 0,
        "attention": attention, "embedding": spec.vocab_size * q4, "head": spec.vocab_size * q4,
        "predictors": spec.num_layers * (width + neurons) * rank // 2, "resident": 0,
        "kv_token": 2 * spec.kv_dim * F16_BYTES * spec.num_layers,
    }  # fmt: skip
