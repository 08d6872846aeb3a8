"""Ranges in order while the next ones are read: whatever their size, the window, or who stops."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyneuron.errors import DeviceError
from polyneuron.io.block_device import ByteRange
from polyneuron.io.device_wrappers import CountingDevice, Fault, FaultDevice, FaultKind
from polyneuron.io.file_device import DeviceOptions, FileDevice, open_device
from polyneuron.io.read_ahead import read_ahead

FILE_BYTES = 3_000_001
CONTENT = random.Random(2).randbytes(FILE_BYTES)
RANGES = [ByteRange(start, 250_000) for start in range(0, 2_750_000, 250_000)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("read_ahead") / "file.bin"
    path.write_bytes(CONTENT)
    return path


@pytest.fixture
def device(path: Path) -> Iterator[FileDevice]:
    with open_device(path, capacity=1 << 20) as device:
        yield device


def expected(wanted: ByteRange) -> bytes:
    return CONTENT[wanted.offset : wanted.offset + wanted.num_bytes]


places = st.integers(0, FILE_BYTES - 70_000)
lengths = st.one_of(st.integers(0, 100), st.integers(0, 70_000))


class TestReadAhead:
    @settings(max_examples=40)
    @given(st.lists(st.builds(ByteRange, places, lengths), max_size=12), st.integers(1, 5))
    def test_ranges_come_in_order(
        self, path: Path, ranges: list[ByteRange], num_buffers: int
    ) -> None:
        # A device that takes fewer requests than there are buffers.
        with closing(FileDevice(path, DeviceOptions(2, 2))) as device:
            found = [bytes(view) for view in read_ahead(device, ranges, num_buffers)]
        assert found == [expected(wanted) for wanted in ranges]

    def test_window_is_kept_full(self, device: FileDevice) -> None:
        counting = CountingDevice(device)
        for index, view in enumerate(read_ahead(counting, RANGES, 4)):
            assert counting.counts.num_requests == min(index + 4, len(RANGES))
            assert bytes(view) == expected(RANGES[index])
        assert counting.counts.max_outstanding == 4

    def test_leaving_early_waits_for_reads(self, device: FileDevice) -> None:
        views = read_ahead(device, RANGES, 4)
        next(views)
        views.close()
        assert device.info().num_outstanding == 0
        assert bytes(device.read(7, 1000)) == CONTENT[7:1007]

    def test_end_of_file_is_named(self, device: FileDevice, path: Path) -> None:
        with pytest.raises(DeviceError, match=f"{path}: ends at byte {FILE_BYTES}, 9 bytes"):
            list(read_ahead(device, [ByteRange(FILE_BYTES - 1, 10)]))

    def test_truncated_file_is_named(self, tmp_path: Path) -> None:
        copy = tmp_path / "copy"
        copy.write_bytes(CONTENT)
        with open_device(copy) as device:
            os.truncate(copy, 1_000_100)  # inside the last sector of the fourth range
            read: list[bytes] = []
            with pytest.raises(DeviceError, match=r"ends at byte 1000100, \d+ bytes are missing"):
                for view in read_ahead(device, RANGES):
                    read.append(bytes(view))
        assert read == [expected(wanted) for wanted in RANGES[:3]]

    def test_lasting_error_has_its_errno(self, device: FileDevice) -> None:
        faulty = FaultDevice(device, Fault(FaultKind.EIO, 1, is_persistent=True))
        with pytest.raises(DeviceError, match="read at byte 0 failed: Input/output error") as info:
            list(read_ahead(faulty, RANGES[:1]))
        assert info.value.errno == errno.EIO
        assert faulty.num_injected == 3


class TestFileDeviceRead:
    @settings(max_examples=40)
    @given(st.lists(st.tuples(places, lengths), max_size=8))
    def test_any_range_is_right(self, path: Path, ranges: list[tuple[int, int]]) -> None:
        with open_device(path, capacity=70_000) as device:
            for offset, num_bytes in ranges:
                assert bytes(device.read(offset, num_bytes)) == expected(
                    ByteRange(offset, num_bytes)
                )

    def test_whole_file_in_one(self, path: Path) -> None:
        with open_device(path, capacity=FILE_BYTES) as device:
            assert bytes(device.read(0, FILE_BYTES)) == CONTENT

    def test_capacity_is_a_bound(self, device: FileDevice) -> None:
        with pytest.raises(ValueError, match="1048577 bytes asked, the buffer holds 1048576"):
            device.read(0, (1 << 20) + 1)

    def test_behind_the_end_is_named(self, device: FileDevice, path: Path) -> None:
        with pytest.raises(DeviceError, match=f"{path}: ends at byte {FILE_BYTES}, 1 bytes"):
            device.read(FILE_BYTES - 1, 2)
