"""The cache actor's state: what is read, what counts as resident."""

from __future__ import annotations

import pytest

from polyneuron.actors.cache_actor import TRANSITIONS, CacheState, Residency
from polyneuron.errors import ProtocolError


def make_cache(region_bytes: int = 100) -> CacheState:
    return CacheState(region_bytes, {"a": 10, "b": 20, "c": 30})


class TestCacheState:
    def test_fixed_weights_are_read_once(self) -> None:
        cache = make_cache()
        assert cache.admit_fixed() == ["a", "b", "c"]
        assert cache.admit_fixed() == []

    def test_only_landed_weights_count(self) -> None:
        cache = make_cache()
        cache.admit_fixed()
        assert cache.resident_bytes() == 0
        cache.landed(["a", "c"])
        assert cache.resident_bytes() == 40
        assert cache.residency["a"] is Residency.PINNED

    def test_failed_reads_are_admitted_again(self) -> None:
        cache = make_cache()
        cache.admit_fixed()
        cache.landed(["a"])
        cache.read_failed(["b", "c"])
        assert cache.admit_fixed() == ["b", "c"]

    def test_unordered_landing_is_refused(self) -> None:
        cache = make_cache()
        with pytest.raises(ProtocolError, match="b cannot go from absent to resident"):
            cache.landed(["b"])
        assert cache.resident_bytes() == 0

    def test_pinned_weight_is_never_lost(self) -> None:
        cache = make_cache()
        cache.admit_fixed()
        cache.landed(["a"])
        with pytest.raises(ProtocolError, match="a cannot go from pinned to absent"):
            cache.read_failed(["a"])
        assert Residency.EVICTING not in TRANSITIONS[Residency.PINNED]

    def test_weights_beyond_the_region_are_refused(self) -> None:
        with pytest.raises(AssertionError):
            make_cache(region_bytes=59)

    def test_every_residency_is_listed(self) -> None:
        assert set(TRANSITIONS) == set(Residency)
