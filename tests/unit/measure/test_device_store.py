"""Profiles are kept by machine and disk; whatever cannot be used is measured anew."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from polyneuron.cores import read_cores
from polyneuron.measure import device_profile, device_store
from polyneuron.measure.device_profile import core_kinds, device_key, read_cases, thread_counts
from polyneuron.measure.device_store import load_profile, store_profile, stored_path
from polyneuron.measure.host import Host
from polyneuron.planning.device import DeviceProfile
from tests.support.core_trees import snapdragon_8_gen_3
from tests.support.fake_host import FakeHost
from tests.support.made_up_device import make_device

MIB = 1 << 20


@pytest.fixture
def profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DeviceProfile:
    """Stored in a cache folder of its own, as this machine's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    profile = replace(make_device(), key=device_key(tmp_path))
    store_profile(profile)
    return profile


class TestStore:
    def test_comes_back(self, profile: DeviceProfile, tmp_path: Path) -> None:
        found = load_profile(tmp_path)
        assert found is not None
        assert found.as_dict() == profile.as_dict()
        assert [path.suffix for path in stored_path(profile.key).parent.iterdir()] == [".json"]

    @pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"format_version": 0}', "\xff"])
    def test_damaged_ones_count_as_none(
        self, profile: DeviceProfile, tmp_path: Path, text: str
    ) -> None:
        stored_path(profile.key).write_text(text, "latin-1")
        assert load_profile(tmp_path) is None

    def test_another_machines_counts_as_none(self, profile: DeviceProfile, tmp_path: Path) -> None:
        path = stored_path(profile.key)
        found = json.loads(path.read_text())
        found["key"]["cpu"] = "Slow 1"
        path.write_text(json.dumps(found))
        assert load_profile(tmp_path) is None

    def test_every_part_of_the_key_counts(self, profile: DeviceProfile) -> None:
        names = ("cpu", "isa", "version", "system", "disk")
        others = [replace(profile.key, **{name: "another"}) for name in names]
        others.append(replace(profile.key, cores=99))
        assert len({stored_path(key) for key in [profile.key, *others]}) == len(others) + 1

    def test_what_is_measured_is_kept(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
        made = replace(make_device(), key=device_key(tmp_path))
        monkeypatch.setattr(device_store, "profile_device", lambda folder, progress: made)
        assert load_profile(tmp_path) is None
        assert device_store.measure_and_store(tmp_path, lambda text: None) is made
        assert load_profile(tmp_path) is not None


class TestPlanOfMeasuring:
    def test_ranges_larger_than_the_file_are_left_out(self) -> None:
        spans = [{case.range_bytes for case in read_cases(n * MIB)} for n in (64, 256, 4096)]
        assert spans == [{0}, {0, 128 * MIB}, {0, 128 * MIB, 512 * MIB}]

    def test_reads_fit_into_small_files(self) -> None:
        assert max(case.read_bytes for case in read_cases(100_000)) == 65536

    @pytest.mark.parametrize(
        "most, counts", [(1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8])]
    )
    def test_thread_counts(self, most: int, counts: list[int], tmp_path: Path) -> None:
        assert thread_counts(read_cores(tmp_path, range(most)), 64) == counts

    @pytest.mark.parametrize("limit, counts", [(64, [1, 2, 4, 6, 8]), (6, [1, 2, 4, 6])])
    def test_threads_are_counted_where_slower_cores_join(
        self, limit: int, counts: list[int], tmp_path: Path
    ) -> None:
        cores = snapdragon_8_gen_3(tmp_path)
        assert thread_counts(cores, limit) == counts

    def test_key_tells_kinds_of_cores_apart(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        snapdragon_8_gen_3(tmp_path)
        keys = []
        for allowed in ([0, 1, 7], [2, 3, 4], [5, 6, 7]):
            monkeypatch.setattr(device_profile, "usable_cores", lambda allowed=allowed: allowed)
            keys.append(device_key(tmp_path, Host(root=tmp_path)))
        assert [key.cores for key in keys] == [3, 3, 3]
        assert keys[0].cpu.endswith("(7 | 0-1)") and keys[2].cpu.endswith("(7 | 5-6)")
        assert len(set(keys)) == 3

    def test_cores_are_told_apart_by_strength(self, tmp_path: Path) -> None:
        folder = "sys/devices/system/cpu/cpu"
        files: dict[str, str | None] = {
            f"{folder}{core}/cpu_capacity": str(capacity)
            for core, capacity in enumerate([400, 400, 1024, 1024])
        }
        host = FakeHost(tmp_path, files).make()
        assert core_kinds(host, [0, 1, 2, 3]) == ((2, 3), (0, 1))
        assert core_kinds(host, [4, 5]) == ((4, 5),)
