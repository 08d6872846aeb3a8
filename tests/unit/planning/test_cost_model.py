"""What the cost model says follows from bytes and rates, and moves the right way."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyneuron.planning.cost_model import DENSE, EXACT, IN_ORDER, PREDICTED, Knobs, moved_bytes
from tests.support.made_up_device import make_device, make_model, shape_source

SOURCE = shape_source()
DEVICE = make_device()
MODEL = make_model(SOURCE, DEVICE, predicts=True)
LAYERS, NEURONS = 32, 14336
ALL = LAYERS * NEURONS
RESIDENT = Knobs(EXACT, 2, 32, LAYERS, 0)
CACHED = replace(RESIDENT, cold_slots=ALL // 4)


class TestResident:
    def test_dense_takes_what_its_bytes_take(self) -> None:
        """3.56 GB of attention, feed forward and head by the rates of the made-up device."""
        work = MODEL.work
        rows = work.rows
        assert rows is not None
        tiles = LAYERS * (work.attention[0].num_bytes + rows.decide.num_bytes)
        seconds = (tiles + work.head.num_bytes) / 48e9
        seconds += ALL * (rows.up_row / 24e9 + rows.down_row / 18e9) / IN_ORDER
        found = MODEL.step(replace(RESIDENT, mode=DENSE))
        assert found.total_ns == pytest.approx(seconds * 1e9, rel=0.05)
        assert (found.bytes_read, found.hit_rate, found.waiting_share) == (0, None, 0)

    def test_exact_leaves_out_what_is_zero(self) -> None:
        dense, exact = (MODEL.step(replace(RESIDENT, mode=mode)) for mode in (DENSE, EXACT))
        assert exact.total_ns < 0.6 * dense.total_ns

    def test_silu_is_always_dense(self) -> None:
        model = make_model(shape_source("mistral-7b"))
        assert model.hotness is None
        assert model.step(replace(RESIDENT, mode=DENSE)).tokens_per_s > 5

    def test_batches_share_the_weights(self) -> None:
        rates = [MODEL.step(RESIDENT, batch).tokens_per_s for batch in (1, 2, 4)]
        assert rates == sorted(rates)


class TestReads:
    def test_streaming_is_bound_by_the_disk(self) -> None:
        found = MODEL.step(replace(RESIDENT, mode=DENSE, num_resident=16))
        assert found.bytes_read == 16 * MODEL.work.layer_bytes
        assert found.total_ns == pytest.approx(found.bytes_read / 2e9 * 1e9, rel=0.01)

    def test_misses_are_bound_by_their_number(self) -> None:
        found = MODEL.step(CACHED)
        assert found.hit_rate == pytest.approx(0.79, abs=0.01)
        assert found.reads == pytest.approx(0.125 * 0.21 * ALL, rel=0.05)
        assert found.total_ns > found.reads / 50e3 * 1e9
        assert 0.5 < found.waiting_share < 0.95

    def test_processor_time_of_reads_counts_where_cores_are_shared(self) -> None:
        fast = make_device(reads_per_s=1e6, bytes_per_s=1e10, cpu_ns=2e3)
        spare = replace(fast, key=replace(fast.key, cores=3))
        knobs = replace(CACHED, cold_slots=ALL // 2)
        shared, free = (make_model(SOURCE, device).step(knobs) for device in (fast, spare))
        assert shared.total_ns > 1.1 * free.total_ns

    def test_looking_ahead_hides_reads_behind_attention(self) -> None:
        knobs = replace(CACHED, mode=PREDICTED, cold_slots=ALL // 2, hot_neurons=448)
        later, ahead = (
            MODEL.step(replace(knobs, is_looking_ahead=ahead)) for ahead in (False, True)
        )
        assert ahead.total_ns < later.total_ns
        assert ahead.bytes_read == later.bytes_read

    def test_predicted_computes_less_than_all_gates(self) -> None:
        knobs = replace(CACHED, mode=PREDICTED, cold_slots=ALL)
        assert MODEL.step(knobs).compute_ns < MODEL.step(RESIDENT).compute_ns


BATCH = st.sampled_from([1, 2, 4, 8])


class TestMoves:
    @given(slots=st.integers(NEURONS, ALL - 1), more=st.integers(0, ALL), batch=BATCH)
    def test_more_slots_are_never_slower(self, slots: int, more: int, batch: int) -> None:
        for mode in (EXACT, PREDICTED):
            few = replace(CACHED, mode=mode, cold_slots=slots)
            many = replace(few, cold_slots=min(ALL, slots + more))
            assert MODEL.step(many, batch).total_ns <= MODEL.step(few, batch).total_ns * (1 + 1e-9)

    @given(factor=st.floats(1.0, 20.0), slots=st.integers(NEURONS, ALL - 1), batch=BATCH)
    def test_faster_disks_are_never_slower(self, factor: float, slots: int, batch: int) -> None:
        fast = make_device(reads_per_s=50e3 * factor, bytes_per_s=2e9 * factor)
        knobs = replace(CACHED, cold_slots=slots, num_resident=20)
        found = make_model(SOURCE, fast).step(knobs, batch)
        assert found.total_ns <= MODEL.step(knobs, batch).total_ns * (1 + 1e-9)

    @given(factor=st.floats(1.0, 4.0), slots=st.integers(NEURONS, ALL - 1))
    def test_faster_kernels_are_never_slower(self, factor: float, slots: int) -> None:
        knobs = replace(CACHED, cold_slots=slots)
        found = make_model(SOURCE, make_device(speed=factor)).step(knobs)
        assert found.total_ns <= MODEL.step(knobs).total_ns * (1 + 1e-9)

    @given(resident=st.integers(0, LAYERS - 1))
    def test_more_layers_are_never_slower(self, resident: int) -> None:
        dense = Knobs(DENSE, 2, 32, resident)
        more = replace(dense, num_resident=resident + 1)
        assert MODEL.step(more).total_ns <= MODEL.step(dense).total_ns


@pytest.mark.parametrize(
    "read_bytes, moved", [(4096, 4096), (8192, 8192), (7168, 10240), (4608, 8192), (512, 4096)]
)
def test_devices_move_whole_pages(read_bytes: int, moved: int) -> None:
    """The mean over all places at which bundles of this size can begin."""
    pages = [
        (at + read_bytes - 1) // 4096 - at // 4096 + 1
        for at in range(0, 8 * 4096 * 7 * 9, read_bytes)
    ]
    assert moved_bytes(read_bytes) == moved
    assert 4096 * sum(pages) / len(pages) == pytest.approx(moved, rel=0.001)
