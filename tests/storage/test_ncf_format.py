"""The neuron-cluster file: its bytes, its geometry, and that damage is always noticed."""

import hashlib
import os
import struct
import time
from dataclasses import replace
from pathlib import Path

import msgpack
import numpy as np
import pytest

from polyneuron.errors import ChecksumError, FormatError, UnsupportedError
from polyneuron.io.file_kind import is_ncf
from polyneuron.io.ncf_format import EXTENT_BYTES, BundleShape, bundle_shape
from polyneuron.io.ncf_manifest import decode_manifest, encode_manifest
from polyneuron.io.ncf_reader import NcfFile, read_ncf
from polyneuron.io.ncf_writer import encode_head
from polyneuron.kernels.checksum import crc32c_portable
from polyneuron.kernels.quant import StorageType
from polyneuron.model.convert import convert
from polyneuron.model.ncf_spec import spec_of
from polyneuron.model.spec import tensor_shapes
from tests.support.tiny_gguf import TinyModel, write_tiny_gguf
from tests.support.tiny_ncf import SMALLEST, SPARSE, write_source


@pytest.fixture(scope="module")
def smallest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of a few dozen KiB, with bundles."""
    folder = tmp_path_factory.mktemp("ncf")
    return convert(write_source(folder, SMALLEST), folder / "smallest.ncf").output


@pytest.fixture
def copied(smallest: Path, tmp_path: Path) -> Path:
    """One to be damaged."""
    copy = tmp_path / "copy.ncf"
    copy.write_bytes(smallest.read_bytes())
    return copy


class TestBytes:
    def test_header_is_as_written_down(self, smallest: Path) -> None:
        raw = smallest.read_bytes()
        assert raw[:8] == b"\x89NCF\r\n\x1a\n"
        version, reserved, manifest_bytes, data_offset, file_bytes, manifest_crc = (
            struct.unpack_from("<IIQQQI", raw, 8)
        )
        assert (version, reserved, file_bytes) == (1, 0, len(raw))
        assert raw[44:60] == bytes(16)
        assert struct.unpack_from("<I", raw, 60)[0] == crc32c_portable(raw[:60])
        assert manifest_crc == crc32c_portable(raw[64:data_offset])
        assert data_offset == -(-(64 + manifest_bytes) // 4096) * 4096
        manifest = msgpack.unpackb(raw[64 : 64 + manifest_bytes])
        assert list(manifest) == ["layout", "spec", "metadata", "source", "sections", "tensors"]
        section = manifest["sections"][1]
        start = data_offset + section["offset"]
        sums = np.frombuffer(section["checksums"], "<u4")
        assert sums.tolist() == [crc32c_portable(raw[start : start + section["bytes"]])]
        assert not any(raw[64 + manifest_bytes : data_offset])

    def test_bundle_holds_gate_up_down(self, smallest: Path) -> None:
        """Read by hand: block quants, then scales, of three rows at multiples of 64 bytes."""
        ncf, raw = read_ncf(smallest), smallest.read_bytes()
        section = ncf.layer_section(0)
        assert section.bundles == BundleShape(32, 512, 0, 64, 128, 512)
        gate, up, down = ncf.tensors_of(section)
        assert [t.storage for t in (gate, up, down)] == [
            StorageType.Q4, StorageType.Q4, StorageType.Q8,
        ]  # fmt: skip
        bundle = raw[section.offset + 5 * 512 : section.offset + 6 * 512]
        assert not any(bundle[18:64]) and not any(bundle[82:128]) and not any(bundle[162:])
        scale = np.frombuffer(bundle[160:162], "<f2")[0]
        quants = np.frombuffer(bundle[128:160], np.int8)
        assert scale > 0 and abs(quants).max() == 127

    def test_same_source_gives_same_bytes(self, smallest: Path, tmp_path: Path) -> None:
        again = convert(write_source(tmp_path, SMALLEST), tmp_path / "again.ncf").output
        assert again.read_bytes() == smallest.read_bytes()

    def test_bytes_do_not_change_between_versions(self, tmp_path: Path) -> None:
        """The data of a model with plain weights; a new sum means a new format version."""
        weights = {
            name: ((np.arange(np.prod(shape)) * 37 % 101 - 50) / 64).reshape(shape)
            for name, shape in tensor_shapes(SMALLEST.spec()).items()
        }
        floats = {name: values.astype(np.float32) for name, values in weights.items()}
        source = write_tiny_gguf(tmp_path / "plain.gguf", SMALLEST, weights=floats)
        ncf = read_ncf(convert(source, tmp_path / "plain.ncf").output)
        data = ncf.path.read_bytes()[ncf.data_offset :]
        assert hashlib.sha256(data).hexdigest() == DATA_SHA256

    def test_magic_is_recognised(self, smallest: Path, tmp_path: Path) -> None:
        assert is_ncf(smallest)
        assert not is_ncf(tmp_path)
        assert not is_ncf(write_source(tmp_path))


DATA_SHA256 = "434525b456c0008fa68f6aba665e74781767a4544c74704fe6fadded8fd4c42f"


class TestBundleShape:
    @pytest.mark.parametrize(
        ("rows", "expected"),
        [
            ((2304, 2304, 2304), (8192, 0, 2560, 4864, 4096)),  # 4096 wide, q4: two pages
            ((2304, 2304, 4352), (9216, 0, 2560, 4864, 2560)),  # down in q8: more than two
            ((8192, 8192, 8192), (24576, 0, 8192, 16384, 8192)),  # 4096 wide, f16
            ((612, 612, 612), (2048, 0, 640, 1280, 2048)),  # within a page: one phase
            ((4352, 640, 640), (6144, 0, 4608, 5248, 4608)),  # a gate longer than a page
            ((None, 2304, 2304), (8192, None, 0, 2560, 4096)),  # no gate: up decides
        ],
    )
    def test_rows_and_phases(
        self, rows: tuple[int | None, int, int], expected: tuple[int, int | None, int, int, int]
    ) -> None:
        bundle_bytes, gate, up, down, phase0 = expected
        assert bundle_shape(7, *rows) == BundleShape(7, bundle_bytes, gate, up, down, phase0)

    def test_whole_row_that_decides_is_in_first_phase(self) -> None:
        for gate in range(64, 9000, 130):
            shape = bundle_shape(1, gate, gate, gate)
            assert shape.phase0_bytes >= gate
            assert shape.down_offset + gate <= shape.bundle_bytes
            assert shape.bundle_bytes % 512 == shape.phase0_bytes % 512 == 0


class TestDamage:
    def test_every_flipped_byte_of_the_head_is_noticed(self, copied: Path) -> None:
        ncf, raw = read_ncf(copied), copied.read_bytes()
        fd = os.open(copied, os.O_RDWR)
        try:
            for at in range(ncf.data_offset):
                os.pwrite(fd, bytes([raw[at] ^ 1 << at % 8]), at)
                with pytest.raises(FormatError, match=r"copy\.ncf"):
                    read_ncf(copied)
                os.pwrite(fd, raw[at : at + 1], at)
        finally:
            os.close(fd)
        read_ncf(copied).check_all()

    def test_every_flipped_byte_of_the_data_is_noticed(self, copied: Path) -> None:
        ncf, raw = read_ncf(copied), bytearray(copied.read_bytes())
        for section in ncf.sections:
            view = memoryview(raw)[section.offset : section.offset + section.num_bytes]
            for at in range(section.num_bytes):
                view[at] ^= 1 << at % 8
                with pytest.raises(ChecksumError, match=r"copy\.ncf"):
                    ncf.check_extents(section, 0, view)
                view[at] ^= 1 << at % 8
        assert sum(section.num_bytes for section in ncf.sections) == len(raw) - ncf.data_offset

    def test_flipped_byte_in_the_file_is_noticed(self, copied: Path) -> None:
        ncf = read_ncf(copied)
        for section in ncf.sections:
            for at in (section.offset, section.offset + section.num_bytes - 1):
                raw = bytearray(copied.read_bytes())
                raw[at] ^= 4
                copied.write_bytes(raw)
                with pytest.raises(ChecksumError, match=f"section {section.name}"):
                    ncf.check(section.name)
                raw[at] ^= 4
                copied.write_bytes(raw)
        ncf.check_all()

    def test_every_truncation_is_noticed(self, copied: Path) -> None:
        whole = copied.stat().st_size
        for num_bytes in [whole - 1, *range(whole - 64, 0, -61), *range(200, -1, -1)]:
            os.truncate(copied, num_bytes)
            with pytest.raises(FormatError, match=r"copy\.ncf"):
                read_ncf(copied)

    def test_added_bytes_are_noticed(self, copied: Path) -> None:
        with copied.open("ab") as file:
            file.write(b"\0")
        with pytest.raises(FormatError, match=r"1 of .* bytes are too many"):
            read_ncf(copied)

    def test_newer_version_is_named(self, copied: Path) -> None:
        raw = bytearray(copied.read_bytes())
        raw[8] = 2
        raw[60:64] = crc32c_portable(raw[:60]).to_bytes(4, "little")
        copied.write_bytes(raw)
        with pytest.raises(UnsupportedError, match="version 2; this program reads 1"):
            read_ncf(copied)

    def test_place_of_damage_is_named(self, tmp_path: Path) -> None:
        model = replace(SPARSE, d_ff=4096, tensor_type="F32")  # several extents a section
        path = convert(write_source(tmp_path, model), tmp_path / "big.ncf").output
        ncf = read_ncf(path)
        section = ncf.layer_section(1)
        assert section.num_extents > 3
        with path.open("r+b") as file:
            file.seek(section.offset + 2 * EXTENT_BYTES + 5)
            file.write(b"\xa5")
        ncf.check("fixed")
        ncf.check("layer.0")
        start = section.offset + 2 * EXTENT_BYTES
        with pytest.raises(ChecksumError, match=rf"section layer\.1, bytes {start} to"):
            ncf.check("layer.1")
        raw = path.read_bytes()
        good = memoryview(raw)[section.offset : section.offset + 2 * EXTENT_BYTES]
        ncf.check_extents(section, 0, good)
        with pytest.raises(ChecksumError):
            bad = memoryview(raw)[start : start + EXTENT_BYTES]
            ncf.check_extents(section, 2, bad)


def _rewritten(path: Path, **fields: object) -> Path:
    """The file with top-level fields of its manifest changed and every checksum right."""
    ncf = read_ncf(path)
    manifest = replace(ncf.manifest, **fields)  # type: ignore[arg-type]
    head = encode_head(manifest, ncf.data_offset, ncf.file_bytes)
    with path.open("r+b") as file:
        file.write(head)
    return path


class TestContradictions:
    """Checksums that are right do not make a manifest right."""

    def test_shapes_must_be_the_models(self, copied: Path) -> None:
        spec = {**read_ncf(copied).manifest.spec, "d_ff": 64}
        with pytest.raises(FormatError, match="the model asks for"):
            spec_of(read_ncf(_rewritten(copied, spec=spec)))

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("num_heads", 0), ("num_heads", "4"), ("num_kv_heads", 3), ("head_dim", True),
            ("norm_eps", float("nan")), ("feed_forward", "gelu"), ("tied_head", 1),
            ("num_layers", 2), ("rope", None), ("family", b"x"),
        ],
    )  # fmt: skip
    def test_spec_fields_are_checked(self, field: str, value: object, copied: Path) -> None:
        ncf = read_ncf(copied)
        manifest = replace(ncf.manifest, spec={**ncf.manifest.spec, field: value})
        with pytest.raises(FormatError, match=r"copy\.ncf"):
            spec_of(replace(ncf, manifest=manifest))

    @pytest.mark.parametrize(
        "change",
        [
            {"offset": 1 << 40}, {"offset": 32}, {"rows": 1 << 40}, {"cols": 33},
            {"num_bytes": 64}, {"section_index": 9}, {"row_stride": 512}, {"offset": -64},
            {"max_abs_error": float("inf")},
        ],
    )  # fmt: skip
    def test_places_of_tensors_are_checked(self, change: dict[str, int], copied: Path) -> None:
        ncf = read_ncf(copied)
        tensors = list(ncf.tensors)
        index = next(i for i, tensor in enumerate(tensors) if tensor.role == "attn_k")
        tensors[index] = replace(tensors[index], **change)  # type: ignore[arg-type]
        self._refused(ncf, tensors=tuple(tensors))

    def test_signs_are_no_weights(self, copied: Path) -> None:
        ncf = read_ncf(copied)
        layer = next(tensor for tensor in ncf.tensors if tensor.role == "attn_k")
        by_name = {**ncf.by_name, layer.name: replace(layer, storage=StorageType.Q1)}
        manifest = replace(ncf.manifest, tensors=tuple(by_name.values()))
        with pytest.raises(FormatError, match=r"stored as q1, .* convert it again"):
            spec_of(replace(ncf, manifest=manifest, by_name=by_name))
        rows = [tensor for tensor in ncf.tensors if tensor.row_stride]
        signs = [replace(tensor, storage=StorageType.Q1) for tensor in rows]
        others = [tensor for tensor in ncf.tensors if not tensor.row_stride]
        self._refused(ncf, tensors=(*others, *signs))

    @pytest.mark.parametrize(
        "change",
        [
            {"bundle_bytes": 1024}, {"up_offset": 32}, {"down_offset": 480}, {"num_neurons": 31},
            {"phase0_bytes": 1024}, {"gate_offset": None},
        ],
    )  # fmt: skip
    def test_bundles_are_checked(self, change: dict[str, int], copied: Path) -> None:
        ncf = read_ncf(copied)
        fixed, layer = ncf.sections
        assert layer.bundles is not None
        shape = replace(layer.bundles, **change)
        self._refused(ncf, sections=(fixed, replace(layer, bundles=shape)))

    @pytest.mark.parametrize("ids", [[0] * 32, list(range(31)), list(range(1, 33))])
    def test_neuron_order_is_checked(self, ids: list[int], copied: Path) -> None:
        ncf = read_ncf(copied)
        fixed, layer = ncf.sections
        self._refused(ncf, sections=(fixed, replace(layer, neuron_ids=np.array(ids, np.uint32))))

    def test_sections_leave_no_gap(self, copied: Path) -> None:
        ncf = read_ncf(copied)
        fixed, layer = ncf.sections
        self._refused(ncf, sections=(fixed, replace(layer, offset=layer.offset + 4096)))
        self._refused(ncf, sections=(fixed,), tensors=ncf.tensors[:1])
        self._refused(ncf, sections=(fixed, replace(layer, name="fixed")))
        self._refused(ncf, tensors=(*ncf.tensors, ncf.tensors[0]))

    @staticmethod
    def _refused(ncf: NcfFile, **fields: object) -> None:
        manifest = replace(ncf.manifest, **fields)  # type: ignore[arg-type]
        packed = encode_manifest(manifest, ncf.data_offset)
        with pytest.raises(FormatError, match="the manifest"):
            decode_manifest("x", packed, ncf.data_offset, ncf.file_bytes)

    @pytest.mark.parametrize(
        "packed",
        [
            b"", b"\xc1", b"\x90", b"\xdd\xff\xff\xff\xff", b"\x91" * 5000, b"\xc0\xc0",
            msgpack.packb({"sections": 3}), msgpack.packb({"sections": [3]}),
            msgpack.packb({1: 2, "sections": [], "tensors": []}),
        ],
    )  # fmt: skip
    def test_other_msgpack_is_refused(self, packed: bytes) -> None:
        with pytest.raises(FormatError, match="the manifest"):
            decode_manifest("x", packed, 4096, 4096)


def test_large_vocabulary_is_read_at_once(tmp_path: Path) -> None:
    """262k tokens, the largest seen: within a second."""
    path = convert(write_source(tmp_path, TinyModel()), tmp_path / "out.ncf").output
    ncf = read_ncf(path)
    tokens = [f"token{i}" for i in range(262_144)]
    manifest = replace(ncf.manifest, metadata={"tokenizer.ggml.tokens": tokens})
    packed = encode_manifest(manifest, ncf.data_offset)
    started = time.perf_counter()
    found = decode_manifest("x", packed, ncf.data_offset, ncf.file_bytes)
    assert time.perf_counter() - started < 1.0
    assert found.metadata["tokenizer.ggml.tokens"] == tokens
