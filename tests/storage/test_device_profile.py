"""A machine is measured for real, in little time, and nothing is left behind."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import pytest

from polyneuron.config import usable_cores
from polyneuron.errors import ConfigError
from polyneuron.kernels.quant import StorageType
from polyneuron.measure.device_profile import Effort, profile_device
from polyneuron.measure.host import Host, Space
from polyneuron.planning.device import DeviceProfile, Kernel
from tests.support.core_trees import write_machine

MIB = 1 << 20
QUICK = Effort(
    disk_ns=1, write_ns=1, scratch_bytes=8 * MIB, memory_bytes=4 * MIB, kernel_s=0.0, rounds=1,
    step_ns=1, types=(StorageType.Q4,), widths=(256,), rows_a_call=9, batches=(2,),
)  # fmt: skip


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> DeviceProfile:
    folder = tmp_path_factory.mktemp("disk")
    profile = profile_device(folder, effort=QUICK)
    assert list(folder.iterdir()) == []
    return profile


def test_every_read_has_its_row(profile: DeviceProfile) -> None:
    random = {(r.read_bytes, r.depth, r.range_bytes) for r in profile.reads if r.is_random}
    assert len(random) == 5 * 4
    assert sum(not row.is_random for row in profile.reads) == 3
    assert all(row.reads_per_s > 0 and row.cpu_ns > 0 for row in profile.reads)
    assert profile.probed_bytes == 8 * MIB


def test_every_kernel_is_timed(profile: DeviceProfile) -> None:
    assert {row.kernel for row in profile.kernels} == set(Kernel)
    assert all(row.bytes_per_s > 0 for row in profile.kernels)
    assert {row.tokens for row in profile.kernels} == {1, 2}
    threads = {row.threads for row in profile.kernels}
    assert threads == {row.threads for row in profile.steps}
    assert max(threads) <= profile.num_cores


def test_survives_being_stored(profile: DeviceProfile) -> None:
    assert DeviceProfile.from_dict(profile.as_dict()).as_dict() == profile.as_dict()


def test_file_is_read_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "model"
    path.write_bytes(b"x" * MIB)
    told: list[str] = []
    found = profile_device(path, told.append, QUICK)
    assert found.probed_bytes == MIB
    assert path.read_bytes() == b"x" * MIB
    assert told[0].startswith("reading 1 MiB")


@pytest.mark.skipif(len(usable_cores()) < 2, reason="needs two cores to tell them apart")
def test_strongest_cores_are_timed_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine whose second usable core is stronger than the others."""
    ids = usable_cores()
    capacities = dict.fromkeys(ids, 400) | {ids[1]: 1024}
    write_machine(tmp_path / "board", max(ids) + 1, capacities=capacities)
    confined: list[set[int]] = []
    bind = os.sched_setaffinity

    def note(pid: int, cores: Iterable[int]) -> None:
        confined.append(set(cores))
        bind(pid, cores)

    monkeypatch.setattr(os, "sched_setaffinity", note)
    found = profile_device(tmp_path, effort=QUICK, host=Host(root=tmp_path / "board"))
    assert found.core_kinds[0] == (ids[1],) and len(found.core_kinds) == 2
    assert {row.core for row in found.reads} == {ids[1], ids[0]}
    order = [ids[1], ids[0], *ids[2:]]
    for count in {row.threads for row in found.kernels}:
        assert set(order[:count]) in confined
    assert {row.threads for row in found.steps} == {row.threads for row in found.kernels}
    assert found.reading_order()[:1] in {(ids[0],), (ids[1],)}
    assert usable_cores() == ids


def test_no_room_is_told(tmp_path: Path) -> None:
    full = Host(space=lambda path: Space(MIB, MIB))
    with pytest.raises(ConfigError, match="are too little to measure"):
        profile_device(tmp_path, effort=QUICK, host=full)
