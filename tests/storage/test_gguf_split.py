"""A model in parts is the model in one file: any part or the folder names it."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from polyneuron.errors import FormatError
from polyneuron.io.gguf_split import read_gguf
from polyneuron.io.model_files import FilesReader
from polyneuron.io.ncf_format import Layout
from polyneuron.io.ncf_reader import read_ncf
from polyneuron.model.architecture import describe
from polyneuron.model.convert import convert
from polyneuron.model.locate import locate_model
from polyneuron.model.model_cache import cached_ncf
from polyneuron.model.model_header import read_model_header
from polyneuron.planning.source import open_source
from tests.support.local_engine import LocalEngine
from tests.support.parted_models import part_path, split_gguf
from tests.support.tiny_gguf import TinyModel, random_weights, write_tiny_gguf

MODEL = TinyModel(family="bamboo", tensor_type="Q4_0", tied_head=False, seed=5)
PROMPT = [5, 6, 7, 8, 9]


@pytest.fixture
def parts(tmp_path: Path) -> Path:
    """The first of three parts; it holds no tensors."""
    (tmp_path / "parts").mkdir()
    return split_gguf(tmp_path / "parts", MODEL)


def refusal(path: Path) -> str:
    """The one line with which a model is refused."""
    with pytest.raises(FormatError) as caught:
        open_source(locate_model(str(path)))
    message = str(caught.value)
    assert str(path) in message and "\n" not in message
    return message


class TestReading:
    @pytest.mark.parametrize("given", [1, 2, 3, None])
    def test_any_part_or_the_folder_is_the_model(self, parts: Path, given: int | None) -> None:
        path = parts.parent if given is None else part_path(parts.parent, given, 3)
        header = read_model_header(path)
        assert header.path == parts
        assert set(header.by_name) == set(random_weights(MODEL))
        assert describe(header) == MODEL.spec()

    @pytest.mark.parametrize("num_in_first", [0, 4])
    def test_every_tensor_is_the_whole_files(self, tmp_path: Path, num_in_first: int) -> None:
        parts = split_gguf(tmp_path, MODEL, count=4, num_in_first=num_in_first)
        whole = write_tiny_gguf(tmp_path / "w.gguf", MODEL)
        raw, one, many = whole.read_bytes(), read_gguf(whole), read_gguf(parts)
        with FilesReader(many.files) as reader:
            for tensor in many.tensors:
                out = np.empty(tensor.num_bytes, np.uint8)
                reader.read(tensor.offset, out)
                expected = one.tensor(tensor.name)
                assert (tensor.type_id, tensor.shape) == (expected.type_id, expected.shape)
                assert bytes(out) == raw[expected.offset : expected.offset + expected.num_bytes]

    def test_runs_as_the_whole_file_does(self, tmp_path: Path, parts: Path) -> None:
        whole = write_tiny_gguf(tmp_path / "w.gguf", MODEL)
        with LocalEngine(whole) as engine:
            expected = engine.generate(PROMPT, 4)
        with LocalEngine(parts.parent) as engine:
            found = engine.generate(PROMPT, 4)
        assert found.tokens == expected.tokens
        assert all((a == b).all() for a, b in zip(found.logits, expected.logits, strict=True))

    @pytest.mark.parametrize("layout", ["tiles", "bundles"])
    def test_converts_to_the_same_sections(self, tmp_path: Path, parts: Path, layout: str) -> None:

        whole = write_tiny_gguf(tmp_path / "w.gguf", MODEL)
        files = []
        for name, source in (("whole", whole), ("parts", parts.parent)):
            convert(source, tmp_path / f"{name}.ncf", layout=Layout(layout))
            ncf = read_ncf(tmp_path / f"{name}.ncf")
            files.append((tmp_path / f"{name}.ncf").read_bytes()[ncf.data_offset :])
        assert files[0] == files[1]

    def test_name_of_a_part_is_no_part(self, tmp_path: Path) -> None:
        """What was made of a model in parts may have kept the name of one."""
        path = write_tiny_gguf(part_path(tmp_path, 1, 13), MODEL)
        assert open_source(path).spec == MODEL.spec()

    def test_projector_beside_a_model_is_passed_over(self, tmp_path: Path) -> None:
        write_tiny_gguf(tmp_path / "mmproj-x.gguf", metadata={"general.type": "mmproj"})
        model = write_tiny_gguf(tmp_path / "model.gguf", MODEL)
        assert read_model_header(tmp_path).path == model


class TestCache:
    def test_another_part_is_another_model(self, tmp_path: Path, parts: Path) -> None:
        first = cached_ncf(parts, folder=tmp_path / "cache")
        assert cached_ncf(parts.parent, folder=tmp_path / "cache") == first
        last = part_path(parts.parent, 3, 3)
        raw = bytearray(last.read_bytes())
        raw[-1] ^= 1
        last.write_bytes(raw)
        assert cached_ncf(parts, folder=tmp_path / "cache") != first


class TestRefusals:
    def test_missing_part_is_named(self, parts: Path) -> None:
        part_path(parts.parent, 2, 3).unlink()
        message = refusal(parts)
        assert "of 3 parts 1 missing beside it: tiny-00002-of-00003.gguf; fetch" in message

    def test_renamed_part_is_told_its_name(self, parts: Path) -> None:
        renamed = part_path(parts.parent, 2, 3).rename(parts.parent / "model.gguf")
        message = refusal(renamed)
        assert "part 2 of 3 by its metadata, but not by its name" in message
        assert "NAME-00002-of-00003.gguf" in message

    def test_parts_joined_by_cat_are_told_apart(self, parts: Path) -> None:
        files = sorted(parts.parent.iterdir())
        joined = parts.parent / "joined.gguf"
        joined.write_bytes(b"".join(file.read_bytes() for file in files))
        assert "llama-gguf-split --merge, never with cat" in refusal(joined)

    def test_parts_in_each_others_place_are_named(self, parts: Path) -> None:
        second, third = (part_path(parts.parent, number, 3) for number in (2, 3))
        shutil.copy(third, second)
        with pytest.raises(FormatError, match="part 3 of 3 by its metadata, part 2 of 3 by its n"):
            open_source(parts)

    def test_truncated_part_is_named(self, parts: Path) -> None:
        third = part_path(parts.parent, 3, 3)
        third.write_bytes(third.read_bytes()[:-100])
        with pytest.raises(FormatError, match=r"tiny-00003-of-00003\.gguf: .* bytes are missing"):
            open_source(parts)

    def test_count_of_tensors_must_be_right(self, tmp_path: Path) -> None:
        message = refusal(split_gguf(tmp_path, MODEL, num_told=7))
        assert "split.tensors.count is '7', the 3 parts hold 21 tensors" in message

    def test_tensor_in_two_parts_is_named(self, tmp_path: Path) -> None:
        split_gguf(tmp_path, MODEL)
        keys = {"split.no": 0, "split.count": 3, "split.tensors.count": 21}
        skipped = tuple(random_weights(MODEL))[1:]
        write_tiny_gguf(part_path(tmp_path, 1, 3), MODEL, metadata=keys, skip_tensors=skipped)
        with pytest.raises(FormatError, match=r"'token_embd\.weight' is in an earlier part too"):
            open_source(tmp_path)

    @pytest.mark.parametrize("count", [-1, 99_999, True])
    def test_count_of_parts_is_checked(self, tmp_path: Path, count: int) -> None:
        keys = {"split.count": count} if count != -1 else {"split.count": -1.5}
        assert "split.count is" in refusal(write_tiny_gguf(tmp_path / "m.gguf", metadata=keys))

    def test_folder_without_a_model_says_what_is_expected(self, tmp_path: Path) -> None:
        assert "config.json" in refusal(tmp_path)

    def test_folder_of_several_models_names_them(self, tmp_path: Path) -> None:
        for name in ("b.gguf", "a.gguf"):
            write_tiny_gguf(tmp_path / name, MODEL)
        assert "a folder of 2 models (a.gguf, b.gguf); give one file" in refusal(tmp_path)
