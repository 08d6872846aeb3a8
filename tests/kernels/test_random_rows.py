"""Random rows: equal to numpy, to the published generator, and the same however they are asked."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyneuron.kernels import reference
from polyneuron.kernels.random_rows import (
    MAX_KEY,
    fill_random_rows,
    random_bytes,
    random_rows,
)

ROWS = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=9)
GAMMA = 0x9E3779B97F4A7C15
# The first words of SplitMix64 with seed 1234567, which adds GAMMA before the first one.
PUBLISHED = (
    6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431,
    16408922859458223821,
)  # fmt: skip


def ids(*values: int) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    return np.array(values, np.uint32)


def test_published_values() -> None:
    row = random_rows((1234567 + GAMMA) & MAX_KEY, ids(0), 8 * len(PUBLISHED))
    assert tuple(row.view(np.uint64)[0]) == PUBLISHED


@given(st.integers(0, MAX_KEY), ROWS, st.integers(1, 40))
def test_equal_to_the_reference(key: int, rows: list[int], row_words: int) -> None:
    found = random_rows(key, ids(*rows), 8 * row_words)
    expected = reference.random_rows(key, ids(*rows), row_words)
    assert np.array_equal(found.view(np.uint64), expected)


@pytest.mark.parametrize("stride", [24, 31, 4096])
@pytest.mark.parametrize("start", [0, 3])
def test_rows_may_lie_apart(stride: int, start: int) -> None:
    room = np.full(start + 4 * stride, 7, np.uint8)
    out = room[start:].reshape(4, stride)[:, :24]
    fill_random_rows(out, 5, ids(9, 2, 2, 7))
    assert np.array_equal(out, random_rows(5, ids(9, 2, 2, 7), 24))
    assert np.all(room[start:].reshape(4, stride)[:, 24:] == 7)
    assert np.all(room[:start] == 7)


def test_rows_are_numbered_words() -> None:
    assert np.array_equal(random_rows(3, ids(0, 1, 2), 16).reshape(-1), random_bytes(3, 48))
    assert np.array_equal(random_bytes(3, 13), random_bytes(3, 48)[:13])


def test_bits_are_even() -> None:
    """Each bit of a word is set half of the time, within five standard deviations."""
    bits = np.unpackbits(random_bytes(1, 1 << 16).reshape(-1, 8), axis=1)
    assert np.abs(bits.mean(axis=0) - 0.5).max() < 2.5 / np.sqrt(len(bits))


@pytest.mark.parametrize(
    ("out", "message"),
    [
        (np.empty((2, 12), np.uint8), "whole 8-byte words"),
        (np.empty((2, 2), np.uint64), "whole 8-byte words"),
        (np.empty((8, 2), np.uint8).T, "consecutive bytes"),
        (np.broadcast_to(np.zeros(8, np.uint8), (2, 8)), "consecutive bytes"),
    ],
)
def test_wrong_arrays_are_refused(out: np.ndarray, message: str) -> None:  # type: ignore[type-arg]
    with pytest.raises(ValueError, match=message):
        fill_random_rows(out, 0, ids(0, 1))


def test_number_of_rows_must_agree() -> None:
    with pytest.raises(ValueError, match="row_ids"):
        fill_random_rows(np.empty((2, 8), np.uint8), 0, ids(0))
