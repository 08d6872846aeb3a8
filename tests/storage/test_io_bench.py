"""The bench of reading brings what it says, on a file too small to tell a disk's speed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from polyneuron.io.block_device import Backend
from polyneuron.io.device_probe import Pattern, ProbeCase
from polyneuron.io.file_device import DeviceOptions
from tests.bench.io_paths import MIB, read_neurons, stream_layers
from tests.bench.io_probe import Bench, build_raw

NS = 10_000_000


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bench") / "file.bin"
    path.write_bytes(os.urandom(8 * MIB))
    return path


def test_layers(path: Path) -> None:
    speed = stream_layers(path, NS, DeviceOptions(4))
    assert speed.bytes_per_s == pytest.approx(speed.reads_per_s * MIB)


@pytest.mark.parametrize("is_registered", [False, True])
def test_neurons(path: Path, is_registered: bool) -> None:
    speed = read_neurons(path, 4096, NS, DeviceOptions(4), is_registered)
    assert speed.reads_per_s > 0 and speed.cpu_us_per_read > 0
    assert speed.bytes_per_s == pytest.approx(speed.reads_per_s * 4096)


@pytest.mark.parametrize("memory", ["huge", "shared"])
def test_bare_loop(path: Path, tmp_path: Path, memory: str) -> None:
    if shutil.which("cc") is None and shutil.which("gcc") is None:
        pytest.skip("no C compiler (cc or gcc) on the path")
    bench = Bench(build_raw(tmp_path), path, NS)
    speed = bench.run_raw(Backend.POOL, memory, ProbeCase(Pattern.RANDOM, 4096, 4))
    assert speed.reads_per_s > 0
    assert speed.bytes_per_s == pytest.approx(speed.reads_per_s * 4096)
