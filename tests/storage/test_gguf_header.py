"""The header reader on good, cut, flipped and hostile headers: a value or one clear line."""

import struct
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from polyneuron.errors import FormatError, UnsupportedError
from polyneuron.io.ggml_types import GGML_TYPES, REMOVED_TYPES, SUPPORTED_NAMES, SUPPORTED_TYPES
from polyneuron.io.gguf_file import check_supported, read_header
from tests.support.raw_gguf import (
    ARRAY_TYPE,
    F32_TYPE,
    STRING_TYPE,
    U32_TYPE,
    RawGguf,
    array,
    key,
    tensor,
    text,
    u32,
    u64,
)
from tests.support.tiny_gguf import TinyModel, write_tiny_gguf

HUGE = (1 << 64) - 1


def refusal(path: Path, content: bytes) -> str:
    """The one line with which `content` is refused."""
    path.write_bytes(content)
    with pytest.raises(FormatError) as caught:
        read_header(path)
    message = str(caught.value)
    assert "\n" not in message
    assert message.isascii()
    assert path.name in message
    assert len(message) < 400
    return message


class TestGoodHeaders:
    def test_agrees_with_gguf_package(self, tmp_path: Path) -> None:
        path = write_tiny_gguf(tmp_path / "tiny.gguf", TinyModel(tensor_type="Q4_0"))
        header, peer = read_header(path), GGUFReader(path)
        assert [t.name for t in header.tensors] == [t.name for t in peer.tensors]
        for mine, theirs in zip(header.tensors, peer.tensors, strict=True):
            assert mine.offset == theirs.data_offset
            assert mine.num_bytes == theirs.n_bytes
            assert mine.shape == tuple(int(dim) for dim in theirs.shape)[::-1]
        for name, field in peer.fields.items():
            if not name.startswith("GGUF."):
                value = header.metadata[name]
                plain = value.tolist() if isinstance(value, np.ndarray) else value
                assert plain == field.contents()

    def test_keeps_bytes_that_are_not_utf8(self, tmp_path: Path) -> None:
        path = tmp_path / "raw.gguf"
        path.write_bytes(RawGguf().build())
        word = read_header(path).metadata["words"][1]
        assert word.encode("utf-8", "surrogateescape") == b"\xff\x00"

    def test_reads_version_2(self, tmp_path: Path) -> None:
        path = tmp_path / "raw.gguf"
        path.write_bytes(RawGguf(version=2).build())
        header = read_header(path)
        assert header.version == 2
        assert header.tensor("second").offset == header.data_offset + 256

    def test_honours_alignment(self, tmp_path: Path) -> None:
        path = tmp_path / "raw.gguf"
        raw = RawGguf(alignment=128)
        raw.keys.append(key("general.alignment", U32_TYPE, u32(128)))
        path.write_bytes(raw.build())
        assert read_header(path).data_offset % 128 == 0

    def test_missing_tensor_is_named(self, tmp_path: Path) -> None:
        path = tmp_path / "raw.gguf"
        path.write_bytes(RawGguf().build())
        with pytest.raises(FormatError, match="tensor 'third' is missing"):
            read_header(path).tensor("third")


class TestDamagedHeaders:
    def test_every_cut_is_refused(self, tmp_path: Path) -> None:
        """At every byte, so at every field boundary, and inside the data."""
        whole = RawGguf().build()
        for length in range(len(whole)):
            refusal(tmp_path / "cut.gguf", whole[:length])

    def test_says_how_many_bytes_are_missing(self, tmp_path: Path) -> None:
        whole = RawGguf().build()
        assert " 1 bytes are missing" in refusal(tmp_path / "cut.gguf", whole[:-1])
        assert " 300 bytes are missing" in refusal(tmp_path / "cut.gguf", whole[:-300])

    def test_says_where_the_header_ends(self, tmp_path: Path) -> None:
        raw = RawGguf()
        length = len(b"".join(raw.parts()[:6])) - 1
        assert "numbers" in refusal(tmp_path / "cut.gguf", raw.header()[:length] + bytes(0))

    @settings(
        max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
    )
    @given(position=st.integers(0, len(RawGguf().header()) - 1), value=st.integers(0, 255))
    def test_flipped_byte_never_crashes(self, tmp_path: Path, position: int, value: int) -> None:
        content = bytearray(RawGguf().build())
        content[position] = value
        path = tmp_path / "flipped.gguf"
        path.write_bytes(content)
        try:
            header = read_header(path)
        except FormatError as error:
            assert "\n" not in str(error)
        else:
            ends = [tensor.offset + tensor.num_bytes for tensor in header.tensors]
            assert max(ends, default=0) <= len(content)


def _with_keys(*keys: bytes) -> RawGguf:
    raw = RawGguf()
    raw.keys.extend(keys)
    return raw


def _with_tensors(*tensors: bytes) -> RawGguf:
    return RawGguf(tensors=list(tensors))


HOSTILE: dict[str, tuple[Callable[[], RawGguf], str]] = {
    "tensor_count": (lambda: RawGguf(num_tensors=HUGE), "claims 18,446,744,073,709,551,615 ten"),
    "key_count": (lambda: RawGguf(num_keys=HUGE), "claims 18,446,744,073,709,551,615 metadata"),
    "key_count_one_more": (lambda: RawGguf(num_keys=4), "damaged|cut off|unknown"),
    "tensor_count_one_more": (lambda: RawGguf(num_tensors=3), "dimensions|impossible|twice"),
    "string_length": (
        lambda: _with_keys(key("long", STRING_TYPE, text("x", HUGE))),
        "'long' claims a string of",
    ),
    "string_past_end": (
        lambda: _with_keys(key("long", STRING_TYPE, text("x", 5000))),
        "cut off inside metadata key 'long'",
    ),
    "key_length": (lambda: _with_keys(u64(HUGE) + b"x"), "claims a string"),
    "array_count": (
        lambda: _with_keys(key("big", ARRAY_TYPE, array(F32_TYPE, HUGE))),
        "'big' claims",
    ),
    "array_product_overflows": (
        lambda: _with_keys(key("big", ARRAY_TYPE, array(F32_TYPE, 1 << 62))),
        "'big' claims",
    ),
    "array_past_end": (
        lambda: _with_keys(key("big", ARRAY_TYPE, array(F32_TYPE, 1 << 20))),
        "cut off inside metadata key 'big'",
    ),
    "string_array_count": (
        lambda: _with_keys(key("big", ARRAY_TYPE, array(STRING_TYPE, 1 << 40))),
        "'big' claims",
    ),
    "string_array_past_end": (
        lambda: _with_keys(key("big", ARRAY_TYPE, array(STRING_TYPE, 2, text("x", 1 << 40)))),
        "cut off inside metadata key 'big'",
    ),
    "nested_array": (
        lambda: _with_keys(key("deep", ARRAY_TYPE, array(ARRAY_TYPE, 1, array(F32_TYPE, 0)))),
        "array of arrays",
    ),
    "value_type": (lambda: _with_keys(key("odd", 99, b"")), "unknown value type 99"),
    "array_type": (lambda: _with_keys(key("odd", ARRAY_TYPE, array(77, 1))), "unknown type 77"),
    "duplicate_key": (
        lambda: _with_keys(key("numbers", U32_TYPE, u32(1))),
        "metadata key 'numbers' appears twice",
    ),
    "alignment_0": (lambda: _with_keys(key("general.alignment", U32_TYPE, u32(0))), "power of two"),
    "alignment_3": (lambda: _with_keys(key("general.alignment", U32_TYPE, u32(3))), "power of two"),
    "alignment_4": (lambda: _with_keys(key("general.alignment", U32_TYPE, u32(4))), "power of two"),
    "alignment_text": (
        lambda: _with_keys(key("general.alignment", STRING_TYPE, text("32"))),
        "power of two",
    ),
    "no_dims": (lambda: _with_tensors(tensor("t", (), num_dims=0)), "0 dimensions"),
    "many_dims": (lambda: _with_tensors(tensor("t", num_dims=1000)), "1000 dimensions"),
    "huge_dims": (lambda: _with_tensors(tensor("t", num_dims=0xFFFFFFFF)), "4294967295 dimensions"),
    "zero_dim": (lambda: _with_tensors(tensor("t", (32, 0))), "impossible shape"),
    "product_overflows": (
        lambda: _with_tensors(tensor("t", (1 << 32, 1 << 32, 2))),
        "impossible shape",
    ),
    "product_wraps_to_small": (
        lambda: _with_tensors(tensor("t", (1 << 63, 2, 1, 1))),
        "impossible shape",
    ),
    "duplicate_tensor": (
        lambda: _with_tensors(tensor("t"), tensor("t", offset=256)),
        "tensor 't' appears twice",
    ),
    "overlap": (lambda: _with_tensors(tensor("a"), tensor("b", offset=128)), "'a' and 'b' overlap"),
    "unaligned": (lambda: _with_tensors(tensor("t", offset=8)), "not a multiple of 32"),
    "offset_past_end": (
        lambda: _with_tensors(tensor("t", offset=HUGE - 31)),
        "bytes are missing",
    ),
    "unknown_type_past_end": (
        lambda: _with_tensors(tensor("t", type_id=99, offset=1 << 40)),
        "bytes are missing",
    ),
    "partial_block": (
        lambda: _with_tensors(tensor("t", (33, 2), type_id=2)),
        "33 values, not a multiple of the 32",
    ),
    "version_0": (lambda: RawGguf(version=0), "version 0 is older"),
    "version_1": (lambda: RawGguf(version=1), "version 1 is older"),
    "version_4": (lambda: RawGguf(version=4), "version 4 is newer"),
    "big_endian": (lambda: RawGguf(version=3 << 24), "big-endian"),
    "name_with_newline": (
        lambda: _with_tensors(tensor("a\nb\x1b[31m" + "x" * 500, (32, 0))),
        r"'a\\nb\\x1b",
    ),
    "name_not_utf8": (lambda: _with_tensors(tensor(b"\xff\xfe", (32, 0))), "udcff"),
}


class TestHostileHeaders:
    @pytest.mark.parametrize("case", HOSTILE)
    def test_hostile_header_is_refused(self, tmp_path: Path, case: str) -> None:
        build, expected = HOSTILE[case]
        path = tmp_path / "hostile.gguf"
        path.write_bytes(build().build())
        with pytest.raises(FormatError, match=expected):
            read_header(path)
        refusal(path, path.read_bytes())


class TestTensorTypes:
    def _check(self, path: Path, type_id: int) -> None:
        known = GGML_TYPES.get(type_id)
        cols = known.block_values if known else 32
        path.write_bytes(_with_tensors(tensor("w", (cols, 1), type_id=type_id)).build())
        header = read_header(path)
        assert header.tensor("w").type_id == type_id
        check_supported(header)

    @pytest.mark.parametrize("type_id", SUPPORTED_TYPES)
    def test_supported_type_passes(self, tmp_path: Path, type_id: int) -> None:
        self._check(tmp_path / "typed.gguf", type_id)

    @pytest.mark.parametrize(
        ("type_ids", "reason"),
        [
            (tuple(REMOVED_TYPES), "was removed from GGUF"),
            ((42, 1000, 0xFFFFFFFF), "newer than this version"),
            ((16, 20, 23, 29), r"IQ\d_\w+ \(number \d+\), which is not read"),
        ],
    )
    def test_refusal_says_why(self, tmp_path: Path, type_ids: tuple[int, ...], reason: str) -> None:
        for type_id in type_ids:
            with pytest.raises(UnsupportedError, match=reason) as caught:
                self._check(tmp_path / "typed.gguf", type_id)
            message = str(caught.value)
            assert str(type_id) in message
            assert all(part in message for part in ("typed.gguf", "'w'", SUPPORTED_NAMES))

    def test_names_agree_with_gguf_package(self) -> None:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        for kind in GGML_TYPES.values():
            peer = GGMLQuantizationType(kind.type_id)
            assert peer.name == kind.name
            assert GGML_QUANT_SIZES[peer] == (kind.block_values, kind.block_bytes)


class TestLargeVocabulary:
    def test_large_vocabulary_is_read_whole(
        self, tmp_path: Path, record_property: Callable[[str, object], None]
    ) -> None:
        """As large as the largest published ones; the time is shown (-s), not asserted."""
        num_tokens, num_merges = 262_144, 514_906
        path = tmp_path / "vocabulary.gguf"
        tokens = text("token") * num_tokens
        merges = text("ab cd") * num_merges
        scores = struct.pack("<f", -1.0) * num_tokens
        raw = RawGguf(tensors=[], data_bytes=0)
        raw.keys += [
            key("tokenizer.ggml.tokens", ARRAY_TYPE, array(STRING_TYPE, num_tokens, tokens)),
            key("tokenizer.ggml.merges", ARRAY_TYPE, array(STRING_TYPE, num_merges, merges)),
            key("tokenizer.ggml.scores", ARRAY_TYPE, array(F32_TYPE, num_tokens, scores)),
        ]
        path.write_bytes(raw.build())
        start = time.perf_counter()
        metadata = read_header(path).metadata
        seconds = time.perf_counter() - start
        print(f"262k tokens and 515k merges read in {seconds:.2f} s")
        record_property("seconds", seconds)
        assert len(metadata["tokenizer.ggml.tokens"]) == num_tokens
        assert metadata["tokenizer.ggml.merges"][-1] == "ab cd"
        assert metadata["tokenizer.ggml.scores"].sum() == -num_tokens
