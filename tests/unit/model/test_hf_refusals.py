"""A folder that cannot be run says what it is, which file or key, and what would work."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polyneuron.errors import FormatError
from polyneuron.model.architecture import FAMILIES, describe
from polyneuron.model.hf_families import HF_FAMILIES
from polyneuron.model.model_header import read_model_header
from tests.support.hf_folders import hf_weights, write_hf_folder, write_shards
from tests.support.predictor_sources import write_safetensors
from tests.support.tiny_gguf import TinyModel, random_weights

MODEL = TinyModel()
MIXTURE = TinyModel(family="qwen3moe", d_ff=32)
SHARD = "model-00002-of-00003.safetensors"
Change = Callable[[Path], None]


def tiny_folder(folder: Path, model: TinyModel = MODEL, **config: Any) -> Path:
    return write_hf_folder(folder, model.spec(), random_weights(model), config=config)


def refusal(folder: Path) -> str:
    """The one line with which a folder is refused."""
    with pytest.raises(FormatError) as caught:
        describe(read_model_header(folder))
    message = str(caught.value)
    assert str(folder) in message and "\n" not in message
    return message


def without(name: str) -> Change:
    return lambda folder: (folder / name).unlink()


def written(name: str, text: str) -> Change:
    def change(folder: Path) -> None:
        (folder / name).write_text(text)

    return change


def only(*names: str) -> Change:
    """Nothing but config.json and files of these names."""

    def change(folder: Path) -> None:
        for path in folder.iterdir():
            if path.name != "config.json":
                path.unlink()
        for name in names:
            (folder / name).write_text("{}")

    return change


def cut(folder: Path) -> None:
    raw = (folder / SHARD).read_bytes()
    (folder / SHARD).write_bytes(raw[:-10])


FILES: dict[str, tuple[Change, str]] = {
    "config": (without("config.json"), "config.json is missing; fetch it"),
    "config text": (written("config.json", "{"), "config.json: no JSON object, or cut off"),
    "config LFS": (
        written("config.json", "version https://git-lfs.github.com/spec/v1\n"), "git lfs pull"
    ),
    "no model_type": (written("config.json", "{}"), "config.json: model_type is missing"),
    "shard": (without(SHARD), f"of 3 shards 1 missing: {SHARD}; fetch what is missing"),
    "shard cut off": (cut, f"{SHARD}: "),
    "shard LFS": (written(SHARD, "version https://git-lfs.github.com/spec/v1\n"), "not a safetens"),
    "index": (
        without("model.safetensors.index.json"),
        "model.safetensors.index.json is missing, which says what the 3 files hold",
    ),
    "index text": (written("model.safetensors.index.json", "{}"), "has no weight_map"),
    "index outside": (
        written("model.safetensors.index.json", '{"weight_map": {"a": "../b"}}'),
        "names files outside the folder",
    ),
    "index of another": (
        written("model.safetensors.index.json", json.dumps({"weight_map": {"a": SHARD}})),
        f"{SHARD}: lacks tensor 'a'",
    ),
    "pickles": (only("pytorch_model.bin"), "PyTorch pickles (pytorch_model.bin), which are not"),
    "nothing": (only(), "no *.safetensors beside config.json; fetch model.safetensors"),
    "tokenizer": (without("tokenizer.json"), "tokenizer.json is missing"),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_file_is_named(tmp_path: Path, name: str) -> None:
    change, expected = FILES[name]
    folder = tiny_folder(tmp_path / "m")
    change(folder)
    assert expected in refusal(folder)


@pytest.mark.parametrize("kind", ["alone", "with config"])
def test_adapter_names_its_base(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "adapter"
    folder.mkdir()
    text = json.dumps({"base_model_name_or_path": "org/base", "peft_type": "LORA"})
    (folder / "adapter_config.json").write_text(text)
    (folder / "adapter_model.safetensors").write_bytes(b"")
    if kind == "with config":
        (folder / "config.json").write_text("{}")
    message = refusal(folder)
    assert "a LoRA adapter (of 'org/base'), not a model; merge it" in message


LONG = {
    "rope_type": "longrope",
    "original_max_position_embeddings": 64,
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
}
CONFIG: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "mamba", "architectures": ["MambaForCausalLM"]}, "'mamba' ('MambaForCausalLM'"),
    ({"model_type": "bert"}, "'bert' ('TinyForCausalLM') is not supported; supported: llama"),
    ({"hidden_size": None, "rms_norm_eps": None}, "keys missing: hidden_size, rms_norm_eps"),
    ({"hidden_size": "64"}, "hidden_size is '64'; a positive whole number"),
    ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
    ({"head_dim": 1.5}, "head_dim is 1.5"),
    ({"rms_norm_eps": "x"}, "rms_norm_eps is 'x'"),
    ({"rms_norm_eps": True}, "rms_norm_eps is True"),
    ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; supported for this model: silu swish relu"),
    ({"quantization_config": {"quant_method": "gptq"}}, "quantised by 'gptq'; give the BF16"),
    ({"quantization_config": True}, "quantised by None"),
    ({"quantization": {"group_size": 64, "bits": 4}}, "quantised by 'MLX'"),
    ({"architectures": ["LlamaForSequenceClassification"]}, "which gives no text; give one whose"),
    ({"architectures": ["LlamaModel"]}, "architectures is ['LlamaModel']: an embedding model"),
    ({"mlp_bias": True}, "mlp_bias = True is not supported"),
    ({"sliding_window": 64}, "sliding-window attention"),
    ({"rope_parameters": 3}, "rope_parameters is 3; an object"),
    ({"rope_parameters": {"rope_type": "dynamic"}}, "rope_type is 'dynamic'; supported:"),
    ({"rope_parameters": {"rope_type": "longrope"}}, "original_max_position_embeddings is None"),
    ({"rope_parameters": LONG | {"long_factor": None}}, "longrope has no long_factor"),
    ({"rope_parameters": LONG | {"short_mscale": 1.1}}, "short_mscale = 1.1 of longrope"),
    ({"rope_parameters": LONG | {"long_factor": [2.0]}}, "rope_factors_long.weight has shape (1,)"),
    ({"rope_parameters": {"rope_type": "linear"}}, "no positive number"),
    ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "no positive number"),
    ({"rope_parameters": {"rope_theta": "1e4"}}, "rope_theta is '1e4'"),
    ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "mscale": 2.0}}, "mscale = 2.0"),
    ({"tie_word_embeddings": False}, "tie_word_embeddings is false, but no shard holds lm_head"),
    ({"num_key_value_heads": 3}, "cannot share"),
    ({"vocab_size": 300}, "llama.vocab_size is 300, but token_embd.weight has 299 rows"),
    ({"num_hidden_layers": 3}, "tensors missing: blk.2."),
    ({"num_hidden_layers": 1}, "tensors that a llama model does not use"),
    ({"intermediate_size": 128}, "has shape (96, 64), but the metadata ask for (128, 64)"),
]


OTHER_CONFIG: list[tuple[str, dict[str, Any], str]] = [
    ("opt", {"do_layer_norm_before": False}, "do_layer_norm_before = False is not supported"),
    ("opt", {"activation_function": "gelu", "hidden_act": None}, "activation_function is 'gelu'"),
    ("opt", {"ffn_dim": None}, "keys missing: ffn_dim"),
    ("falcon", {"alibi": True}, "alibi = True is not supported"),
    ("falcon", {"parallel_attn": False}, "parallel_attn = False is not supported"),
    ("falcon", {"multi_query": False}, "not 4 groups of 3 x 16"),
    ("falcon", {"activation": "silu"}, "hidden_act is 'silu'; supported for this model: gelu relu"),
    ("falcon", {"hidden_size": "x", "ffn_hidden_size": None}, "keys missing: intermediate_size"),
    ("gemma3", {"model_type": "gemma3"}, "'gemma3' ('TinyForCausalLM') is not supported"),
    ("gemma2", {"attn_logit_softcapping": "50"}, "attn_logit_softcapping is '50'"),
    ("gemma2", {"layer_types": ["full_attention"] * 2, "sliding_window": 9}, ""),
    ("gemma2", {"layer_types": ["full_attention", "sliding_attention"]}, "differs from the family"),
    ("gemma", {"query_pre_attn_scalar": -1}, "query_pre_attn_scalar is -1; a positive number"),
    ("stablelm", {"layer_norm_eps": 0}, "layer_norm_eps is 0"),
]


@pytest.mark.parametrize(("family", "config", "expected"), OTHER_CONFIG)
def test_key_of_other_families_is_named(
    tmp_path: Path, family: str, config: dict[str, Any], expected: str
) -> None:
    folder = tiny_folder(tmp_path / "m", TinyModel(family=family), **config)
    if expected:
        assert expected in refusal(folder)
    else:  # no layer has a window then
        assert describe(read_model_header(folder)).block.window == 0


def test_magnitude_of_longrope_follows_from_contexts(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "m", TinyModel(family="phi3"), rope_parameters=LONG)
    long = describe(read_model_header(folder)).rope.long
    assert long is not None and long.long_factors == (2.0,) * 8
    assert long.magnitude == pytest.approx(math.sqrt(1.0 + math.log(256 / 64) / math.log(64)))


@pytest.mark.parametrize("kv_heads", [1, 4])
def test_falcons_sizes_follow_from_others(tmp_path: Path, kv_heads: int) -> None:
    """As in its first files, where num_kv_heads may be the number of heads and mean nothing."""
    model = TinyModel(family="falcon", num_kv_heads=1, d_ff=256, context_length=2048)
    left_out = {"ffn_hidden_size": None, "head_dim": None, "max_position_embeddings": None}
    folder = tiny_folder(tmp_path / "m", model, num_kv_heads=kv_heads, **left_out)
    spec = describe(read_model_header(folder))
    assert (spec.d_ff, spec.num_kv_heads, spec.context_length) == (256, 1, 2048)


def test_scale_that_is_not_the_heads_is_taken(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "m", TinyModel(family="gemma2"), query_pre_attn_scalar=25)
    assert describe(read_model_header(folder)).attention_scale == 0.2


@pytest.mark.parametrize(("config", "expected"), CONFIG)
def test_key_is_named(tmp_path: Path, config: dict[str, Any], expected: str) -> None:
    assert expected in refusal(tiny_folder(tmp_path / "m", **config))


class TestTensors:
    def _folder(self, folder: Path, model: TinyModel, **arrays: Any) -> Path:
        """One file; `arrays` replace tensors, None takes one out."""
        found = dict(hf_weights(model.spec(), random_weights(model))) | arrays
        tiny_folder(folder, model)
        (folder / "model.safetensors.index.json").unlink()
        write_shards(folder, {n: v for n, v in found.items() if v is not None}, "F32", 1)
        return folder

    @pytest.mark.parametrize("name", ["model.layers.0.self_attn.rotary.weight", "x", ".", "a.bias"])
    def test_stranger_is_named(self, tmp_path: Path, name: str) -> None:
        folder = self._folder(tmp_path / "m", MODEL, **{name: np.ones(3, np.float32)})
        assert repr(name) in refusal(folder)

    def test_two_names_of_one_tensor_are_refused(self, tmp_path: Path) -> None:
        model = TinyModel(family="falcon", num_kv_heads=1)
        name = "transformer.h.0.ln_mlp.weight"
        folder = self._folder(tmp_path / "m", model, **{name: np.ones(64, np.float32)})
        assert "is blk.0.attn_norm.weight, as another one is" in refusal(folder)

    def test_what_is_made_anew_is_passed_over(self, tmp_path: Path) -> None:
        made = {
            "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(3, np.float32),
            "model.layers.0.mlp.predictor.fc1.weight": np.ones((3, 64), np.float32),
        }
        assert describe(read_model_header(self._folder(tmp_path / "m", MODEL, **made)))

    def test_missing_expert_is_named(self, tmp_path: Path) -> None:
        name = "model.layers.1.mlp.experts.2.up_proj.weight"
        message = refusal(self._folder(tmp_path / "m", MIXTURE, **{name: None}))
        assert "expert 2 of blk.1.ffn_up_exps.weight is missing" in message

    def test_last_expert_is_missed(self, tmp_path: Path) -> None:
        name = "model.layers.1.mlp.experts.3.up_proj.weight"
        message = refusal(self._folder(tmp_path / "m", MIXTURE, **{name: None}))
        assert "blk.1.ffn_up_exps.weight has shape (3, 32, 64)" in message

    def test_expert_of_another_shape_is_named(self, tmp_path: Path) -> None:
        name = "model.layers.1.mlp.experts.2.up_proj.weight"
        folder = self._folder(tmp_path / "m", MIXTURE, **{name: np.ones((31, 64), np.float32)})
        assert f"tensor '{name}' has another shape" in refusal(folder)

    def test_type_is_named(self, tmp_path: Path) -> None:
        folder = tiny_folder(tmp_path / "m")
        raw = (folder / SHARD).read_bytes()
        (length,) = struct.unpack("<Q", raw[:8])
        head = raw[8 : 8 + length].replace(b'"F32"', b'"I32"', 1)
        (folder / SHARD).write_bytes(raw[:8] + head + raw[8 + length :])
        assert "has type 'I32'; supported: F32 F16 BF16; give the checkpoint" in refusal(folder)

    def test_head_of_a_tied_model_is_the_embedding(self, tmp_path: Path) -> None:
        head = np.zeros((299, 64), np.float32)
        folder = self._folder(tmp_path / "m", MODEL, **{"lm_head.weight": head})
        assert describe(read_model_header(folder)).tied_head

    def test_one_file_of_another_name_is_the_model(self, tmp_path: Path) -> None:
        folder = self._folder(tmp_path / "m", MODEL)
        for path in folder.glob("model-*"):
            path.unlink()
        (folder / "model.safetensors").rename(folder / "weights.safetensors")
        assert describe(read_model_header(folder)) == replace(MODEL.spec(), name="m", norm_eps=1e-5)

    def test_empty_file_is_no_model(self, tmp_path: Path) -> None:
        folder = self._folder(tmp_path / "m", MODEL)
        write_safetensors(folder / "model.safetensors", {})
        assert "no shard holds the embedding" in refusal(folder)


class TestTable:
    def test_rows_name_known_families(self) -> None:
        """Some families come in GGUFs only."""
        found = {row.family for row in HF_FAMILIES.values()}
        assert found <= set(FAMILIES)
        assert set(FAMILIES) - found <= {"smallthinker"}

    @pytest.mark.parametrize("model_type", HF_FAMILIES)
    def test_roles_are_the_ggufs(self, model_type: str) -> None:
        """No row maps to a name that a GGUF of its family never has."""
        row = HF_FAMILIES[model_type]
        assert not row.required.keys() & row.optional.keys()
        for role in (*row.interleaved, *row.adds_one):
            assert role in {*row.layer.values(), *row.outside.values()}
