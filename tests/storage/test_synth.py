"""Files of random weights: the shape asked for, one set of weights in every layout, same bytes."""

import hashlib
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from polyneuron.errors import ConfigError
from polyneuron.io.gguf_file import check_supported, read_header
from polyneuron.io.ncf_format import Layout
from polyneuron.io.ncf_reader import read_ncf
from polyneuron.kernels.quant import BLOCK_COLS, StorageType
from polyneuron.model.architecture import describe
from polyneuron.model.convert import convert
from polyneuron.model.ncf_spec import spec_of
from polyneuron.model.tokenizer import Tokenizer
from polyneuron.synth import pieces, twin
from polyneuron.synth.codings import CODINGS
from polyneuron.synth.spectrum import block_variances
from polyneuron.synth.write import synthesize
from tests.support.local_engine import LocalEngine
from tests.support.reference_model import ReferenceModel
from tests.support.synthetic import ODD, bundle_values, small_settings, write_synth
from tests.support.tiny_ncf import cut_small, stored

# Of the data behind the heads.
GOLDEN = {"synth.ncf": "e1ac8c60b0bb054d", "synth.gguf": "4d9fd4e447399382"}
READ = ("attn_q", "attn_k", "attn_v", "ffn_gate", "ffn_up")
FED = ("ffn_gate", "ffn_up", "ffn_down")


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture(params=["whole", "cut"])
def cuts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors in one piece, and in many."""
    if request.param == "cut":
        cut_small(monkeypatch)
        monkeypatch.setattr(twin, "PIECE_BYTES", 2000)


class TestFiles:
    @pytest.mark.parametrize("shape", ["bamboo-7b", "mistral-7b", "smollm2-135m"])
    def test_both_have_the_shape(self, shape: str, tmp_path: Path) -> None:
        settings = small_settings(shape)
        write_synth(tmp_path, settings)
        ncf, header = read_ncf(tmp_path / "synth.ncf"), read_header(tmp_path / "synth.gguf")
        check_supported(header)
        assert spec_of(ncf) == settings.spec
        found = describe(header)
        assert found.norm_eps == pytest.approx(settings.spec.norm_eps)
        expected = replace(settings.spec, family="llama", norm_eps=found.norm_eps)
        assert found == expected
        ncf.check_all()
        assert sorted(p.name for p in tmp_path.iterdir()) == ["synth.gguf", "synth.ncf"]

    def test_any_text_can_be_written(self, tmp_path: Path) -> None:
        write_synth(tmp_path)
        text = "a text, é"
        for keys in (
            read_ncf(tmp_path / "synth.ncf").metadata,
            read_header(tmp_path / "synth.gguf").metadata,
        ):
            tokenizer = Tokenizer.from_metadata(keys)
            assert tokenizer.decode(tokenizer.encode(text, add_bos=False)).strip() == text

    def test_head_keeps_eight_bits(self, tmp_path: Path) -> None:
        write_synth(tmp_path)
        ncf = read_ncf(tmp_path / "synth.ncf")
        found = {tensor.role: tensor.storage for tensor in ncf.tensors}
        assert found["output"] is StorageType.Q8
        assert {found[role] for role in ("token_embd", "attn_q", *FED)} == {StorageType.Q4}

    def test_tied_embedding_counts_as_the_head(self, tmp_path: Path) -> None:
        write_synth(tmp_path, small_settings("smollm2-135m"), twin=False)
        embedding = read_ncf(tmp_path / "synth.ncf").tensor("token_embd.weight")
        assert embedding.storage is StorageType.Q8


@pytest.mark.usefixtures("cuts")
class TestWeights:
    @pytest.mark.parametrize("quant", CODINGS)
    @pytest.mark.parametrize("is_odd", [False, True], ids=["even", "odd"])
    def test_bundles_hold_the_twins_weights(self, quant: str, is_odd: bool, tmp_path: Path) -> None:
        write_synth(tmp_path, small_settings(quant=quant, **(ODD if is_odd else {})))
        ncf, reference = read_ncf(tmp_path / "synth.ncf"), ReferenceModel(tmp_path / "synth.gguf")
        assert ncf.manifest.layout is Layout.BUNDLES
        for layer_id in range(2):
            for role in FED:
                name = f"blk.{layer_id}.{role}.weight"
                twins = reference.weights[name]
                expected = twins.T if role == "ffn_down" else twins
                assert np.array_equal(bundle_values(ncf, name), expected), name

    @pytest.mark.parametrize("quant", CODINGS)
    @pytest.mark.parametrize("shape", ["bamboo-7b", "mistral-7b"])
    def test_tiles_are_the_converted_twins(self, quant: str, shape: str, tmp_path: Path) -> None:
        write_synth(tmp_path, small_settings(shape, quant=quant, layout=Layout.TILES))
        convert(tmp_path / "synth.gguf", tmp_path / "converted.ncf", layout=Layout.TILES)
        own, converted = read_ncf(tmp_path / "synth.ncf"), read_ncf(tmp_path / "converted.ncf")
        for section, other in zip(own.sections, converted.sections, strict=True):
            assert np.array_equal(section.checksums, other.checksums), section.name

    def test_fixed_sections_do_not_depend_on_the_layout(self, tmp_path: Path) -> None:
        checksums = []
        for layout in Layout:
            write_synth(tmp_path, small_settings(layout=layout), twin=False, force=True)
            checksums.append(read_ncf(tmp_path / "synth.ncf").section("fixed").checksums)
        assert np.array_equal(*checksums)

    def test_hot_first_moves_neurons(self, tmp_path: Path) -> None:
        (tmp_path / "hot").mkdir()
        write_synth(tmp_path, twin=False)
        write_synth(tmp_path / "hot", small_settings(is_hot_first=True), twin=False)
        plain, hot = read_ncf(tmp_path / "synth.ncf"), read_ncf(tmp_path / "hot" / "synth.ncf")
        for layer_id in range(2):
            ids = hot.layer_section(layer_id).neuron_ids
            assert ids is not None and not np.array_equal(ids, np.arange(len(ids)))
            for role in FED:
                name = f"blk.{layer_id}.{role}.weight"
                assert np.array_equal(stored(hot, name), stored(plain, name)[ids])
            gate = bundle_values(hot, f"blk.{layer_id}.ffn_gate.weight")
            assert np.all(np.diff(gate[:, 0]) <= 0), "thresholds rise"

    @pytest.mark.parametrize("name", GOLDEN)
    def test_weights_are_those_of_this_recipe(self, name: str, tmp_path: Path) -> None:
        """However the file is cut; other bytes need another name in `write.RECIPE`."""
        write_synth(tmp_path, small_settings(**ODD, layout=Layout.TILES))
        ncf, header = read_ncf(tmp_path / "synth.ncf"), read_header(tmp_path / "synth.gguf")
        starts = {"synth.ncf": ncf.data_offset, "synth.gguf": header.data_offset}
        data = (tmp_path / name).read_bytes()[starts[name] :]
        assert hashlib.sha256(data).hexdigest()[:16] == GOLDEN[name]


class TestSpectrum:
    @pytest.mark.parametrize("quant", CODINGS)
    def test_what_is_written_to_the_stream_falls_in_size(self, quant: str, tmp_path: Path) -> None:
        """From one block of columns to the next; nothing is added to the constant."""
        settings = small_settings(quant=quant)
        write_synth(tmp_path, settings)
        weights = ReferenceModel(tmp_path / "synth.gguf").weights
        num_blocks = settings.spec.d_model // BLOCK_COLS
        expected = block_variances(num_blocks - 1)
        written = {
            "token_embd.weight": weights["token_embd.weight"].T,
            "blk.1.attn_output.weight": weights["blk.1.attn_output.weight"],
            "blk.1.ffn_down.weight": weights["blk.1.ffn_down.weight"],
        }
        for name, outputs in written.items():
            constant = 1.0 if name.startswith("token") else 0.0
            assert outputs[:BLOCK_COLS] == pytest.approx(constant, abs=1e-3), name
            variances = np.square(outputs).reshape(num_blocks, -1).mean(axis=1)[1:]
            assert variances / variances.mean() == pytest.approx(expected, rel=0.25), name

    def test_what_reads_the_stream_treats_columns_alike(self, tmp_path: Path) -> None:
        write_synth(tmp_path)
        weights = ReferenceModel(tmp_path / "synth.gguf").weights
        for name in ("output.weight", *(f"blk.0.{role}.weight" for role in READ)):
            variances = np.square(weights[name]).mean(axis=0)[BLOCK_COLS:]
            by_block = variances.reshape(-1, BLOCK_COLS).mean(axis=1)
            assert by_block / by_block.mean() == pytest.approx(1.0, abs=0.15), name


class TestDeterminism:
    def test_same_seed_gives_same_bytes(self, tmp_path: Path) -> None:
        digests = []
        for seed in (5, 5, 6):
            write_synth(tmp_path, small_settings(seed=seed), force=True)
            digests.append([digest(tmp_path / f"synth.{end}") for end in ("ncf", "gguf")])
        assert digests[0] == digests[1]
        assert not set(digests[0]) & set(digests[2])

    @pytest.mark.parametrize("num_threads", [1, 3])
    def test_threads_do_not_show(
        self, num_threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        cut_small(monkeypatch)
        write_synth(tmp_path)
        before = digest(tmp_path / "synth.ncf")
        monkeypatch.setattr(pieces, "usable_cores", lambda: list(range(num_threads)))
        write_synth(tmp_path, force=True)
        assert digest(tmp_path / "synth.ncf") == before


class TestOutputs:
    def test_same_files_are_left_alone(self, tmp_path: Path) -> None:
        write_synth(tmp_path)
        before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
        assert [report.was_there for report in write_synth(tmp_path)] == [True, True]
        assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before

    @pytest.mark.parametrize("name", ["synth.ncf", "synth.gguf"])
    def test_other_file_is_kept_and_nothing_written(self, name: str, tmp_path: Path) -> None:
        (tmp_path / name).write_bytes(b"something else")
        with pytest.raises(ConfigError, match=f"{name}: exists and holds something else.*--force"):
            write_synth(tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == [name]
        assert (tmp_path / name).read_bytes() == b"something else"
        write_synth(tmp_path, force=True)
        read_ncf(tmp_path / "synth.ncf").check_all()
        assert describe(read_header(tmp_path / "synth.gguf")).num_layers == 2

    @pytest.mark.parametrize(
        "changes", [{"seed": 1}, {"sparsity": 0.8}, {"quant": "q8"}, {"num_layers": 1}]
    )
    def test_other_settings_are_another_file(
        self, changes: dict[str, float], tmp_path: Path
    ) -> None:
        write_synth(tmp_path)
        with pytest.raises(ConfigError, match="something else"):
            write_synth(tmp_path, small_settings(**changes))

    def test_room_for_both_is_asked_for_before(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        reports = write_synth(tmp_path)
        total = sum(report.file_bytes for report in reports)
        for report in reports:
            report.output.unlink()

        class Space:
            f_bavail, f_frsize = total - 1, 1

        monkeypatch.setattr("polyneuron.io.piece_writer.os.statvfs", lambda path: Space)
        with pytest.raises(ConfigError, match=r"synth\.gguf: needs .* GiB, .* GiB free"):
            write_synth(tmp_path)
        assert list(tmp_path.iterdir()) == []

    def test_twin_needs_a_name_of_its_own(self, tmp_path: Path) -> None:
        path = tmp_path / "synth.ncf"
        with pytest.raises(ConfigError, match="the same file as --output"):
            list(synthesize(small_settings(), path, tmp_path / "." / "synth.ncf"))

    def test_folder_must_be_there(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="no such folder"):
            write_synth(tmp_path / "missing")


class TestRuns:
    """What reads the files computes what they say."""

    @pytest.mark.parametrize(
        ("shape", "layout"),
        [("mistral-7b", Layout.TILES), ("bamboo-7b", Layout.TILES), ("bamboo-7b", Layout.BUNDLES)],
    )
    def test_engine_computes_what_the_twin_says(
        self, shape: str, layout: Layout, tmp_path: Path
    ) -> None:
        write_synth(tmp_path, small_settings(shape, layout=layout))
        prompt = list(range(3, 43))
        with LocalEngine(tmp_path / "synth.ncf") as engine:
            result = engine.generate(prompt, 1)
        expected = ReferenceModel(tmp_path / "synth.gguf").logits(np.array(prompt))[-1]
        assert np.isfinite(result.logits[0]).all()
        error = np.abs(result.logits[0] - expected).max()
        assert error < 0.08 * np.abs(expected).max()  # activations have 8 bits

    @pytest.mark.parametrize("shape", ["mistral-7b", "smollm2-135m", "bamboo-7b"])
    def test_stream_and_logits_stay_bounded(self, shape: str, tmp_path: Path) -> None:
        write_synth(tmp_path, small_settings(shape, num_layers=8))
        prompt = np.random.default_rng(0).integers(3, 512, 64)
        logits = ReferenceModel(tmp_path / "synth.gguf").logits(prompt)
        assert 1.0 < logits.std() < 8.0
        assert logits.std(axis=0).mean() > 0.5, "logits differ from token to token"


MAX_GROWTH_MIB = 96
PROGRAM = """
import resource, sys
from pathlib import Path
from polyneuron.synth.shapes import shape_spec
from polyneuron.synth.spectrum import block_variances
from polyneuron.synth.write import SynthSettings, synthesize
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
spec = shape_spec("bamboo-7b", d_model=1024, d_ff=4096, num_heads=8)
before = peak()
folder = Path(sys.argv[1])
reports = list(synthesize(SynthSettings(spec), folder / "big.ncf", folder / "big.gguf"))
print(peak() - before, sum(report.file_bytes for report in reports) >> 20)
"""


def test_memory_is_far_below_the_files_size(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    growth, written = map(int, done.stdout.split())
    assert growth < MAX_GROWTH_MIB < written // 4
