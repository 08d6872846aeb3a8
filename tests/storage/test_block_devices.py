"""Every device under the one suite, and what is special to each."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from polyneuron.clock import MonotonicClock, VirtualClock
from polyneuron.errors import ConfigError
from polyneuron.io.block_device import Backend, BlockDevice, ReadRequest, aligned_bytes
from polyneuron.io.device_faults import DeviceFaults
from polyneuron.io.device_wrappers import (
    CountingDevice,
    Fault,
    FaultDevice,
    FaultKind,
    LatencyDevice,
    SlowDevice,
)
from polyneuron.io.file_device import DeviceOptions, FileDevice
from tests.storage.block_device_suite import BlockDeviceTests, Place, S, address, reap_all
from tests.support.leftovers import wait_until

SCRATCH_BYTES = 1 << 20


def open_file(path: Path, options: DeviceOptions, backend: Backend) -> FileDevice:
    return FileDevice(path, replace(options, backend=backend))


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("devices") / "scratch.bin"
    path.write_bytes(os.urandom(SCRATCH_BYTES))
    return path


@pytest.fixture(scope="module")
def needs_uring(scratch: Path) -> None:
    with closing(FileDevice(scratch)) as device:
        info = device.info()
    if info.backend is not Backend.URING:
        pytest.skip(f"no io_uring here: {os.strerror(-info.uring_status)}")


@pytest.fixture(scope="module")
def needs_direct(scratch: Path) -> None:
    with closing(FileDevice(scratch)) as device:
        if not device.info().is_direct:
            pytest.skip("the file system of the test's folder refuses O_DIRECT")


@pytest.mark.usefixtures("needs_uring")
class TestUring(BlockDeviceTests):
    def open_device(self, path: Path, options: DeviceOptions) -> BlockDevice:
        return open_file(path, options, Backend.URING)

    def test_info_says_so(self, device: BlockDevice) -> None:
        assert device.info().backend is Backend.URING
        assert device.info().uring_status == 0
        assert device.info().has_registered_file

    def test_buffered_reads_are_right(self, path: Path, content: bytes) -> None:
        options = DeviceOptions(4, 8, Backend.URING, is_buffered=True)
        with closing(FileDevice(path, options)) as device:
            assert not device.info().is_direct
            place = Place(device, 0, 8 << 20)
            device.submit([place.request()])
            reap_all(device)
            place.check(content)

    def test_registered_memory_is_read_into(self, path: Path, content: bytes) -> None:
        memory = aligned_bytes(1 << 16, 4096)
        with closing(open_file(path, DeviceOptions(4, 8), Backend.URING)) as device:
            # One page is within any limit on locked memory.
            assert device.register_memory(address(memory) + 4096, 4096)
            assert device.info().registered_bytes == 4096
            # Before it, inside it, and across its end.
            requests = [
                ReadRequest(8192 * tag, num_bytes, address(memory) + start)
                for tag, (start, num_bytes) in enumerate([(0, 4096), (4096, 4096), (8192, 8192)])
            ]
            straddling = ReadRequest(0, 8192, address(memory) + 20480)
            device.submit([*requests, straddling])
            assert [found.status for found in reap_all(device)] == [0] * 4
        assert memory[4096:8192].tobytes() == content[8192:12288]
        assert memory[8192:16384].tobytes() == content[16384:24576]
        assert memory[20480:28672].tobytes() == content[:8192]

    def test_memory_is_registered_before_reading(self, device: FileDevice) -> None:
        place = Place(device, 0, 4096)
        device.submit([place.request()])
        reap_all(device)
        assert not device.register_memory(address(place.memory), 4096)
        assert device.info().registered_bytes == 0


class TestPool(BlockDeviceTests):
    def open_device(self, path: Path, options: DeviceOptions) -> BlockDevice:
        return open_file(path, options, Backend.POOL)

    def test_info_says_so(self, device: BlockDevice) -> None:
        assert device.info().backend is Backend.POOL

    def test_memory_cannot_be_registered(self, device: FileDevice) -> None:
        assert not device.register_memory(address(aligned_bytes(4096, 4096)), 4096)

    def test_threads_end_with_the_device(self, path: Path) -> None:
        before = set(os.listdir("/proc/self/task"))
        with closing(open_file(path, DeviceOptions(7, 8), Backend.POOL)):
            ours = set(os.listdir("/proc/self/task")) - before
            assert len(ours) == 7
        # A thread that has been joined may still be listed for a moment.
        wait_until(lambda: not ours & set(os.listdir("/proc/self/task")), "threads gone")


class TestPoolBuffered(BlockDeviceTests):
    def open_device(self, path: Path, options: DeviceOptions) -> BlockDevice:
        return open_file(path, replace(options, is_buffered=True), Backend.POOL)

    def test_info_says_so(self, device: BlockDevice) -> None:
        assert not device.info().is_direct


class TestLatency(BlockDeviceTests):
    def open_device(self, path: Path, options: DeviceOptions) -> BlockDevice:
        return LatencyDevice(FileDevice(path, options), VirtualClock(), lambda _: 250_000)

    def test_reads_end_by_the_clock(self, path: Path) -> None:
        clock = VirtualClock()
        latencies = {0: 3000, 4096: 1000, 8192: 2000}
        inner = FileDevice(path, DeviceOptions(4, 8))
        with closing(LatencyDevice(inner, clock, lambda read: latencies[read.offset])) as device:
            word = np.zeros(1, np.uint32)
            slow = ReadRequest(
                0, 4096, address(Place(device, 0, 4096).memory), 0, int(word.ctypes.data)
            )
            places = [Place(device, 4096, 4096), Place(device, 8192, 4096)]
            device.submit([slow, *(place.request(place.offset) for place in places)])
            assert device.reap(3, 3, 999) == []
            assert clock.now_ns() == 999
            assert [found.tag for found in device.reap(3, 2, S)] == [4096, 8192]
            assert (clock.now_ns(), word[0]) == (2000, 0)
            assert [found.latency_ns for found in device.reap(3, 1, S)] == [3000]
            assert word[0] == 1


class TestSlow(BlockDeviceTests):
    def open_device(self, path: Path, options: DeviceOptions) -> BlockDevice:
        return SlowDevice(FileDevice(path, options), MonotonicClock(), 3.0)

    def test_reads_take_so_many_times_as_long(self, path: Path) -> None:
        clock = VirtualClock()
        inner = LatencyDevice(FileDevice(path), clock, lambda _: 1000)
        stalls = iter((0, 9000, 0))
        with closing(SlowDevice(inner, clock, 4.0, lambda _: next(stalls))) as device:
            places = [Place(device, 4096 * index, 4096) for index in range(3)]
            device.submit([place.request(index) for index, place in enumerate(places)])
            found = device.reap(3, 3, S)
        assert [(each.tag, each.latency_ns) for each in found] == [(0, 4000), (2, 4000), (1, 9000)]


class TestDeviceFaults:
    def test_nothing_wrong_wraps_nothing(self, scratch: Path) -> None:
        with closing(FileDevice(scratch)) as device:
            assert DeviceFaults().wrap(device, VirtualClock()) is device

    def test_one_read_in_so_many_stalls(self, scratch: Path) -> None:
        clock, faults = VirtualClock(), DeviceFaults(stall_ns=50 * S, stall_every=3)
        with closing(faults.wrap(FileDevice(scratch), clock)) as device:
            places = [Place(device, 4096 * index, 4096) for index in range(7)]
            device.submit([place.request(index) for index, place in enumerate(places)])
            found = device.reap(7, 7, 100 * S)
        assert {each.tag for each in found if each.latency_ns >= 50 * S} == {2, 5}

    def test_counted_fault_ends_with_its_reader(self) -> None:
        counted = DeviceFaults(2.0, fault=Fault(FaultKind.EIO, 1, count=5))
        assert counted.lasting() == DeviceFaults(2.0)
        lasting = replace(counted, fault=Fault(FaultKind.EIO, 1, is_persistent=True))
        assert lasting.lasting() is lasting


class TestFaultless(BlockDeviceTests):
    """A fault that never comes changes nothing."""

    def open_device(self, path: Path, options: DeviceOptions) -> BlockDevice:
        return FaultDevice(FileDevice(path, options), Fault(FaultKind.EIO, 1 << 40))


class TestCounting(BlockDeviceTests):
    def open_device(self, path: Path, options: DeviceOptions) -> BlockDevice:
        return CountingDevice(FileDevice(path, options))

    def test_counts_are_right(self, device: CountingDevice) -> None:
        places = [Place(device, 4096 * index, 4096) for index in range(10)]
        device.submit([place.request() for place in places])
        reap_all(device)
        counts = device.counts
        assert (counts.num_requests, counts.num_refused, counts.num_failed) == (8, 2, 0)
        assert (counts.num_bytes, counts.max_outstanding) == (8 * 4096, 8)
        assert counts.offsets == [4096 * index for index in range(8)]


class TestFaults:
    @pytest.fixture
    def content(self, scratch: Path) -> bytes:
        return scratch.read_bytes()

    def read_four(self, scratch: Path, fault: Fault) -> tuple[list[int], list[Place], list[int]]:
        words = np.zeros(4, np.uint32)
        with closing(FaultDevice(FileDevice(scratch), fault)) as device:
            places = [Place(device, 4096 * index, 4096) for index in range(4)]
            device.submit(
                [
                    replace(place.request(index), done_word=int(words.ctypes.data) + 4 * index)
                    for index, place in enumerate(places)
                ]
            )
            found = sorted(reap_all(device), key=lambda completion: completion.tag)
            statuses = [completion.status for completion in found]
            later = 4 - fault.nth + 1
            assert device.num_injected == (later if fault.is_persistent else fault.count)
        return statuses, places, words.tolist()

    def test_transient_error_hits_one(self, scratch: Path, content: bytes) -> None:
        statuses, places, words = self.read_four(scratch, Fault(FaultKind.EIO, 2))
        assert statuses == [0, -errno.EIO, 0, 0]
        assert words == [1, 2, 1, 1]
        for place in places[:1] + places[2:]:
            place.check(content)
        assert places[1].memory[0] != content[4096]

    def test_persistent_error_hits_all_later(self, scratch: Path) -> None:
        statuses, _, _ = self.read_four(scratch, Fault(FaultKind.SHORT_READ, 3, True))
        assert statuses == [0, 0, -errno.ENODATA, -errno.ENODATA]

    def test_counted_errors_hit_a_run(self, scratch: Path) -> None:
        statuses, _, _ = self.read_four(scratch, Fault(FaultKind.EIO, 2, count=2))
        assert statuses == [0, -errno.EIO, -errno.EIO, 0]

    def test_torn_read_looks_well(self, scratch: Path, content: bytes) -> None:
        statuses, places, words = self.read_four(scratch, Fault(FaultKind.TORN, 1))
        assert (statuses, words) == ([0] * 4, [1] * 4)
        assert places[0].memory[:2048].tobytes() == content[:2048]
        assert places[0].memory[2048:4096].tobytes() != content[2048:4096]


def cached_pages(path: Path) -> int:
    """Pages of a file that are in the page cache."""
    libc = ctypes.CDLL(None, use_errno=True)
    num_bytes = path.stat().st_size
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE) as mapped:
        pages = np.zeros(-(-num_bytes // mmap.PAGESIZE), np.uint8)
        view = np.frombuffer(mapped, np.uint8)
        found = libc.mincore(
            ctypes.c_void_p(view.ctypes.data),
            ctypes.c_size_t(num_bytes),
            ctypes.c_void_p(pages.ctypes.data),
        )
        del view
    assert found == 0
    return int((pages & 1).sum())


@pytest.mark.usefixtures("needs_direct")
class TestPageCache:
    @pytest.mark.parametrize("backend", [Backend.AUTO, Backend.POOL])
    @pytest.mark.parametrize("is_buffered", [False, True])
    def test_no_page_stays(self, tmp_path: Path, backend: Backend, is_buffered: bool) -> None:
        """Direct reads take the way around it; buffered ones give their pages back."""
        path = tmp_path / "fresh.bin"
        content = os.urandom(SCRATCH_BYTES)
        with path.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        with closing(FileDevice(path, DeviceOptions(4, 8, backend, is_buffered))) as device:
            place = Place(device, 0, SCRATCH_BYTES)
            device.submit([place.request()])
            reap_all(device)
        place.check(content)
        assert cached_pages(path) == 0


class TestOptions:
    @pytest.mark.parametrize(
        ("depth", "max_requests"), [(0, 8), (1025, 2000), (8, 7), (1, 1 << 21)]
    )
    def test_bounds_are_checked(self, depth: int, max_requests: int) -> None:
        with pytest.raises(ConfigError, match=r"^(queue_depth|max_requests)="):
            DeviceOptions(depth, max_requests)
