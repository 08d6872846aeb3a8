"""The probe's arithmetic, and that it reads what it says."""

import os
import random
from pathlib import Path

import pytest

from polyneuron.errors import ConfigError
from polyneuron.io.block_device import Backend
from polyneuron.io.device_probe import CASES, Pattern, ProbeCase, probe_device
from polyneuron.io.file_device import DeviceOptions


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "probed.bin"
    path.write_bytes(os.urandom(4 << 20))
    return path


@pytest.mark.parametrize("backend", [Backend.AUTO, Backend.POOL])
def test_every_case_is_measured(path: Path, backend: Backend) -> None:
    options = DeviceOptions(32, 64, backend)
    probe = probe_device(path, random.Random(0), max_ns=1_000_000, options=options)
    assert [row.case for row in probe.rows] == list(CASES)
    for row in probe.rows:
        assert row.num_reads >= 1
        assert row.bytes_per_s == pytest.approx(row.reads_per_s * row.case.read_bytes)
        assert 0 < row.latency_p50_ns <= row.latency_p99_ns
        assert row.cpu_ns_per_read > 0
    assert probe.info.bytes_read == sum(row.num_reads * row.case.read_bytes for row in probe.rows)


def test_time_is_a_bound(path: Path) -> None:
    case = ProbeCase(Pattern.RANDOM, 4096, 4)
    [row] = probe_device(path, random.Random(0), cases=[case], max_ns=0).rows
    assert row.num_reads == 4


def test_small_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "small").write_bytes(b"x" * 5000)
    case = ProbeCase(Pattern.SEQUENTIAL, 1 << 20, 1)
    with pytest.raises(ConfigError, match="has 5000 bytes, a probe needs 1048576"):
        probe_device(tmp_path / "small", random.Random(0), cases=[case])
