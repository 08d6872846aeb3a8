"""The manifest as bytes and back, every field checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import msgpack
import numpy as np

from polyneuron.errors import FormatError
from polyneuron.io.gguf_values import quoted
from polyneuron.io.ncf_fields import Fields
from polyneuron.io.ncf_format import (
    BUNDLE_ALIGN,
    LINE_BYTES,
    PAGE_BYTES,
    BundleShape,
    Layout,
    NcfManifest,
    NcfSection,
    NcfSource,
    NcfTensor,
    SectionKind,
    neuron_row_bytes,
    stored_bytes,
)
from polyneuron.kernels.quant import StorageType

MAX_MANIFEST_BYTES = 64 << 20  # five times what the largest vocabulary seen takes
MAX_ROWS = 1 << 31
VECTOR = "vector"
ARRAY_KEY = "\0dtype"  # no metadata value is a mapping, so this one stands for an array
DTYPES = {"<u1", "<i1", "<u2", "<i2", "<u4", "<i4", "<u8", "<i8", "<f4", "<f8", "|b1"}
STORAGE_NAMES = {storage.name.lower(): storage for storage in StorageType}


def encode_manifest(manifest: NcfManifest, data_offset: int) -> bytes:
    """The manifest as msgpack. Offsets of sections count from `data_offset`.

    Checksums and errors take the same room whatever their values, so a manifest can be written
    once everything behind it has been.
    """
    plain = {
        "layout": str(manifest.layout),
        "spec": dict(manifest.spec),
        "metadata": {key: _plain_value(value) for key, value in manifest.metadata.items()},
        "source": asdict(manifest.source),
        "sections": [_plain_section(section, data_offset) for section in manifest.sections],
        "tensors": [_plain_tensor(tensor) for tensor in manifest.tensors],
    }
    packed: bytes = msgpack.packb(plain, unicode_errors="surrogateescape")
    return packed


def _plain_value(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        little = np.ascontiguousarray(value, value.dtype.newbyteorder("<"))
        name = little.dtype.str.replace("|u1", "<u1").replace("|i1", "<i1")
        return {ARRAY_KEY: name, "values": little.tobytes()}
    return value


def _plain_section(section: NcfSection, data_offset: int) -> dict[str, Any]:
    plain: dict[str, Any] = {
        "name": section.name,
        "kind": str(section.kind),
        "offset": section.offset - data_offset,
        "bytes": section.num_bytes,
        "checksums": section.checksums.astype("<u4").tobytes(),
    }
    if section.bundles is not None:
        plain["bundles"] = asdict(section.bundles)
    if section.neuron_ids is not None:
        plain["neuron_ids"] = section.neuron_ids.astype("<u4").tobytes()
    return plain


def _plain_tensor(tensor: NcfTensor) -> dict[str, Any]:
    return {
        "name": tensor.name,
        "layer": tensor.layer_id,
        "role": tensor.role,
        "storage": VECTOR if tensor.storage is None else tensor.storage.name.lower(),
        "rows": tensor.rows,
        "cols": tensor.cols,
        "section": tensor.section_index,
        "offset": tensor.offset,
        "bytes": tensor.num_bytes,
        "row_stride": tensor.row_stride,
        "source_type": tensor.source_type,
        "max_abs_error": float(tensor.max_abs_error),
        "rms_error": float(tensor.rms_error),
    }


def decode_manifest(path: str, packed: bytes, data_offset: int, file_bytes: int) -> NcfManifest:
    """The manifest of a file of `file_bytes`; FormatError when it is not consistent with itself."""
    try:
        plain = msgpack.unpackb(packed, unicode_errors="surrogateescape")
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise FormatError(f"{path}: the manifest is no msgpack ({error}); damaged") from None
    fields = Fields(path, "the manifest", plain)
    sections = tuple(_section(entry, data_offset) for entry in fields.parts("sections", "section"))
    _check_sections(fields, sections, data_offset, file_bytes)
    tensors = tuple(_tensor(entry, sections) for entry in fields.parts("tensors", "tensor"))
    _check_tensors(fields, sections, tensors)
    source = fields.part("source")
    return NcfManifest(
        layout=fields.choice("layout", Layout),
        spec=fields.mapping("spec"),
        metadata=_metadata(fields, fields.mapping("metadata")),
        source=NcfSource(source.text("format"), source.count("num_bytes"), source.text("key")),
        sections=sections,
        tensors=tensors,
    )


def _metadata(fields: Fields, plain: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _value(fields, key, value) for key, value in plain.items()}


def _value(fields: Fields, key: str, value: Any) -> Any:
    if isinstance(value, dict):
        dtype, raw = value.get(ARRAY_KEY), value.get("values")
        if dtype not in DTYPES or not isinstance(raw, bytes) or len(raw) % np.dtype(dtype).itemsize:
            fields.fail(f"has no array in metadata key {quoted(key)}")
        return np.frombuffer(raw, dtype).astype(np.dtype(dtype).newbyteorder("="))
    if isinstance(value, list) and not all(isinstance(entry, str) for entry in value):
        fields.fail(f"has more than strings in metadata key {quoted(key)}")
    return value


def _section(fields: Fields, data_offset: int) -> NcfSection:
    kind = fields.choice("kind", SectionKind)
    shape = _bundle_shape(fields.part("bundles")) if kind is SectionKind.BUNDLES else None
    neuron_ids = fields.words("neuron_ids") if fields.has("neuron_ids") else None
    section = NcfSection(
        name=fields.text("name"),
        kind=kind,
        offset=data_offset + fields.count("offset"),
        num_bytes=fields.count("bytes"),
        checksums=fields.words("checksums"),
        bundles=shape,
        neuron_ids=neuron_ids,
    )
    if section.offset % PAGE_BYTES or section.num_bytes % PAGE_BYTES:
        fields.fail(f"does not begin and end at multiples of {PAGE_BYTES}")
    if len(section.checksums) != section.num_extents:
        fields.fail(f"has {len(section.checksums)} checksums for {section.num_extents} extents")
    if shape is not None and shape.num_neurons * shape.bundle_bytes > section.num_bytes:
        fields.fail("is too short for its bundles")
    if neuron_ids is not None:
        num_neurons = shape.num_neurons if shape is not None else -1
        ascending = np.arange(max(num_neurons, 0))
        if len(neuron_ids) != num_neurons or not np.array_equal(np.sort(neuron_ids), ascending):
            fields.fail("does not name every neuron once in neuron_ids")
    return section


def _bundle_shape(fields: Fields) -> BundleShape:
    shape = BundleShape(
        num_neurons=fields.count("num_neurons", MAX_ROWS, 1),
        bundle_bytes=fields.count("bundle_bytes", 1 << 30, BUNDLE_ALIGN),
        gate_offset=fields.optional_count("gate_offset"),
        up_offset=fields.count("up_offset"),
        down_offset=fields.count("down_offset"),
        phase0_bytes=fields.count("phase0_bytes", 1 << 30, BUNDLE_ALIGN),
    )
    if shape.bundle_bytes % BUNDLE_ALIGN or shape.phase0_bytes % BUNDLE_ALIGN:
        fields.fail(f"has lengths that are no multiples of {BUNDLE_ALIGN}")
    if shape.phase0_bytes > shape.bundle_bytes:
        fields.fail("has a first phase longer than the bundle")
    return shape


def _check_sections(
    fields: Fields, sections: tuple[NcfSection, ...], data_offset: int, file_bytes: int
) -> None:
    end = data_offset
    for section in sections:
        if section.offset != end:
            fields.fail(f"has section {quoted(section.name)} at {section.offset}, not at {end}")
        end += section.num_bytes
    if end != file_bytes:
        fields.fail(f"has sections that end at {end}, the file ends at {file_bytes}")
    if len({section.name for section in sections}) != len(sections):
        fields.fail("has two sections of one name")


def _tensor(fields: Fields, sections: tuple[NcfSection, ...]) -> NcfTensor:
    storage_name = fields.text("storage")
    if storage_name != VECTOR and storage_name not in STORAGE_NAMES:
        fields.fail(f"has the unknown storage type {quoted(storage_name)}")
    if not sections:
        fields.fail("lies in no section")
    tensor = NcfTensor(
        name=fields.text("name"),
        layer_id=fields.optional_count("layer"),
        role=fields.text("role"),
        storage=STORAGE_NAMES.get(storage_name),
        rows=fields.count("rows", MAX_ROWS, 1),
        cols=fields.count("cols", MAX_ROWS, 1),
        section_index=fields.count("section", len(sections) - 1),
        offset=fields.count("offset"),
        num_bytes=fields.count("bytes"),
        row_stride=fields.count("row_stride"),
        source_type=fields.text("source_type"),
        max_abs_error=fields.number("max_abs_error"),
        rms_error=fields.number("rms_error"),
    )
    if tensor.storage is not None and tensor.storage.is_quantised and tensor.cols % 32:
        fields.fail(f"has {tensor.cols} columns, not a multiple of 32")
    _check_place(fields, sections[tensor.section_index], tensor)
    return tensor


def _check_place(fields: Fields, section: NcfSection, tensor: NcfTensor) -> None:
    shape = section.bundles
    if shape is None:
        expected = stored_bytes(tensor.storage, tensor.rows, tensor.cols)
        if tensor.num_bytes != expected or tensor.row_stride or tensor.offset % LINE_BYTES:
            fields.fail(f"does not take {expected} bytes at a multiple of {LINE_BYTES}")
        if tensor.offset + tensor.num_bytes > section.num_bytes:
            fields.fail(f"ends behind section {quoted(section.name)}")
        return
    offsets = {
        "ffn_gate": shape.gate_offset,
        "ffn_up": shape.up_offset,
        "ffn_down": shape.down_offset,
    }
    has_rows = tensor.storage is not None and tensor.storage.is_for_weights
    if tensor.storage is None or not has_rows or offsets.get(tensor.role) != tensor.offset:
        fields.fail("is no row of its section's bundles")
    row = neuron_row_bytes(tensor.storage, tensor.cols)
    in_bundle = tensor.offset % 2 == 0 and tensor.offset + row <= shape.bundle_bytes
    if not in_bundle or tensor.row_stride != shape.bundle_bytes:
        fields.fail(f"does not fit bundles of {shape.bundle_bytes} bytes")
    if tensor.rows != shape.num_neurons or tensor.num_bytes != row * tensor.rows:
        fields.fail(f"has not one row for each of {shape.num_neurons} neurons")


def _check_tensors(
    fields: Fields, sections: tuple[NcfSection, ...], tensors: tuple[NcfTensor, ...]
) -> None:
    names: set[str] = set()
    ends = [0] * len(sections)
    for tensor in tensors:
        if tensor.name in names:
            fields.fail(f"has tensor {quoted(tensor.name)} twice")
        names.add(tensor.name)
        section = sections[tensor.section_index]
        is_rows = section.bundles is not None and tensor.storage is not None
        row = neuron_row_bytes(tensor.storage, tensor.cols) if is_rows and tensor.storage else 0
        if tensor.offset < ends[tensor.section_index]:
            fields.fail(f"has tensor {quoted(tensor.name)} inside the one before it")
        ends[tensor.section_index] = tensor.offset + (row if is_rows else tensor.num_bytes)
