"""A model's activation statistics: the file beside it (docs/PROFILE.md)."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyneuron.errors import ChecksumError, ConfigError, FormatError, UnsupportedError
from polyneuron.io.file_kind import PROFILE_MAGIC, beside, check_regular_file
from polyneuron.io.ncf_fields import Fields
from polyneuron.io.packed_arrays import pack_arrays, unpack_arrays
from polyneuron.io.whole_file import write_whole
from polyneuron.kernels.checksum import crc32c

SUFFIX = ".profile"
VERSION = 1
HEADER = struct.Struct("<8sIIQ")
"""Magic, version, CRC-32C of what follows, its bytes."""
BATCHES = (1, 2, 4, 8)
"""Numbers of tokens whose neurons are counted together."""
CURE = "make it anew with polyneuron profile"

U32 = NDArray[np.uint32]
F32 = NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class LayerProfile:
    """One layer's counts; neurons are in the order of the model file's bundles."""

    active: U32
    """(batch sizes, d_ff): groups of tokens in which some token's activation is not zero."""
    gated: U32
    """(batch sizes, d_ff): the same of the value that decides being above zero."""
    mean_abs: F32
    """(d_ff): mean |activation|."""
    down_norm: F32
    """(d_ff): length of the down row."""
    order: U32
    """(d_ff): the neurons in the order in which their bundles should lie."""
    facts: Mapping[str, Any] = field(repr=False)
    """Figures of the whole layer; docs/PROFILE.md names them."""

    def plain(self) -> dict[str, Any]:
        """For `pack_arrays`."""
        arrays = ("active", "gated", "mean_abs", "down_norm", "order")
        return {name: getattr(self, name) for name in arrays} | {"facts": dict(self.facts)}


@dataclass(frozen=True, slots=True)
class ActivationBounds:
    """Under which activations of a model that has no zeros count as zero, and what that costs."""

    values: tuple[float, ...]
    """Of each layer, for |activation of the deciding value|."""
    share: float
    """Of neurons, those that count as zero."""
    ppl: float
    """Perplexity with the bounds, over tokens that they were not chosen by."""
    dense_ppl: float
    """Without them, over the same tokens."""

    @property
    def cost(self) -> float:
        """By how much of itself perplexity rises."""
        return self.ppl / self.dense_ppl - 1.0

    def plain(self) -> dict[str, Any]:
        """For `pack_arrays`."""
        values = np.asarray(self.values, np.float32)
        return {
            "values": values, "share": self.share, "ppl": self.ppl, "dense_ppl": self.dense_ppl
        }  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class Profile:
    """All layers of a model over one text."""

    model_key: str
    """`predictor_file.model_key` of the model file."""
    num_tokens: int
    text_key: str
    """SHA-256 of the tokens."""
    layers: tuple[LayerProfile, ...]
    bounds: ActivationBounds | None = None
    """Of a model whose activations are never exactly zero; counts are of those beyond them."""


def profile_path(model: Path) -> Path:
    """Where a model's profile is kept."""
    return beside(model, SUFFIX)


def write_profile(path: Path, profile: Profile) -> None:
    """Write or replace it, at once or not at all; DeviceError names the file."""
    body = pack_arrays(
        {
            "model_key": profile.model_key,
            "num_tokens": profile.num_tokens,
            "text_key": profile.text_key,
            "batches": list(BATCHES),
            "layers": [layer.plain() for layer in profile.layers],
            "bounds": profile.bounds.plain() if profile.bounds else None,
        }
    )
    write_whole(path, HEADER.pack(PROFILE_MAGIC, VERSION, crc32c(body), len(body)) + body)


def read_profile(path: Path, key: str, num_layers: int, d_ff: int) -> Profile:
    """The profile of the model file named by `key`.

    ConfigError when it is another model's, FormatError or ChecksumError when it is none or damaged.
    """
    body = _checked_body(path)
    fields = Fields(str(path), "the profile", unpack_arrays(path, body))
    if fields.text("model_key") != key:
        raise ConfigError(f"{path}: this profile is of another model file; {CURE}")
    layers = tuple(layer_of(part, d_ff) for part in fields.parts("layers", "layer"))
    if len(layers) != num_layers:
        fields.fail(f"has {len(layers)} layers, the model has {num_layers}")
    bounds = _bounds_of(fields.part("bounds"), num_layers) if fields.has("bounds") else None
    num_tokens = fields.count("num_tokens", least=1)
    return Profile(key, num_tokens, fields.text("text_key"), layers, bounds)


def _bounds_of(fields: Fields, num_layers: int) -> ActivationBounds:
    values = fields.array("values", "<f4", (num_layers,))
    if not (np.isfinite(values).all() and (values > 0).all()):
        fields.fail("has bounds that are not positive numbers")
    return ActivationBounds(
        tuple(map(float, values)), fields.number("share"), fields.number("ppl"),
        fields.number("dense_ppl"),
    )  # fmt: skip


def _checked_body(path: Path) -> bytes:
    check_regular_file(path)
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise FormatError(f"{path}: {error.strerror or error}") from None
    if raw[: len(PROFILE_MAGIC)] != PROFILE_MAGIC or len(raw) < HEADER.size:
        raise FormatError(f"{path}: not a profile; {CURE}")
    _, version, checksum, num_bytes = HEADER.unpack_from(raw)
    if version != VERSION:
        raise UnsupportedError(f"{path}: profile version {version}; this reads {VERSION}; {CURE}")
    body = raw[HEADER.size :]
    if len(body) != num_bytes or crc32c(body) != checksum:
        raise ChecksumError(f"{path}: cut off or damaged: its checksum does not match; {CURE}")
    return body


def layer_of(fields: Fields, d_ff: int) -> LayerProfile:
    """A layer from its plain form; FormatError when an array is not as it must be."""
    layer = LayerProfile(
        active=fields.array("active", "<u4", (len(BATCHES), d_ff)),
        gated=fields.array("gated", "<u4", (len(BATCHES), d_ff)),
        mean_abs=fields.array("mean_abs", "<f4", (d_ff,)),
        down_norm=fields.array("down_norm", "<f4", (d_ff,)),
        order=fields.array("order", "<u4", (d_ff,)),
        facts=fields.mapping("facts"),
    )
    if not np.array_equal(np.sort(layer.order), np.arange(d_ff)):
        fields.fail("does not name every neuron once in order")
    return layer
