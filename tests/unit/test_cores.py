"""Kinds and use of cores, read from the trees of machines that are not here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyneuron.cores import Core, Cores, parse_core_list, read_cores, show_cores, this_machine
from polyneuron.errors import ConfigError
from tests.support.core_trees import (
    CPUS,
    alike,
    hybrid,
    hyper_threaded,
    rk3588,
    snapdragon_8_gen_3,
    write_files,
)

Make = Callable[[Path], Cores]


class TestKinds:
    @pytest.mark.parametrize(
        "make, kinds, usual",
        [
            (rk3588, ((4, 5, 6, 7), (0, 1, 2, 3)), (4, 5, 6, 7)),
            (snapdragon_8_gen_3, ((7,), (2, 3, 4, 5, 6), (0, 1)), (7, 2, 3, 4, 5, 6)),
            (hyper_threaded, (tuple(range(8)),), (0, 1, 2, 3)),
            (hybrid, (tuple(range(8)), (8, 9, 10, 11)), (0, 2, 4, 6)),
            (alike, ((0, 1, 2, 3),), (0, 1, 2, 3)),
        ],
    )
    def test_strongest_first(
        self, make: Make, kinds: tuple[tuple[int, ...], ...], usual: tuple[int, ...], tmp_path: Path
    ) -> None:
        cores = make(tmp_path)
        assert cores.kinds == kinds
        assert cores.usual == usual
        assert cores.num_workers() == len(usual)

    @pytest.mark.parametrize(
        "make, order, counts",
        [
            (rk3588, (4, 5, 6, 7, 0, 1, 2, 3), (4, 8)),
            (snapdragon_8_gen_3, (7, 2, 3, 4, 5, 6, 0, 1), (1, 6, 8)),
            (hyper_threaded, (0, 1, 2, 3, 4, 5, 6, 7), (4, 8)),
            (hybrid, (0, 2, 4, 6, 8, 9, 10, 11, 1, 3, 5, 7), (4, 8, 12)),
            (alike, (0, 1, 2, 3), (4,)),
        ],
    )
    def test_more_workers_take_weaker_cores(
        self, make: Make, order: tuple[int, ...], counts: tuple[int, ...], tmp_path: Path
    ) -> None:
        cores = make(tmp_path)
        assert cores.order == order
        assert cores.worker_counts() == counts

    def test_clocks_tell_where_capacities_do_not(self, tmp_path: Path) -> None:
        hybrid(tmp_path)
        (tmp_path / "sys/devices/cpu_atom/cpus").unlink()
        clocks = {f"{CPUS}/cpu{core}/cpufreq/cpuinfo_max_freq": 3900000 for core in range(8, 12)}
        write_files(tmp_path, clocks)
        cores = read_cores(tmp_path)
        assert cores.kinds == (tuple(range(8)), (8, 9, 10, 11))
        assert cores.usual == (0, 2, 4, 6)

    def test_weak_cores_alone_are_what_there_is(self, tmp_path: Path) -> None:
        rk3588(tmp_path / "board")
        assert read_cores(tmp_path / "board", [0, 1]).usual == (0, 1)
        hybrid(tmp_path / "desktop")
        assert read_cores(tmp_path / "desktop", [9, 10]).usual == (9, 10)

    def test_small_ones_do_not_make_others_slow(self) -> None:
        cores = Cores((Core(0, max_khz=3_000_000, is_small=True), Core(1, max_khz=1_800_000)), 2)
        assert cores.usual == (1,)


class TestLimits:
    def test_one_core(self, tmp_path: Path) -> None:
        cores = alike(tmp_path, 1)
        assert (cores.ids, cores.usual, cores.num_workers()) == ((0,), (0,), 1)
        assert cores.worker_counts() == (1,)

    def test_affinity_leaves_some(self, tmp_path: Path) -> None:
        rk3588(tmp_path)
        write_files(tmp_path, {"proc/self/status": "Cpus_allowed_list:\t2-5"})
        cores = read_cores(tmp_path)
        assert (cores.ids, cores.usual, cores.num_online) == ((2, 3, 4, 5), (4, 5), 8)

    def test_second_thread_alone_is_a_core(self, tmp_path: Path) -> None:
        hyper_threaded(tmp_path)
        assert read_cores(tmp_path, [1, 4, 5]).usual == (1, 4)

    @pytest.mark.parametrize(
        "groups, file",
        [
            ("0::/box", "sys/fs/cgroup/box/cpuset.cpus.effective"),
            ("3:cpuset:/box", "sys/fs/cgroup/cpuset/box/cpuset.effective_cpus"),
            ("3:cpuset:/box", "sys/fs/cgroup/cpuset/box/cpuset.cpus"),
            ("3:cpuset:/box", "sys/fs/cgroup/cpuset/cpuset.cpus"),
        ],
    )
    def test_cpuset_counts(self, groups: str, file: str, tmp_path: Path) -> None:
        rk3588(tmp_path)
        write_files(tmp_path, {"proc/self/cgroup": groups, file: "0-1"})
        assert read_cores(tmp_path).ids == (0, 1)

    def test_offline_cores_are_left_out(self, tmp_path: Path) -> None:
        rk3588(tmp_path)
        write_files(tmp_path, {f"{CPUS}/online": "0-3,6-7", f"{CPUS}/offline": "4-5,8-15"})
        cores = read_cores(tmp_path)
        assert (cores.usual, cores.num_online, cores.offline) == ((6, 7), 6, (4, 5))

    @pytest.mark.parametrize(
        "groups, files, quota, workers",
        [
            ("0::/box", {"sys/fs/cgroup/box/cpu.max": "150000 100000"}, 1.5, 2),
            ("0::/box", {"sys/fs/cgroup/box/cpu.max": "20000 100000"}, 0.2, 1),
            ("0::/box", {"sys/fs/cgroup/box/cpu.max": "max 100000"}, None, 8),
            ("0::/box", {"sys/fs/cgroup/box/cpu.max": "3200000 100000"}, 32, 8),
            ("0::/a/b", {"sys/fs/cgroup/a/cpu.max": "300000 100000",
                         "sys/fs/cgroup/a/b/cpu.max": "500000 100000"}, 3, 3),
            ("8:cpu,cpuacct:/", {"sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "250000",
                                 "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000"}, 2.5, 3),
            ("0::/box", {"sys/fs/cgroup/box/cpu.max": "100000 0"}, None, 8),
            ("no cgroup", {}, None, 8),
        ],
    )  # fmt: skip
    def test_quota_is_rounded_up(
        self,
        groups: str,
        files: dict[str, object],
        quota: float | None,
        workers: int,
        tmp_path: Path,
    ) -> None:
        alike(tmp_path, 8)
        write_files(tmp_path, {"proc/self/cgroup": groups} | files)
        cores = read_cores(tmp_path)
        assert (cores.quota, cores.num_workers()) == (quota, workers)
        assert cores.worker_counts() == (workers,)


class TestUnreadable:
    def test_nothing_to_read_is_one_kind(self, tmp_path: Path) -> None:
        cores = read_cores(tmp_path, [2, 3])
        assert (cores.ids, cores.kinds, cores.usual) == ((2, 3), ((2, 3),), (2, 3))
        assert read_cores(tmp_path).ids == (0,)

    @pytest.mark.parametrize(
        "name", ["cpu_capacity", "cpufreq/cpuinfo_max_freq", "topology/thread_siblings_list"]
    )
    @pytest.mark.parametrize("text", ["", "abc", "-1", "0", "1e9", "9" * 40, "3-1", "²", "\0\xff"])
    def test_garbage_says_nothing(self, name: str, text: str, tmp_path: Path) -> None:
        alike(tmp_path, 2)
        write_files(tmp_path, {f"{CPUS}/cpu1/{name}": text})
        cores = read_cores(tmp_path)
        assert (cores.kinds, cores.usual) == (((0, 1),), (0, 1))

    @pytest.mark.parametrize("text", ["", "none", "0-", "7-0", "0-99999999999", "0;1"])
    def test_lists_that_make_no_sense_limit_nothing(self, text: str, tmp_path: Path) -> None:
        alike(tmp_path, 2)
        names = (f"{CPUS}/online", f"{CPUS}/offline", "sys/devices/cpu_atom/cpus")
        write_files(tmp_path, dict.fromkeys(names, text))
        write_files(tmp_path, {"sys/fs/cgroup/box/cpuset.cpus.effective": text})
        assert read_cores(tmp_path).usual == (0, 1)

    def test_limit_that_leaves_nothing_is_misread(self, tmp_path: Path) -> None:
        alike(tmp_path, 2)
        write_files(tmp_path, {"sys/fs/cgroup/box/cpuset.cpus.effective": "4-7"})
        assert read_cores(tmp_path).ids == (0, 1)

    @given(text=st.text(max_size=12))
    def test_any_text_is_a_list_or_an_error(self, text: str) -> None:
        try:
            cores = parse_core_list(text)
        except ValueError:
            return
        assert parse_core_list(show_cores(cores)) == cores


class TestNamed:
    def test_cores_that_are_not_here_are_refused(self, tmp_path: Path) -> None:
        alike(tmp_path, 2)
        cores = read_cores(tmp_path)
        cores.check([1, 0], "-C 3")
        with pytest.raises(ConfigError) as refused:
            cores.check([1, 8], "-C 0x102")
        assert str(refused.value) == (
            "-C 0x102: core 8 does not exist or is not allowed here: allowed 0-1"
        )

    def test_all_named_ones_work(self, tmp_path: Path) -> None:
        cores = rk3588(tmp_path)
        assert cores.chosen({1, 2, 6}) == (6, 1, 2)
        assert cores.num_workers({1, 2, 6}) == 3

    @given(cores=st.frozensets(st.integers(0, 200)))
    def test_shown_lists_come_back(self, cores: frozenset[int]) -> None:
        assert set(parse_core_list(show_cores(cores))) == cores

    def test_this_machine_is_read(self) -> None:
        cores = this_machine()
        assert cores.usual and set(cores.usual) <= set(cores.ids)
        assert sorted(core for kind in cores.kinds for core in kind) == list(cores.ids)
