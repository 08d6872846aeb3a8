"""Expected hits from neurons' frequencies."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyneuron.planning.hotness import CACHE_LOSS, Hotness

SUPPOSED = Hotness.supposed(14336)


class TestNeeded:
    def test_supposed_law_has_its_mean(self) -> None:
        assert SUPPOSED.needed() * SUPPOSED.active_share == pytest.approx(0.1, rel=0.01)

    def test_parts_add_up(self) -> None:
        whole = SUPPOSED.needed(4)
        assert SUPPOSED.needed(4, 0.0, 0.3) + SUPPOSED.needed(4, 0.3) == pytest.approx(whole)

    def test_batches_need_more_and_never_all_of_it_more(self) -> None:
        needs = [SUPPOSED.needed(batch) for batch in (1, 2, 4, 8)]
        assert needs == sorted(needs)
        assert needs[3] < 8 * needs[0]

    def test_hottest_carry_the_most(self) -> None:
        assert SUPPOSED.needed(1, 0.0, 0.2) / SUPPOSED.needed() == pytest.approx(0.76, abs=0.02)


class TestHits:
    @pytest.mark.parametrize("cached, hits", [(0.25, 0.78), (0.5, 0.90), (0.75, 0.96)])
    def test_supposed_law_as_measured(self, cached: float, hits: float) -> None:
        """What runs of the synthetic 7B gave: 0.781 with a quarter, 0.964 with three."""
        assert SUPPOSED.hit_rate(cached) == pytest.approx(hits, abs=0.015)

    def test_few_slots_starve(self) -> None:
        """A run of the synthetic 7B with slots for 4 % of the neurons gave 0.16."""
        assert SUPPOSED.hit_rate(0.04) == pytest.approx(0.16, abs=0.04)

    @given(
        low=st.floats(0.0, 1.0), more=st.floats(0.0, 0.5), batch=st.sampled_from([1, 2, 4, 8]),
        begin=st.floats(0.0, 0.9),
    )  # fmt: skip
    def test_more_slots_never_hit_less(
        self, low: float, more: float, batch: int, begin: float
    ) -> None:
        less = SUPPOSED.hit_rate(low, batch, begin)
        assert 0.0 <= less <= SUPPOSED.hit_rate(low + more, batch, begin) + 1e-9 <= 1.0 + 1e-9

    def test_all_slots_hit_always(self) -> None:
        assert SUPPOSED.hit_rate(1.0) == 1.0
        assert SUPPOSED.hit_rate(0.0, begin=1.0) == 1.0

    def test_best_set_is_taken_of_all_layers(self) -> None:
        """One layer needs everything, the other nothing: half of all slots are enough."""
        counts = np.array([[10, 10, 10, 10], [0, 0, 0, 0]])
        hotness = Hotness.counted(counts, 10, 0.8)
        assert hotness.hit_rate(0.5) == pytest.approx(1.0 - CACHE_LOSS)
        assert hotness.is_measured

    def test_nothing_needed_misses_nothing(self) -> None:
        assert Hotness.counted(np.zeros((2, 8), int), 5, 1.0).needed() == 0.0
