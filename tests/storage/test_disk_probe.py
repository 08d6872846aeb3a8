"""The probe of a disk: its scratch file is bounded and has no name to be left behind."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest

from polyneuron.errors import ConfigError, DeviceError
from polyneuron.io.device_probe import CASES
from polyneuron.measure import disk_probe
from polyneuron.measure.disk_probe import (
    MIB,
    PIECE_BYTES,
    DiskProbe,
    nearest_folder,
    probe_disk,
    scratch_file,
)
from polyneuron.measure.host import Host, Space

QUICK_NS = 1_000_000


def probe(path: Path, host: Host | None = None) -> DiskProbe:
    """As little as gives every row."""
    return probe_disk(host or Host(), path, case_ns=QUICK_NS, max_write_ns=QUICK_NS)


class TestScratchFile:
    def test_it_has_no_name(self, tmp_path: Path) -> None:
        with scratch_file(tmp_path, 2 * PIECE_BYTES, 10**11) as (path, num_bytes):
            assert list(tmp_path.iterdir()) == []
            assert path.stat().st_size == num_bytes == 2 * PIECE_BYTES
            assert path.stat().st_dev == tmp_path.stat().st_dev
        assert not path.exists()

    def test_time_is_a_bound(self, tmp_path: Path) -> None:
        with scratch_file(tmp_path, 100 * PIECE_BYTES, 0) as (_, num_bytes):
            assert num_bytes == PIECE_BYTES

    def test_nothing_is_left_after_a_failure(self, tmp_path: Path) -> None:
        before = sorted(os.listdir("/proc/self/fd"))
        with pytest.raises(KeyboardInterrupt), scratch_file(tmp_path, PIECE_BYTES, 0):
            raise KeyboardInterrupt
        assert list(tmp_path.iterdir()) == []
        assert sorted(os.listdir("/proc/self/fd")) == before


class TestProbeDisk:
    def test_folder(self, tmp_path: Path) -> None:
        said: list[str] = []
        disk = probe_disk(Host(), tmp_path, said.append, QUICK_NS, QUICK_NS)
        assert disk.probe is not None and disk.failure == ""
        assert [row.case for row in disk.probe.rows] == list(CASES)
        assert disk.probed_bytes == PIECE_BYTES
        assert disk.mount.type and disk.free_bytes > 0
        assert [text.split()[0] for text in said] == ["writing", "reading"]
        assert list(tmp_path.iterdir()) == []

    def test_file_is_read_and_stays(self, tmp_path: Path) -> None:
        path = tmp_path / "model.bin"
        path.write_bytes(bytes(2 * MIB))
        disk = probe(path)
        assert disk.probe is not None and disk.probed_bytes == 2 * MIB
        assert disk.path == path and path.read_bytes() == bytes(2 * MIB)

    def test_small_file_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "small").write_bytes(b"x")
        with pytest.raises(ConfigError, match="has 1 bytes, a probe needs 1048576"):
            probe(tmp_path / "small")

    def test_full_disk_is_left_alone(self, tmp_path: Path) -> None:
        host = replace(Host(), space=lambda path: Space(1 << 40, 319 * MIB))
        disk = probe(tmp_path, host)
        assert disk.probe is None
        assert disk.failure == f"{tmp_path}: 319 MiB free are too little to measure"
        assert "--path FILE" in disk.cure

    @pytest.mark.parametrize(
        ("error", "failure", "cure"),
        [
            (OSError(errno.EROFS, "x"), "Read-only file system", "--path FOLDER"),
            (DeviceError("read at byte 5 failed"), "read at byte 5 failed", "dmesg"),
        ],
    )
    def test_failure_is_told(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError, failure: str,
        cure: str,
    ) -> None:  # fmt: skip
        def fail(*args: object, **kwargs: object) -> NoReturn:
            raise error

        monkeypatch.setattr(disk_probe, "probe_device", fail)
        disk = probe(tmp_path)
        assert disk.probe is None
        assert failure in disk.failure and cure in disk.cure
        assert list(tmp_path.iterdir()) == []

    def test_nearest_folder(self, tmp_path: Path) -> None:
        assert nearest_folder(tmp_path / "a" / "b") == tmp_path
        assert nearest_folder(tmp_path) == tmp_path
