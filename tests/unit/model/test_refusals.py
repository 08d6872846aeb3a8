"""Every kind of file that is not run says in one line what it is and what would work."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from polyneuron.errors import FormatError, UnsupportedError
from polyneuron.io.ggml_types import GGML_TYPES, SUPPORTED_TYPES, why_unsupported
from polyneuron.model.architecture import FAMILIES, SUPPORTED_FAMILIES
from polyneuron.model.refusals import KINDS, TEXT_MODEL
from polyneuron.planning.source import open_source
from tests.support.predictor_sources import write_safetensors
from tests.support.tiny_gguf import TinyModel, random_weights, write_tiny_gguf

CURES = ("give ", "merge ", "fetch ", "save ", "convert ", "unpack ", "rename")


def refusal(path: Path) -> str:
    """The one line with which a file is refused; it names the file and something to do."""
    with pytest.raises(FormatError) as caught:
        open_source(path)
    message = str(caught.value)
    assert str(path) in message and "\n" not in message
    assert any(cure in message for cure in CURES), message
    return message


def changed(path: Path, metadata: dict[str, Any], model: TinyModel | None = None) -> Path:
    return write_tiny_gguf(path / "tiny.gguf", model, metadata=metadata)


class TestKinds:
    @pytest.mark.parametrize("row", KINDS, ids=lambda row: row.what)
    def test_row_is_told_by_type_and_architecture(self, tmp_path: Path, row: Any) -> None:
        for kind in sorted(row.types):
            message = refusal(changed(tmp_path, {"general.type": kind}))
            assert row.what in message and row.cure in message
        for architecture in sorted(row.architectures):
            message = refusal(changed(tmp_path, {"general.architecture": architecture}))
            assert row.what in message and row.cure in message
            assert f"architecture '{architecture}'" in message
            assert (SUPPORTED_FAMILIES in message) == (not row.types)

    def test_no_supported_family_is_refused(self) -> None:
        listed = [name for row in KINDS for name in row.architectures]
        assert len(listed) == len(set(listed))
        assert not set(listed) & set(FAMILIES)

    @pytest.mark.parametrize("architecture", ["llama4", "gpt-oss", "deepseek2", "x" * 200])
    def test_family_without_a_row_lists_the_supported(
        self, tmp_path: Path, architecture: str
    ) -> None:
        with pytest.raises(UnsupportedError) as caught:
            open_source(changed(tmp_path, {"general.architecture": architecture}))
        assert f"supported: {SUPPORTED_FAMILIES}" in str(caught.value)
        assert len(str(caught.value)) < 600

    @pytest.mark.parametrize("pooling", [1, 3, 4])
    def test_text_model_that_pools_is_an_embedding_model(
        self, tmp_path: Path, pooling: int
    ) -> None:
        model = TinyModel(family="qwen3")
        message = refusal(changed(tmp_path, {"qwen3.pooling_type": pooling}, model))
        assert f"qwen3.pooling_type = '{pooling}'" in message and TEXT_MODEL in message

    def test_no_pooling_is_a_text_model(self, tmp_path: Path) -> None:
        model = TinyModel(family="qwen3")
        assert open_source(changed(tmp_path, {"qwen3.pooling_type": 0}, model)).spec == model.spec()

    def test_vocabulary_alone_is_named(self, tmp_path: Path) -> None:
        skipped = tuple(random_weights(TinyModel()))
        path = write_tiny_gguf(tmp_path / "v.gguf", skip_tensors=skipped)
        assert "holds a vocabulary only" in refusal(path)


class TestTypes:
    @pytest.mark.parametrize("type_id", sorted(set(GGML_TYPES) - set(SUPPORTED_TYPES)))
    def test_type_says_what_kind_it_is(self, type_id: int) -> None:
        reason = why_unsupported(type_id)
        assert reason is not None and reason.endswith(")"), "each has its kind in brackets"
        assert GGML_TYPES[type_id].name in reason

    def test_file_is_told_what_would_work(self, tmp_path: Path) -> None:
        path = write_tiny_gguf(tmp_path / "m.gguf", replace(TinyModel(), tensor_type="Q4_0"))
        raw = path.read_bytes()
        at = raw.index(b"blk.0.ffn_up.weight") + len("blk.0.ffn_up.weight") + 4 + 16
        path.write_bytes(raw[:at] + (20).to_bytes(4, "little") + raw[at + 4 :])
        message = refusal(path)
        assert "'blk.0.ffn_up.weight' has type IQ4_NL (number 20)" in message
        assert "an importance quantisation" in message
        assert "give a Q4_K_M, Q8_0 or BF16 file of the same model" in message


class TestFiles:
    def test_safetensors_by_another_name_asks_for_the_folder(self, tmp_path: Path) -> None:
        for name in ("m.gguf", "model.safetensors"):
            write_safetensors(tmp_path / name, random_weights(TinyModel()))
            message = refusal(tmp_path / name)
            assert "safetensors; give the folder it came in, with config.json" in message

    def test_json_of_a_folder_asks_for_the_folder(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text('{"model_type": "llama"}')
        assert "of a Hugging Face folder give the folder" in refusal(tmp_path / "config.json")

    @pytest.mark.parametrize(
        ("head", "expected"),
        [
            (b"PK\x03\x04", "save it as safetensors"),
            (b"\x80\x02}q\x00.", "save it as safetensors"),
            (b"tjgg", "give a GGUF of the same model"),
            (b"MZqFpD", "give the GGUF that is in it"),
            (b"\x1f\x8b", "unpack it first"),
        ],
    )
    def test_other_files_say_what_to_do(self, tmp_path: Path, head: bytes, expected: str) -> None:
        (tmp_path / "m.gguf").write_bytes(head + bytes(60))
        assert expected in refusal(tmp_path / "m.gguf")

    @pytest.mark.parametrize("share", [0.1, 0.5, 0.999])
    def test_broken_off_download_is_to_be_fetched_again(self, tmp_path: Path, share: float) -> None:
        path = write_tiny_gguf(tmp_path / "m.gguf")
        path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
        assert "fetch it again" in refusal(path)
