"""The page cache under a mapped file."""

import pytest

from polyneuron.scenarios.page_cache import PageCache

BYTES = 10


def cycle(cache: PageCache, matrices: int, times: int) -> float:
    """The share of a cycle's bytes that is read, after a warm-up."""
    for _ in range(times):
        for matrix in range(matrices):
            cache.touch(matrix, BYTES)
    missed = sum(cache.touch(m, BYTES) for _ in range(times) for m in range(matrices))
    return missed / (times * matrices * BYTES)


def test_what_fits_is_never_read_again() -> None:
    assert cycle(PageCache(100 * BYTES), 100, 3) == 0.0


@pytest.mark.parametrize("room", [10, 50, 99])
def test_longer_cycle_keeps_nothing(room: int) -> None:
    cache = PageCache(room * BYTES)
    assert cycle(cache, 100, 3) == 1.0
    assert cache.held_bytes == room * BYTES


def test_least_recently_used_goes_first() -> None:
    cache = PageCache(3 * BYTES)
    for matrix in (1, 2, 3, 1, 4):
        cache.touch(matrix, BYTES)
    assert [cache.touch(matrix, BYTES) for matrix in (1, 3, 4)] == [0, 0, 0]
    assert cache.touch(2, BYTES) == BYTES


def test_smaller_cache_holds_less() -> None:
    cache = PageCache(10 * BYTES)
    cycle(cache, 10, 1)
    cache.resize(35)
    assert cache.held_bytes == 30
    cache.resize(0)
    assert cache.touch(9, BYTES) == BYTES and cache.held_bytes == 0
