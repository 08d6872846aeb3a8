"""The page cache under a mapped file."""

import pytest

from polyneuron.scenarios.page_cache import PageCache


def cycle(cache: PageCache, matrices: int, times: int) -> float:
    """The share of a cycle's bytes that is read, after a warm-up."""
    for _ in range(times):
        for matrix in range(matrices):
            cache.touch(matrix)
    missed = sum(cache.touch(m) for _ in range(times) for m in range(matrices))
    return missed / (times * matrices * cache.matrix_bytes)


def test_what_fits_is_never_read_again() -> None:
    cache = PageCache(10, 100, 1000, seed=1)
    assert cycle(cache, 10, 3) == 0.0


@pytest.mark.parametrize("share", [0.25, 0.5, 0.8])
def test_cycle_keeps_less_than_its_share(share: float) -> None:
    cache = PageCache(100, 10, int(1000 * share), seed=1)
    missed = cycle(cache, 100, 30)
    assert 1.0 - share < missed < 1.0


def test_half_in_memory_hits_a_fifth() -> None:
    # The fixed point of h = exp(-2 (1 - h)) is 0.203.
    assert cycle(PageCache(200, 10, 1000, seed=1), 200, 40) == pytest.approx(0.797, abs=0.02)


def test_smaller_cache_holds_less() -> None:
    cache = PageCache(10, 100, 1000, seed=1)
    cache.resize(350)
    assert cache.num_held == 3
    cache.resize(0)
    assert cache.touch(1) == 100 and cache.num_held == 0


def test_seed_decides() -> None:
    assert cycle(PageCache(50, 10, 200, 7), 50, 5) == cycle(PageCache(50, 10, 200, 7), 50, 5)
