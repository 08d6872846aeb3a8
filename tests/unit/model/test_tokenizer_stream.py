"""Text of tokens as they come, and stop strings in it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyneuron.errors import ConfigError
from polyneuron.model.stream import StopMatcher, StreamDecoder
from polyneuron.model.tokenizer import Tokenizer
from tests.support.vocabularies import bpe_metadata

TINY = Tokenizer.from_metadata(bpe_metadata())
FIRST_BYTE = 5  # id of byte 0


def _tokens_of(content: bytes) -> list[int]:
    return [FIRST_BYTE + byte for byte in content]


class TestStreamDecoder:
    def test_character_comes_when_it_is_whole(self) -> None:
        decoder = StreamDecoder(TINY)
        pieces = [decoder.push(i) for i in _tokens_of("a\u00e9\u65e5\U0001f600".encode())]
        assert pieces == ["a", "", "\u00e9", "", "", "\u65e5", "", "", "", "\U0001f600"]
        assert decoder.flush() == ""

    def test_flush_replaces_the_unfinished(self) -> None:
        decoder = StreamDecoder(TINY)
        assert [decoder.push(i) for i in _tokens_of(b"\xf0\x9f\x98")] == ["", "", ""]
        assert decoder.flush() == "\ufffd"

    @given(st.lists(st.integers(0, TINY.vocab_size - 1)))
    def test_pieces_together_are_the_text(self, ids: list[int]) -> None:
        decoder = StreamDecoder(TINY)
        assert "".join([*map(decoder.push, ids), decoder.flush()]) == TINY.decode(ids)

    def test_skip_special_leaves_control_out(self) -> None:
        decoder = StreamDecoder(TINY, skip_special=True)
        assert [decoder.push(i) for i in (2, 4)] == ["", "<tool>"]


def _run(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    matcher = StopMatcher(stops)
    return "".join([*map(matcher.push, pieces), matcher.flush()]), matcher.matched


class TestStopMatcher:
    def test_stop_across_pieces_is_never_shown(self) -> None:
        matcher = StopMatcher(["\n\nUser:"])
        pieces = ["Yes", ".\n", "\nUs", "er", ": more"]
        assert [matcher.push(piece) for piece in pieces] == ["Yes", ".", "", "", ""]
        assert matcher.matched == "\n\nUser:"
        assert matcher.push("later") + matcher.flush() == ""

    def test_false_start_is_shown_after_all(self) -> None:
        assert _run(["abc"], ["ab", "abx", "ab"]) == ("ababxab", None)

    def test_false_start_may_begin_the_stop_again(self) -> None:
        assert _run(["aab"], ["aa", "ab"]) == ("a", "aab")

    def test_no_stops_pass_everything(self) -> None:
        assert _run([], ["a", "b"]) == ("ab", None)

    def test_empty_stop_is_refused(self) -> None:
        with pytest.raises(ConfigError, match=r"^--stop: "):
            StopMatcher(["a", ""])

    @given(
        st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
        st.lists(st.text("abc", max_size=4), max_size=8),
    )
    def test_result_does_not_depend_on_the_pieces(self, stops: list[str], cut: list[str]) -> None:
        whole = "".join(cut)
        assert _run(stops, cut) == _run(stops, list(whole)) == _run(stops, [whole])
