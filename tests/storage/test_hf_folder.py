"""A Hugging Face folder is the GGUF of the same weights: same description, bytes and logits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from polyneuron.errors import ConfigError
from polyneuron.io.ncf_format import Layout
from polyneuron.io.ncf_reader import read_ncf
from polyneuron.kernels.quant import StorageType
from polyneuron.model.architecture import describe
from polyneuron.model.chat_template import ChatTemplate
from polyneuron.model.convert import convert
from polyneuron.model.model_cache import cached_ncf
from polyneuron.model.model_header import read_model_header
from polyneuron.model.ncf_plan import WEIGHT_TYPES, choose_layout
from polyneuron.model.tokenizer import Tokenizer
from polyneuron.planning.source import open_source
from tests.support.families import FAMILY_CASES, gguf_path, golden_path
from tests.support.hf_folders import write_hf_folder
from tests.support.local_engine import LocalEngine
from tests.support.reference_model import ReferenceModel
from tests.support.tiny_gguf import TinyModel, random_weights, write_tiny_gguf

CASES = [case for case in FAMILY_CASES if case != "llama_relu_no_gate"]  # no checkpoint is so
TEXTS = ("hello world, and the rest", "12 of 345", "a  b\n\nc\tdöß", "<|im_start|>x<|im_end|> y")
TOLERANCE = 1e-3


def folder_of(folder: Path, case: str, dtype: str = "F32") -> Path:
    """A folder of a stored case's weights."""
    model = ReferenceModel(gguf_path(case), np.float32)
    return write_hf_folder(folder / case, model.spec, model.weights, dtype=dtype)


@pytest.mark.parametrize("case", CASES)
class TestEveryFamily:
    def test_description_is_the_ggufs(self, tmp_path: Path, case: str) -> None:
        found = describe(read_model_header(folder_of(tmp_path, case)))
        expected = replace(FAMILY_CASES[case].spec(), name=case)
        norm_eps = np.float32(found.norm_eps)
        assert replace(found, norm_eps=float(norm_eps), rope=expected.rope) == expected
        assert found.rope.scaling is expected.rope.scaling
        assert np.allclose(found.rope.frequency_factors, expected.rope.frequency_factors, rtol=1e-7)

    def test_logits_equal_the_ggufs_and_the_golden(self, tmp_path: Path, case: str) -> None:
        model = replace(FAMILY_CASES[case], tensor_type="F32", embedding_type="F32")
        weights = ReferenceModel(gguf_path(case), np.float32).weights
        gguf = write_tiny_gguf(tmp_path / "m.gguf", model, weights=weights)
        folder = folder_of(tmp_path, case)
        with np.load(golden_path(case)) as golden:
            tokens, expected = golden["token_ids"].tolist(), golden["logits"]
        last = []
        for path in (gguf, folder):
            with LocalEngine(path) as engine:
                last.append(engine.generate(tokens, 4))
        assert last[0].tokens == last[1].tokens
        assert all((a == b).all() for a, b in zip(last[0].logits, last[1].logits, strict=True))
        reference = ReferenceModel(folder, np.float32)
        assert np.abs(reference.logits(np.array(tokens)) - expected).max() < TOLERANCE
        reference.cache_dtype = np.float16  # as the engine's
        nearer = reference.logits(np.array(tokens))[-1]
        assert np.abs(last[1].logits[0] - nearer).max() < TOLERANCE * np.abs(nearer).max()

    @pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
    def test_conversion_is_the_ggufs(self, tmp_path: Path, case: str, dtype: str) -> None:
        """Every section, byte for byte."""
        model = replace(FAMILY_CASES[case], tensor_type=dtype, embedding_type=dtype)
        weights = ReferenceModel(gguf_path(case), np.float32).weights
        weights = {name: _rounded(values, dtype) for name, values in weights.items()}
        gguf = write_tiny_gguf(tmp_path / "m.gguf", model, weights=weights)
        folder = write_hf_folder(tmp_path / case, model.spec(), weights, dtype=dtype)
        wanted = choose_layout(describe(read_model_header(folder)))
        found = []
        for name, source in (("gguf", gguf), ("folder", folder)):
            convert(source, tmp_path / f"{name}.ncf", layout=wanted)
            ncf = read_ncf(tmp_path / f"{name}.ncf")
            found.append((tmp_path / f"{name}.ncf").read_bytes()[ncf.data_offset :])
            ncf.check_all()
        assert found[0] == found[1]


def _rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    """What a type holds, BF16 cut off: a GGUF's vectors are F32, a folder's as its matrices."""
    if dtype == "F16":
        return values.astype(np.float16).astype(np.float32)
    if dtype == "F32":
        return values
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32) & np.uint32(0xFFFF0000)
    return bits.view(np.float32)


@pytest.mark.parametrize("case", [c for c in CASES if c not in ("bamboo", "turbosparsemixtral")])
def test_transformers_reads_the_same_folder(tmp_path: Path, case: str) -> None:
    """Logits and greedy tokens by `transformers`, of the folder itself and of one it has saved."""
    torch = pytest.importorskip("torch", reason="extra `reference` is not installed")
    transformers = pytest.importorskip("transformers", reason="extra `reference` is not installed")
    spec = FAMILY_CASES[case].spec()
    weights = random_weights(replace(FAMILY_CASES[case], seed=1000))
    folder = write_hf_folder(tmp_path / case, spec, weights)
    kind = transformers.AutoModelForCausalLM
    model = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    model.save_pretrained(tmp_path / "saved", max_shard_size="40KB")
    for path in folder.glob("tokenizer*"):
        (tmp_path / "saved" / path.name).write_bytes(path.read_bytes())
    prompt = np.random.default_rng(1).integers(3, spec.vocab_size, 40).tolist()
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(4):
            logits = model(torch.tensor([tokens])).logits[0, -1].numpy()
            tokens.append(int(logits.argmax()))
            if len(tokens) == 41:
                expected = logits
    for source in (folder, tmp_path / "saved"):
        found = ReferenceModel(source, np.float32).logits(np.array(prompt))[-1]
        assert np.abs(found - expected).max() < TOLERANCE * np.abs(expected).max()
        with LocalEngine(source) as engine:
            assert engine.generate(prompt, 4).tokens == tokens[40:]


class TestTokens:
    def test_text_is_cut_as_the_gguf_says(self, tmp_path: Path) -> None:
        model = TinyModel()
        gguf = read_model_header(write_tiny_gguf(tmp_path / "m.gguf", model))
        folder = write_hf_folder(tmp_path / "hf", model.spec(), random_weights(model))
        one, other = (
            Tokenizer.from_metadata(header.metadata) for header in (gguf, read_model_header(folder))
        )
        for text in TEXTS:
            for parses in (True, False):
                ids = one.encode(text, parse_special=parses)
                assert other.encode(text, parse_special=parses) == ids
            assert other.decode(one.encode(text)) == text
        assert other.end_ids == {0, 2}
        assert (other.bos_id, other.eos_id, other.add_bos) == (1, 2, False)

    def test_template_is_the_folders(self, tmp_path: Path) -> None:
        model = TinyModel()
        folder = write_hf_folder(tmp_path / "hf", model.spec(), random_weights(model))
        metadata = read_model_header(folder).metadata
        messages = [{"role": "user", "content": "hi <|im_end|>"}]
        tokenizer = Tokenizer.from_metadata(metadata)
        ids = ChatTemplate.from_metadata(metadata).encode_chat(tokenizer, messages)
        assert ids.count(2) == 1  # the content's is text
        assert "<|im_start|>user" in tokenizer.decode(ids)
        (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] }}!")
        template = ChatTemplate.from_metadata(read_model_header(folder).metadata)
        assert template.render(messages) == "hi <|im_end|>!"

    def test_rows_without_a_token_are_filled(self, tmp_path: Path) -> None:
        model = TinyModel()
        weights = dict(random_weights(model))
        weights["token_embd.weight"] = np.pad(weights["token_embd.weight"], ((0, 21), (0, 0)))
        spec = replace(model.spec(), vocab_size=320)
        header = read_model_header(write_hf_folder(tmp_path / "hf", spec, weights))
        assert describe(header).vocab_size == 320
        tokenizer = Tokenizer.from_metadata(header.metadata)
        assert tokenizer.vocab_size == 320
        assert tokenizer.token_text(319) == "[PAD319]"
        assert max(tokenizer.encode("[PAD319] and the")) < 299


class TestConverted:
    def test_converted_folder_runs_and_cuts_text_the_same(self, tmp_path: Path) -> None:
        folder = folder_of(tmp_path, "bamboo")
        output = tmp_path / "b.ncf"
        convert(folder, output, layout=Layout.BUNDLES)
        assert read_ncf(output).manifest.source.format == "safetensors"
        one, other = open_source(folder), open_source(output)
        assert one.spec == other.spec
        tokenizers = [Tokenizer.from_metadata(source.metadata) for source in (one, other)]
        prompt = [tokenizer.encode(TEXTS[0]) for tokenizer in tokenizers]
        assert prompt[0] == prompt[1]
        runs = []
        for path in (folder, output):
            with LocalEngine(path) as engine:
                runs.append(engine.generate(prompt[0], 6))
        assert runs[0].tokens == runs[1].tokens

    def test_changed_shard_is_another_model(self, tmp_path: Path) -> None:
        folder = folder_of(tmp_path, "qwen2")
        first = cached_ncf(folder, folder=tmp_path / "cache")
        assert first.name.startswith("qwen2-")
        assert cached_ncf(folder, folder=tmp_path / "cache") == first
        shard = folder / "model-00002-of-00003.safetensors"
        raw = bytearray(shard.read_bytes())
        raw[-1] ^= 1
        shard.write_bytes(raw)
        assert cached_ncf(folder, folder=tmp_path / "cache") != first


class TestWeightTypes:
    @pytest.mark.parametrize("layout", [Layout.TILES, Layout.BUNDLES])
    @pytest.mark.parametrize("kind", WEIGHT_TYPES)
    def test_floats_are_stored_as_asked(
        self, tmp_path: Path, layout: Layout, kind: StorageType
    ) -> None:
        model = TinyModel(family="bamboo", d_ff=96, tied_head=False)
        folder = write_hf_folder(tmp_path / "hf", model.spec(), random_weights(model), dtype="BF16")
        convert(folder, tmp_path / "o.ncf", layout=layout, weights=kind)
        ncf = read_ncf(tmp_path / "o.ncf")
        for tensor in ncf.tensors:
            is_table = tensor.name in ("token_embd.weight", "output.weight")
            wanted = StorageType.Q8 if is_table and kind is StorageType.Q4 else kind
            assert tensor.storage is (None if "norm" in tensor.name else wanted)
            is_rounded = tensor.storage is not None and tensor.storage.is_quantised
            assert (tensor.rms_error > 1e-6) == is_rounded  # in f16 only the very small
            assert tensor.rms_error < (0.12 if kind is StorageType.Q4 else 0.01)
        ncf.check_all()

    def test_quantised_by_four_or_eight_bits_still_runs(self, tmp_path: Path) -> None:
        folder = folder_of(tmp_path, "llama_untied")
        logits = []
        for kind in (StorageType.F32, StorageType.Q8):
            convert(folder, tmp_path / f"{kind}.ncf", layout=Layout.TILES, weights=kind)
            with LocalEngine(tmp_path / f"{kind}.ncf") as engine:
                logits.append(engine.generate([5, 6, 7], 1).logits[0])
        difference = np.linalg.norm(logits[0] - logits[1]) / np.linalg.norm(logits[0])
        assert 0 < difference < 0.05

    def test_experts_keep_their_routers(self, tmp_path: Path) -> None:
        folder = folder_of(tmp_path, "qwen3moe", "F16")
        convert(folder, tmp_path / "o.ncf", layout=Layout.BUNDLES, weights=StorageType.Q4)
        tensors = {tensor.name: tensor for tensor in read_ncf(tmp_path / "o.ncf").tensors}
        assert tensors["blk.0.ffn_gate_inp.weight"].storage is StorageType.F16
        assert tensors["blk.0.ffn_down_exps.weight"].storage is StorageType.Q4

    def test_rows_that_fill_no_blocks_keep_their_floats(self, tmp_path: Path) -> None:
        model = TinyModel(d_model=48, num_heads=3, num_kv_heads=3, d_ff=64)
        folder = write_hf_folder(tmp_path / "hf", model.spec(), random_weights(model))
        convert(folder, tmp_path / "o.ncf", layout=Layout.TILES, weights=StorageType.Q8)
        tensors = {tensor.name: tensor for tensor in read_ncf(tmp_path / "o.ncf").tensors}
        assert tensors["blk.0.ffn_up.weight"].storage is StorageType.F32
        assert tensors["blk.0.ffn_down.weight"].storage is StorageType.Q8

    def test_quantised_source_is_refused(self, tmp_path: Path) -> None:
        model = TinyModel(tensor_type="Q4_0")
        path = write_tiny_gguf(tmp_path / "m.gguf", model)
        with pytest.raises(ConfigError, match=r"--weights q8: .* is quantised already"):
            convert(path, tmp_path / "o.ncf", weights=StorageType.Q8)
