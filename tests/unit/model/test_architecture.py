"""Descriptions of good files, and refusals that say what a bad one is and lacks."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter

from polyneuron.errors import FormatError, UnsupportedError
from polyneuron.io.gguf_file import read_header
from polyneuron.kernels.gemv import FeedForwardKind
from polyneuron.model.architecture import FAMILIES, SUPPORTED_FAMILIES, describe
from polyneuron.model.spec import ModelSpec, RopeScaling, tensor_map, tensor_shapes
from tests.support.tiny_gguf import TinyModel, random_weights, write_tiny_gguf
from tests.support.tiny_tokenizer import spm_vocabulary


def describe_file(path: Path, model: TinyModel | None = None, **changes: Any) -> ModelSpec:
    """Write a tiny model with changes and describe it."""
    return describe(read_header(write_tiny_gguf(path / "tiny.gguf", model, **changes)))


class TestGoodFiles:
    @pytest.mark.parametrize("scaling", RopeScaling)
    @pytest.mark.parametrize("tied_head", [True, False])
    @pytest.mark.parametrize("family", FAMILIES)
    def test_description_is_what_was_written(
        self, tmp_path: Path, family: str, tied_head: bool, scaling: RopeScaling
    ) -> None:
        model = TinyModel(family=family, tied_head=tied_head, rope_scaling=scaling)
        assert describe_file(tmp_path, model) == model.spec()

    def test_optional_keys_have_defaults(self, tmp_path: Path) -> None:
        dropped = ["attention.head_count_kv", "attention.key_length", "attention.value_length"]
        dropped += ["rope.freq_base", "vocab_size"]
        model = TinyModel(num_kv_heads=4)
        metadata: dict[str, Any] = {f"llama.{key}": None for key in dropped}
        assert describe_file(tmp_path, model, metadata=metadata) == model.spec()

    def test_equal_values_a_layer_are_one_value(self, tmp_path: Path) -> None:
        metadata = {"llama.attention.head_count_kv": [2, 2]}
        assert describe_file(tmp_path, metadata=metadata).num_kv_heads == 2

    def test_spm_vocabulary_counts(self, tmp_path: Path) -> None:
        model = TinyModel(vocabulary=spm_vocabulary())
        assert describe_file(tmp_path, model).vocab_size == len(model.vocabulary.tokens)

    def test_sparse_threshold_means_relu(self, tmp_path: Path) -> None:
        spec = describe_file(tmp_path, metadata={"powerinfer.sparse_threshold": 0.0})
        assert spec.feed_forward is FeedForwardKind.REGLU

    def test_window_as_long_as_the_context_is_no_window(self, tmp_path: Path) -> None:
        model = TinyModel(family="llama")
        metadata = {"llama.attention.sliding_window": 256}
        assert describe_file(tmp_path, model, metadata=metadata) == model.spec()

    def test_file_without_a_window_has_global_layers(self, tmp_path: Path) -> None:
        metadata: dict[str, Any] = {"gemma3.attention.sliding_window": None}
        block = describe_file(tmp_path, TinyModel(family="gemma3"), metadata=metadata).block
        assert (block.window, block.local_rope_base) == (0, 0.0)
        assert block.window_of(0) == 0

    def test_gemma2_has_defaults(self, tmp_path: Path) -> None:
        keys = ("attention.sliding_window", "attn_logit_softcapping", "final_logit_softcapping")
        metadata: dict[str, Any] = {f"gemma2.{key}": None for key in keys}
        block = describe_file(tmp_path, TinyModel(family="gemma2"), metadata=metadata).block
        assert (block.window, block.attention_cap, block.logit_cap) == (4096, 50.0, 30.0)

    @pytest.mark.parametrize(
        ("family", "pattern"), [("gemma2", 2), ("gemma3", [True] * 5 + [False])]
    )
    def test_pattern_of_windows_may_be_told(
        self, tmp_path: Path, family: str, pattern: object
    ) -> None:
        model = TinyModel(family=family, num_layers=6)
        metadata = {f"{family}.attention.sliding_window_pattern": pattern}
        assert describe_file(tmp_path, model, metadata=metadata) == model.spec()
        assert [model.spec().block.window_of(i) for i in range(6)].count(0) == 6 // (
            model.spec().block.window_period
        )

    def test_27b_scores_are_those_of_narrower_heads(self, tmp_path: Path) -> None:
        """Which only its number of layers tells."""
        wide = {"num_heads": 2, "num_kv_heads": 2, "head_dim": 16, "d_model": 64, "d_ff": 32}
        model = TinyModel(family="gemma2", num_layers=46, **wide)
        assert describe_file(tmp_path, model).attention_scale == (64 / 2) ** -0.5
        assert replace(model, num_layers=45).spec().attention_scale == 16**-0.5

    def test_stablelm_key_of_parallel_residual_says_nothing(self, tmp_path: Path) -> None:
        model = TinyModel(family="stablelm")
        metadata = {"stablelm.use_parallel_residual": True}
        assert describe_file(tmp_path, model, metadata=metadata) == model.spec()

    def test_learned_positions_bound_the_context(self, tmp_path: Path) -> None:
        """PowerInfer's files count all rows as context, and say nothing of what norms add."""
        model = TinyModel(family="opt", context_length=254)
        metadata = {
            "opt.context_length": 256,
            "opt.attention.layer_norm_epsilon": None,
            "opt.attention.head_count_kv": None,
        }
        model = replace(model, num_kv_heads=4)
        found = describe_file(tmp_path, model, metadata=metadata)
        assert found == replace(model.spec(), norm_eps=1e-5)

    def test_relu_falcon_is_told_by_its_threshold(self, tmp_path: Path) -> None:
        model = TinyModel(family="falcon", num_kv_heads=1)
        spec = describe_file(tmp_path, model, metadata={"powerinfer.sparse_threshold": 0.0})
        assert spec.feed_forward is FeedForwardKind.RELU

    def test_tensor_map_names_every_role(self) -> None:
        spec = TinyModel(family="qwen3").spec()
        names = tensor_map(spec)
        assert names.output == names.token_embd
        assert names.layers[1].attn_q_norm == "blk.1.attn_q_norm.weight"
        assert names.layers[1].attn_q_bias is None
        assert set(tensor_shapes(spec)) == set(random_weights(TinyModel(family="qwen3")))


def refusal(path: Path, model: TinyModel | None = None, **changes: Any) -> str:
    """The one line with which a changed tiny model is refused."""
    with pytest.raises(FormatError) as caught:
        describe_file(path, model, **changes)
    message = str(caught.value)
    assert "tiny.gguf" in message
    assert "\n" not in message
    return message


class TestRefusals:
    @pytest.mark.parametrize(
        "key",
        [
            "block_count",
            "context_length",
            "embedding_length",
            "feed_forward_length",
            "attention.head_count",
            "attention.layer_norm_rms_epsilon",
        ],
    )
    def test_missing_key_is_named(self, tmp_path: Path, key: str) -> None:
        assert f"missing: llama.{key}" in refusal(tmp_path, metadata={f"llama.{key}": None})

    def test_missing_keys_are_listed(self, tmp_path: Path) -> None:
        dropped = {"llama.block_count": None, "llama.context_length": None}
        message = refusal(tmp_path, metadata=dropped)
        assert "llama.block_count, llama.context_length" in message

    def test_missing_tensor_is_named(self, tmp_path: Path) -> None:
        model = TinyModel(num_layers=3)
        message = refusal(tmp_path, model, skip_tensors=("blk.2.ffn_down.weight",))
        assert message.endswith("tensors missing: blk.2.ffn_down.weight")

    def test_many_missing_tensors_are_counted(self, tmp_path: Path) -> None:
        skipped = tuple(name for name in random_weights(TinyModel()) if ".ffn_" in name)
        assert "and 3 more" in refusal(tmp_path, skip_tensors=skipped)

    def test_missing_embedding_is_named(self, tmp_path: Path) -> None:
        message = refusal(tmp_path, skip_tensors=("token_embd.weight",))
        assert "missing: token_embd.weight" in message

    def test_vocabulary_and_embedding_must_agree(self, tmp_path: Path) -> None:
        message = refusal(tmp_path, metadata={"llama.vocab_size": 300})
        assert "llama.vocab_size is 300, but token_embd.weight has 299 rows" in message
        weights = random_weights(TinyModel())
        weights["token_embd.weight"] = weights["token_embd.weight"][:200]
        message = refusal(tmp_path, weights=weights, metadata={"llama.vocab_size": None})
        assert "tokenizer.ggml.tokens is 299, but token_embd.weight has 200 rows" in message

    def test_wrong_shape_names_both(self, tmp_path: Path) -> None:
        weights = random_weights(TinyModel())
        weights["blk.1.ffn_up.weight"] = weights["blk.1.ffn_up.weight"][:64]
        message = refusal(tmp_path, weights=weights)
        assert (
            "blk.1.ffn_up.weight has shape (64, 64), but the metadata ask for (96, 64)" in message
        )

    def test_tensor_nobody_would_use_is_refused(self, tmp_path: Path) -> None:
        weights = random_weights(TinyModel())
        weights["blk.0.ffn_up.bias"] = np.zeros(96, np.float32)
        assert "'blk.0.ffn_up.bias'" in refusal(tmp_path, weights=weights)

    def test_unknown_architecture_lists_the_supported(self, tmp_path: Path) -> None:
        message = refusal(tmp_path, metadata={"general.architecture": "mamba"})
        assert "'mamba'" in message
        assert SUPPORTED_FAMILIES in message

    @pytest.mark.parametrize(
        ("metadata", "expected"),
        [
            ({"general.architecture": "clip"}, "multimodal projector"),
            ({"general.type": "mmproj"}, "multimodal projector"),
            ({"general.type": "adapter"}, "LoRA adapter"),
            ({"general.type": "imatrix"}, "importance matrix"),
            ({"general.architecture": None}, "missing: general.architecture"),
            ({"general.architecture": ""}, "missing: general.architecture"),
            ({"llama.expert_group_count": 8}, "llama.expert_group_count"),
            ({"llama.attention.sliding_window": 64}, "sliding-window"),
            ({"llama.attention.value_length": 8}, "attention.value_length"),
            ({"llama.attention.head_count_kv": [2, 1]}, "differs between layers"),
            ({"llama.attention.head_count_kv": 3}, "cannot share"),
            ({"llama.attention.scale": 0.5}, "attention.scale"),
            ({"llama.logit_scale": 2.0}, "logit_scale"),
            ({"llama.rope.scaling.type": "dynamic"}, "'dynamic'; supported: none linear yarn"),
            ({"llama.rope.dimension_count": 7}, "rope.dimension_count is 7"),
            ({"llama.rope.dimension_count": 32}, "rope.dimension_count is 32"),
            ({"llama.rope.freq_base": -1.0}, "rope.freq_base"),
            ({"llama.feed_forward_activation": "gelu"}, "'gelu' with a gate"),
            ({"llama.block_count": 4_000_000_000}, "block_count"),
            ({"llama.block_count": 1_000_000}, "block_count is 1000000"),
            ({"llama.embedding_length": "64"}, "positive whole number"),
            ({"llama.embedding_length": 0}, "positive whole number"),
            ({"llama.embedding_length": ["a", "b"]}, "is an array of 2 values"),
            ({"llama.rope.freq_base": [1.0, 2.0]}, "is an array of 2 values"),
            ({"llama.logit_scale": [1.0, 1.0]}, "logit_scale"),
            ({"llama.attention.sliding_window": [0, 64]}, "sliding-window"),
            ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, "positive number"),
            ({"llama.feed_forward_activation": 3}, "a string is expected"),
            ({"llama.attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
            ({"llama.final_logit_softcapping": 30.0}, "final_logit_softcapping"),
            ({"llama.use_parallel_residual": True}, "use_parallel_residual"),
        ],
    )
    def test_refusal_names_the_reason(
        self, tmp_path: Path, metadata: dict[str, Any], expected: str
    ) -> None:
        assert expected in refusal(tmp_path, metadata=metadata)

    def test_other_pattern_of_windows_is_refused(self, tmp_path: Path) -> None:
        model, key = TinyModel(family="gemma3"), "gemma3.attention.sliding_window_pattern"
        assert f"{key} = '5' is not" in refusal(tmp_path, model, metadata={key: 5})
        assert f"{key} differs" in refusal(tmp_path, model, metadata={key: [True, False]})

    def test_no_learned_position_is_named(self, tmp_path: Path) -> None:
        model = TinyModel(family="opt")
        weights = random_weights(model)
        weights["position_embd.weight"] = weights["position_embd.weight"][:2]
        assert "position_embd.weight has 2 rows" in refusal(tmp_path, model, weights=weights)

    def test_sequential_falcon_is_refused(self, tmp_path: Path) -> None:
        """Those have no rotation but slopes of distance, which no key of their files says."""
        model = TinyModel(family="falcon")
        weights = random_weights(model) | {"blk.0.ffn_norm.weight": np.ones(64, np.float32)}
        assert "'blk.0.ffn_norm.weight'" in refusal(tmp_path, model, weights=weights)

    def test_yarn_refuses_what_it_would_ignore(self, tmp_path: Path) -> None:
        model = TinyModel(rope_scaling=RopeScaling.YARN)
        key = "llama.rope.scaling.attn_factor"
        assert key in refusal(tmp_path, model, metadata={key: 0.5})

    def test_missing_bias_of_qwen2_is_named(self, tmp_path: Path) -> None:
        model = TinyModel(family="qwen2")
        message = refusal(tmp_path, model, skip_tensors=("blk.0.attn_k.bias",))
        assert "missing: blk.0.attn_k.bias" in message

    def test_half_of_longrope_is_named(self, tmp_path: Path) -> None:
        weights = random_weights(TinyModel())
        weights["rope_factors_long.weight"] = np.ones(8, np.float32)
        message = refusal(tmp_path, weights=weights)
        assert message.endswith("tensors missing: rope_factors_short.weight")

    def test_scaling_tensor_must_fit(self, tmp_path: Path) -> None:
        weights = random_weights(TinyModel())
        weights["rope_freqs.weight"] = np.ones(3, np.float32)
        assert "rope_freqs.weight has shape (3,)" in refusal(tmp_path, weights=weights)
        weights["rope_freqs.weight"] = np.zeros(8, np.float32)
        assert "not positive" in refusal(tmp_path, weights=weights)


class TestFilesWithoutTensors:
    def _write(self, path: Path, architecture: str | None, tokens: list[str] | None) -> Path:
        writer = GGUFWriter(path, architecture or "llama")
        if architecture is None:
            writer.kv_data[0].clear()
        if tokens is not None:
            writer.add_token_list(tokens)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    @pytest.mark.parametrize(
        ("architecture", "tokens", "expected"),
        [
            (None, None, "an empty GGUF"),
            ("llama", None, "no tensors"),
            ("llama", ["a"], "a vocabulary only"),
        ],
    )
    def test_file_without_tensors_is_named(
        self, tmp_path: Path, architecture: str | None, tokens: list[str] | None, expected: str
    ) -> None:
        header = read_header(self._write(tmp_path / "none.gguf", architecture, tokens))
        with pytest.raises(FormatError, match=expected):
            describe(header)


def test_unsupported_is_a_format_error(tmp_path: Path) -> None:
    model = replace(TinyModel(), activation="relu", has_gate=False)
    assert describe_file(tmp_path, model).feed_forward is FeedForwardKind.RELU
    with pytest.raises(UnsupportedError):
        describe_file(tmp_path, metadata={"general.architecture": "gpt2"})
