"""What a conversion writes: tiles byte for byte as in memory, bundles with the same weights."""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from polyneuron.errors import ConfigError, FormatError
from polyneuron.io import neuron_rows
from polyneuron.io.gguf_file import read_header
from polyneuron.io.ncf_format import Layout, SectionKind
from polyneuron.io.ncf_manifest import decode_manifest, encode_manifest
from polyneuron.io.ncf_reader import read_ncf
from polyneuron.io.neuron_rows import rows_of_tiles
from polyneuron.io.pack import decode_rows
from polyneuron.kernels.gemv import axpy_rows, dot_rows, matmul_tiles
from polyneuron.kernels.quant import StorageType, quantize_acts, row_bytes
from polyneuron.model.architecture import describe
from polyneuron.model.chat_template import ChatTemplate
from polyneuron.model.convert import convert
from polyneuron.model.ncf_spec import spec_of
from polyneuron.model.spec import RopeScaling, tensor_shapes
from polyneuron.model.tokenizer import Tokenizer
from tests.support.tiny_gguf import TinyModel, write_tiny_gguf
from tests.support.tiny_ncf import SPARSE, cut_small, packed, stored, write_source

WIDE = {"d_model": 256, "num_heads": 4, "head_dim": 64, "d_ff": 288}  # whole K-quant blocks
TYPES = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
K_TYPES = ("Q4_K", "Q6_K")
# Largest relative rms error that columns add; float sources stay as they are unless told otherwise.
DOWN_BOUNDS = {
    StorageType.Q8: 8e-3, StorageType.Q4: 0.12, StorageType.F16: 4e-4, StorageType.F32: 0.0,
}  # fmt: skip


def model_of(type_name: str, base: TinyModel) -> TinyModel:
    if type_name in K_TYPES:
        base = replace(base, **{**WIDE, "d_ff": 512})
    return replace(base, tensor_type=type_name)


@pytest.fixture(params=["whole", "cut"])
def pieces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors in one piece, and in many."""
    if request.param == "cut":
        cut_small(monkeypatch)
        monkeypatch.setattr(neuron_rows, "SLAB_BYTES", 4096)
        monkeypatch.setattr(neuron_rows, "PANEL_VALUES", 2048)


@pytest.mark.usefixtures("pieces")
class TestTiles:
    @pytest.mark.parametrize("type_name", TYPES + K_TYPES)
    def test_tensors_are_as_in_memory(self, type_name: str, tmp_path: Path) -> None:
        source = write_source(tmp_path, model_of(type_name, TinyModel(family="qwen2")))
        convert(source, tmp_path / "out.ncf")
        ncf = read_ncf(tmp_path / "out.ncf")
        ncf.check_all()
        spec = describe(read_header(source))
        assert [tensor.name for tensor in ncf.tensors if tensor.section_index == 0] == [
            name for name in tensor_shapes(spec) if ".ffn_" not in name or "norm" in name
        ]
        for name in tensor_shapes(spec):
            assert np.array_equal(stored(ncf, name), packed(source, name)), name

    def test_sections_are_pages_in_order(self, tmp_path: Path) -> None:
        convert(write_source(tmp_path, TinyModel(num_layers=3)), tmp_path / "out.ncf")
        ncf = read_ncf(tmp_path / "out.ncf")
        assert [s.name for s in ncf.sections] == ["fixed", "layer.0", "layer.1", "layer.2"]
        assert all(s.offset % 4096 == 0 for s in ncf.sections)
        roles = [t.role for t in ncf.tensors_of(ncf.layer_section(1))]
        assert roles == ["ffn_gate", "ffn_up", "ffn_down"]


@pytest.mark.usefixtures("pieces")
class TestBundles:
    @pytest.mark.parametrize("type_name", TYPES + K_TYPES)
    def test_gate_and_up_are_the_tiles_rows(self, type_name: str, tmp_path: Path) -> None:
        model = model_of(type_name, SPARSE)
        source = write_source(tmp_path, model)
        convert(source, tmp_path / "out.ncf")
        ncf = read_ncf(tmp_path / "out.ncf")
        ncf.check_all()
        rng = np.random.default_rng(0)
        x = rng.standard_normal((1, model.d_model)).astype(np.float32)
        for role in ("gate", "up"):
            name = f"blk.1.ffn_{role}.weight"
            storage = ncf.tensor(name).storage
            assert storage is not None
            acts = quantize_acts(x) if storage.is_quantised else x
            rows = np.ascontiguousarray(stored(ncf, name)).reshape(-1)
            from_rows = dot_rows(storage, rows, model.d_model, acts[0])
            from_tiles = matmul_tiles(storage, packed(source, name), model.d_model, acts)
            assert np.array_equal(from_rows, from_tiles[0, : model.d_ff])

    @pytest.mark.parametrize(
        ("type_name", "down"),
        [
            *((type_name, None) for type_name in TYPES + K_TYPES),
            ("Q8_0", StorageType.Q4),
            ("F16", StorageType.Q4),
            ("F16", StorageType.Q8),
            ("Q4_0", StorageType.F16),
        ],
    )
    def test_down_is_within_its_reported_error(
        self, type_name: str, down: StorageType | None, tmp_path: Path
    ) -> None:
        model = model_of(type_name, SPARSE)
        source = write_source(tmp_path, model)
        convert(source, tmp_path / "out.ncf", down=down)
        ncf = read_ncf(tmp_path / "out.ncf")
        name = "blk.0.ffn_down.weight"
        tensor, header = ncf.tensor(name), read_header(source)
        row = header.tensor(name)
        raw = source.read_bytes()[row.offset : row.offset + row.num_bytes]
        columns = decode_rows(row, raw).T.astype(np.float64)
        assert tensor.storage is not None and down in (None, tensor.storage)
        rows = np.ascontiguousarray(stored(ncf, name)).reshape(-1)
        values = np.zeros((model.d_ff, model.d_model))
        for neuron in range(model.d_ff):
            out = np.zeros(model.d_model, np.float32)
            one, ids = np.ones(1, np.float32), np.array([neuron], np.uint32)
            axpy_rows(tensor.storage, out, rows, one, ids)
            values[neuron] = out
        difference = np.abs(values - columns)
        assert tensor.max_abs_error == pytest.approx(difference.max(), rel=1e-5)
        rms = np.sqrt(np.square(difference).sum() / np.square(columns).sum())
        assert tensor.rms_error == pytest.approx(rms, rel=1e-4)
        assert rms <= DOWN_BOUNDS[tensor.storage]
        assert rms == 0 or down or type_name not in ("F32", "F16")

    @pytest.mark.parametrize("room", [1 << 30, 0], ids=["memory", "temporary_file"])
    def test_order_moves_neurons(
        self, room: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("polyneuron.io.ncf_pieces.PRIVATE_BYTES", room)
        source = write_source(tmp_path)
        convert(source, tmp_path / "plain.ncf")
        ids = np.random.default_rng(1).permutation(SPARSE.d_ff).astype(np.uint32)
        convert(source, tmp_path / "ordered.ncf", order={1: ids})
        plain, ordered = read_ncf(tmp_path / "plain.ncf"), read_ncf(tmp_path / "ordered.ncf")
        found = ordered.layer_section(1).neuron_ids
        assert found is not None and np.array_equal(found, ids)
        assert ordered.layer_section(0).neuron_ids is None
        for tensor in plain.tensors:
            wanted = stored(plain, tensor.name)
            is_moved = tensor.layer_id == 1 and bool(tensor.row_stride)
            wanted = wanted[ids] if is_moved else wanted
            assert np.array_equal(stored(ordered, tensor.name), wanted)
            assert ordered.tensor(tensor.name).rms_error == tensor.rms_error


class TestRows:
    @pytest.mark.parametrize("storage", [kind for kind in StorageType if kind.is_for_weights])
    @pytest.mark.parametrize("num_rows", [1, 32, 45])
    def test_rows_have_the_tiles_values(self, storage: StorageType, num_rows: int) -> None:
        cols, rng = 96, np.random.default_rng(num_rows)
        tiles = rng.integers(0, 60, -(-num_rows // 32) * 32 * row_bytes(storage, cols), np.uint8)
        rows = rows_of_tiles(storage, tiles, num_rows, cols)
        assert rows.shape == (num_rows, row_bytes(storage, cols))
        x = rng.standard_normal((1, cols)).astype(np.float32)
        acts = quantize_acts(x) if storage.is_quantised else x
        from_tiles = matmul_tiles(storage, tiles, cols, acts)[0, :num_rows]
        assert np.array_equal(dot_rows(storage, rows.reshape(-1), cols, acts[0]), from_tiles)


class TestDescription:
    @pytest.mark.parametrize(
        "model",
        [
            TinyModel(family="llama", rope_scaling=RopeScaling.LLAMA3),
            TinyModel(family="qwen2", rope_scaling=RopeScaling.YARN),
            TinyModel(family="qwen3", tied_head=False, rope_scaling=RopeScaling.LINEAR),
            TinyModel(family="llama", activation="relu", has_gate=False, output_bias=True),
            SPARSE,
        ],
        ids=lambda model: f"{model.family}-{model.rope_scaling.value}",
    )
    def test_spec_and_tokenizer_come_back(self, model: TinyModel, tmp_path: Path) -> None:
        template = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
        metadata = {"tokenizer.chat_template": template, "general.license": "apache-2.0"}
        source = write_tiny_gguf(tmp_path / "tiny.gguf", model, metadata=metadata)
        convert(source, tmp_path / "out.ncf")
        ncf, header = read_ncf(tmp_path / "out.ncf"), read_header(source)
        assert spec_of(ncf) == describe(header)
        own, theirs = (
            Tokenizer.from_metadata(ncf.metadata),
            Tokenizer.from_metadata(header.metadata),
        )
        text = "Hello there, 12 worlds!\n"
        assert own.encode(text) == theirs.encode(text)
        assert own.end_ids == theirs.end_ids
        ChatTemplate.from_metadata(ncf.metadata)
        assert ncf.metadata["tokenizer.chat_template"] == template
        assert ncf.metadata["general.license"] == "apache-2.0"

    def test_bytes_that_are_no_text_survive(self, tmp_path: Path) -> None:
        convert(write_source(tmp_path), tmp_path / "out.ncf")
        ncf = read_ncf(tmp_path / "out.ncf")
        values = {"tokenizer.ggml.tokens": ["a", "\udcff\udc80"], "general.name": "\udcfe"}
        manifest = replace(ncf.manifest, metadata=values)
        packed_manifest = encode_manifest(manifest, ncf.data_offset)
        place = (ncf.data_offset, ncf.file_bytes)
        assert decode_manifest("x", packed_manifest, *place).metadata == values

    def test_layout_follows_the_activation(self, tmp_path: Path) -> None:
        for activation, kind in (("silu", "tiles"), ("relu", "bundles"), ("drelu", "bundles")):
            model = TinyModel(activation=activation)
            report = convert(write_source(tmp_path, model), tmp_path / f"{activation}.ncf")
            assert report.layout == kind
            assert read_ncf(report.output).sections[1].kind is SectionKind(kind)

    def test_bundles_of_any_model_can_be_asked_for(self, tmp_path: Path) -> None:
        """For threshold mode."""
        source = write_source(tmp_path, TinyModel())
        report = convert(source, tmp_path / "out.ncf", layout=Layout.BUNDLES)
        assert report.layout is Layout.BUNDLES

    def test_tiles_can_be_asked_for(self, tmp_path: Path) -> None:
        report = convert(write_source(tmp_path), tmp_path / "out.ncf", layout=Layout.TILES)
        assert report.layout is Layout.TILES and not report.lossy


class TestRefusals:
    @pytest.mark.parametrize(
        ("layout", "down", "cure"),
        [
            (Layout.BUNDLES, StorageType.Q1, "--down q1: signs alone .*; use --down q8, q4 or f16"),
            (Layout.TILES, StorageType.Q8, "--down q8: tiles .*; use --layout bundles"),
            (Layout.BUNDLES, StorageType.Q4, "--down q4: columns of 48 .*; use --down f16"),
        ],
    )
    def test_columns_that_cannot_be_stored_so(
        self, layout: Layout, down: StorageType, cure: str, tmp_path: Path
    ) -> None:
        source = write_source(tmp_path, replace(SPARSE, tensor_type="F16", d_model=48))
        with pytest.raises(ConfigError, match=cure):
            convert(source, tmp_path / "out.ncf", layout=layout, down=down)

    def test_other_output_is_kept(self, tmp_path: Path) -> None:
        source, output = write_source(tmp_path), tmp_path / "out.ncf"
        output.write_bytes(b"something else")
        with pytest.raises(ConfigError, match="--force"):
            convert(source, output)
        assert output.read_bytes() == b"something else"
        convert(source, output, force=True)
        read_ncf(output).check_all()

    def test_output_takes_no_devices_place(self, tmp_path: Path) -> None:
        source, fifo = write_source(tmp_path), tmp_path / "m.ncf"
        os.mkfifo(fifo)
        with pytest.raises(ConfigError, match=r"m\.ncf: no plain file; give the name"):
            convert(source, fifo, force=True)
        assert fifo.is_fifo()

    def test_same_output_is_left_alone(self, tmp_path: Path) -> None:
        source, output = write_source(tmp_path), tmp_path / "out.ncf"
        convert(source, output)
        before = output.stat()
        assert convert(source, output).was_there
        assert output.stat().st_mtime_ns == before.st_mtime_ns

    def test_full_disk_is_said_before(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Space:
            f_bavail, f_frsize = 1, 4096

        monkeypatch.setattr("polyneuron.io.piece_writer.os.statvfs", lambda path: Space)
        with pytest.raises(ConfigError, match=r"needs 0\.00 GiB, .* has 0\.00 GiB free"):
            convert(write_source(tmp_path), tmp_path / "out.ncf")
        assert not list(tmp_path.glob("out*"))

    def test_weights_that_are_no_numbers_are_refused(self, tmp_path: Path) -> None:
        source = write_source(tmp_path, replace(SPARSE, tensor_type="F16"))
        down = read_header(source).tensor("blk.1.ffn_down.weight")
        with source.open("r+b") as file:
            file.seek(down.offset + 100)
            file.write(np.array([np.nan], np.float16).tobytes())
        with pytest.raises(FormatError, match=r"tiny\.gguf: tensor 'blk\.1\.ffn_down\.weight'"):
            convert(source, tmp_path / "out.ncf")
        assert not (tmp_path / "out.ncf").exists()
