"""Executors and the reader get cores; the reader one without a worker where there is one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from polyneuron.config import EngineConfig
from polyneuron.core_use import CoreUse, place
from polyneuron.cores import Cores
from tests.support.core_trees import alike, hybrid, hyper_threaded, rk3588, snapdragon_8_gen_3

READING_ORDER = (7, 2, 3, 4, 5, 6, 0, 1)
"""Of a Snapdragon 8 Gen 3 by PAPER §1.14."""


def placed(machine: Cores, workers: int, npu: int = 0, **settings: Any) -> CoreUse:
    """For a run that reads its file unless told otherwise."""
    reads = settings.pop("reads", True)
    config = EngineConfig(num_workers=workers, num_npu_threads=npu, **settings)
    return place(machine, config, reads=reads)


class TestExecutors:
    @pytest.mark.parametrize(
        "make, workers, expected",
        [
            (rk3588, 4, [4, 5, 6, 7]),
            (rk3588, 6, [4, 5, 6, 7, 0, 1]),
            (snapdragon_8_gen_3, 6, [7, 2, 3, 4, 5, 6]),
            (hyper_threaded, 4, [0, 1, 2, 3]),
            (hybrid, 6, [0, 2, 4, 6, 8, 9]),
            (alike, 3, [0, 1, 2]),
        ],
    )
    def test_strongest_cores_first(
        self, make: Callable[[Path], Cores], workers: int, expected: list[int], tmp_path: Path
    ) -> None:
        use = placed(make(tmp_path), workers, workers)
        assert use.workers == use.prefill == tuple((core,) for core in expected)

    def test_slow_core_that_reads_best_is_taken_once(self, tmp_path: Path) -> None:
        use = placed(rk3588(tmp_path), 6, io_cores=(1, 0))
        assert use.workers == ((4,), (5,), (6,), (7,), (0,), (1,))
        assert use.reader == (1,)

    def test_too_many_go_anywhere(self, tmp_path: Path) -> None:
        cores = alike(tmp_path)
        assert placed(cores, 6).workers[4:] == ((), ())
        assert placed(cores, 4, cores=(1, 2)).workers == ((1,), (2,), (1, 2), (1, 2))

    def test_prompts_may_have_more(self, tmp_path: Path) -> None:
        use = placed(rk3588(tmp_path), 2, 5)
        assert (use.workers, use.prefill) == (((4,), (5,)), ((4,), (5,), (6,), (7,), (0,)))


class TestReader:
    def test_usual_machine_leaves_it_alone(self, tmp_path: Path) -> None:
        use = placed(alike(tmp_path), 4)
        assert (use.reader, use.note) == ((), "")

    def test_spare_fast_core_is_its(self, tmp_path: Path) -> None:
        assert placed(alike(tmp_path), 3).reader == (3,)

    def test_slow_cores_are_not_chosen_unmeasured(self, tmp_path: Path) -> None:
        use = placed(rk3588(tmp_path / "board"), 4)
        assert (use.reader, use.note) == ((), "on cores 4-7")
        assert placed(rk3588(tmp_path / "board"), 3).reader == (7,)

    def test_second_thread_of_a_worker_is_not_spare(self, tmp_path: Path) -> None:
        cores = hyper_threaded(tmp_path)
        assert placed(cores, 4).reader == ()
        assert placed(cores, 3).reader == (3,)
        assert placed(cores, 2, cores=(4, 5, 2)).reader == (2, 4, 5)

    def test_best_measured_core_reads_and_others_compute(self, tmp_path: Path) -> None:
        cores = snapdragon_8_gen_3(tmp_path)
        use = placed(cores, 5, io_cores=READING_ORDER)
        assert use.reader == (7,)
        assert use.workers == ((2,), (3,), (4,), (5,), (6,))
        assert use.note == "on cores 2-6, reader on core 7"

    def test_with_all_fast_ones_at_work_the_next_best_reads(self, tmp_path: Path) -> None:
        assert placed(snapdragon_8_gen_3(tmp_path), 6, io_cores=READING_ORDER).reader == (0,)

    def test_with_all_at_work_the_best_reads(self, tmp_path: Path) -> None:
        assert placed(snapdragon_8_gen_3(tmp_path), 8, io_cores=READING_ORDER).reader == (7,)

    def test_one_named_core_is_kept_to(self, tmp_path: Path) -> None:
        assert placed(rk3588(tmp_path), 4, io_cores=(5,)).reader == (5,)

    def test_without_reads_the_strongest_compute(self, tmp_path: Path) -> None:
        cores = snapdragon_8_gen_3(tmp_path)
        use = placed(cores, 5, reads=False, io_cores=READING_ORDER)
        assert (use.workers[0], use.reader) == ((7,), ())

    def test_named_cores_hold_it_too(self, tmp_path: Path) -> None:
        cores = rk3588(tmp_path)
        assert placed(cores, 2, cores=(0, 1)).reader == (0, 1)
        assert placed(cores, 2, cores=(4, 5, 6), io_cores=(7, 6, 5, 4)).reader == (6,)
        assert placed(cores, 1, cores=(0, 1), io_cores=(7,)).reader == (0, 1)
