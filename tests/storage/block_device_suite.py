"""What every block device must do; each device's test class inherits this and opens its device."""

from __future__ import annotations

import errno
import mmap
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from polyneuron.errors import DeviceError, ProtocolError
from polyneuron.io.block_device import BlockDevice, ReadCompletion, ReadRequest, aligned_bytes
from polyneuron.io.file_device import DeviceOptions

MIB = 1 << 20
S = 10**9
FILE_BYTES = 5 * MIB + 777  # neither whole sectors nor whole pages
UNTOUCHED = 0xA5
WAITER = """
import mmap, sys
from polyneuron.kernels._kernels import ffi, lib
memory = mmap.mmap(int(sys.argv[1]), 0)
word = ffi.cast("uint32_t *", ffi.from_buffer(memory))
print("ready", flush=True)
value = lib.word_wait(word, 0, 20 * 10**9)
print(value, sum(memory[4096:]), flush=True)
"""


def address(memory: NDArray[np.uint8]) -> int:
    return int(memory.ctypes.data)


class Place:
    """Memory for one request, with a sector behind it that must stay as it is."""

    def __init__(self, device: BlockDevice, offset: int, num_bytes: int) -> None:
        info = device.info()
        self.offset, self.num_bytes = offset, num_bytes
        self.expected_bytes = min(num_bytes, info.file_bytes - offset)
        self.memory = aligned_bytes(num_bytes + info.offset_alignment, 4096)
        self.memory[:] = UNTOUCHED

    def request(self, tag: int = 0) -> ReadRequest:
        return ReadRequest(self.offset, self.num_bytes, address(self.memory), tag)

    def check(self, content: bytes) -> None:
        found = self.memory[: self.expected_bytes].tobytes()
        assert found == content[self.offset : self.offset + self.expected_bytes]
        assert (self.memory[self.num_bytes :] == UNTOUCHED).all()


def reap_all(device: BlockDevice) -> list[ReadCompletion]:
    """Everything that is outstanding."""
    found: list[ReadCompletion] = []
    while device.info().num_outstanding:
        more = device.reap(16, 16, 20 * S)
        assert more, "nothing ended in 20 s"
        found += more
    return found


def submit_all(device: BlockDevice, requests: Sequence[ReadRequest]) -> list[ReadCompletion]:
    """Submit everything, reaping when full, and reap it."""
    found: list[ReadCompletion] = []
    while requests:
        requests = requests[device.submit(requests) :]
        if requests:
            found += device.reap(4, 1, 20 * S)
    return found + reap_all(device)


@contextmanager
def alarms(interval_s: float) -> Iterator[list[int]]:
    """A signal every so often, handled by the program; what they are is listed."""
    seen: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda number, _: seen.append(number))
    signal.setitimer(signal.ITIMER_REAL, interval_s, interval_s)
    try:
        yield seen
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class BlockDeviceTests:
    """Subclasses say how their device is opened."""

    def open_device(self, path: Path, options: DeviceOptions) -> BlockDevice:
        raise NotImplementedError

    @pytest.fixture(scope="class")
    @classmethod
    def content(cls) -> bytes:
        return random.Random(1).randbytes(FILE_BYTES)

    @pytest.fixture(scope="class")
    @classmethod
    def path(cls, content: bytes, tmp_path_factory: pytest.TempPathFactory) -> Path:
        path = tmp_path_factory.mktemp("device") / "file.bin"
        path.write_bytes(content)
        return path

    @pytest.fixture
    def device(self, path: Path) -> Iterator[BlockDevice]:
        with closing(self.open_device(path, DeviceOptions(4, 8))) as device:
            yield device

    # One test, inherited: each class has its own device behind it.
    @settings(max_examples=25, suppress_health_check=[HealthCheck.differing_executors])
    @given(st.lists(st.tuples(st.integers(0, 5 * 256), st.integers(1, 600)), max_size=12))
    def test_any_ranges_are_right(self, path: Path, content: bytes, ranges: list[tuple[int, int]]):
        with closing(self.open_device(path, DeviceOptions(3, 5))) as device:
            sector = max(device.info().offset_alignment, 512)
            last = FILE_BYTES // sector
            places = [
                Place(device, min(start * 4096 // sector, last) * sector, count * sector)
                for start, count in ranges
            ]
            found = submit_all(device, [place.request(tag) for tag, place in enumerate(places)])
        assert sorted(completion.tag for completion in found) == list(range(len(places)))
        for completion in found:
            place = places[completion.tag]
            assert (completion.status, completion.num_bytes) == (0, place.expected_bytes)
            place.check(content)

    def test_tail_is_cut_at_the_end(self, device: BlockDevice, content: bytes) -> None:
        sector = device.info().offset_alignment
        place = Place(device, FILE_BYTES // sector * sector, 4 * sector)
        [completion] = submit_all(device, [place.request(3)])
        assert completion.num_bytes == FILE_BYTES % sector > 0
        place.check(content)

    def test_large_request_is_split(self, device: BlockDevice, content: bytes) -> None:
        place = Place(device, 0, 8 * MIB)
        [completion] = submit_all(device, [place.request()])
        assert completion.num_bytes == FILE_BYTES
        assert device.info().num_reads >= 6
        assert device.info().bytes_read == FILE_BYTES
        place.check(content)

    def test_tags_and_places_may_repeat(self, device: BlockDevice, content: bytes) -> None:
        places = [Place(device, 4096, 8192) for _ in range(6)]
        found = submit_all(device, [place.request(2**64 - 1) for place in places])
        assert [completion.tag for completion in found] == [2**64 - 1] * 6
        for place in places:
            place.check(content)

    def test_latency_is_measured(self, device: BlockDevice) -> None:
        place = Place(device, 0, MIB)
        [completion] = submit_all(device, [place.request()])
        assert 0 < completion.latency_ns < 20 * S

    def test_full_is_a_value(self, device: BlockDevice, content: bytes) -> None:
        places = [Place(device, 4096 * index, 4096) for index in range(11)]
        requests = [place.request(index) for index, place in enumerate(places)]
        assert device.submit(requests) == 8
        assert device.submit(requests[8:]) == 0
        found = device.reap(100, 8, 20 * S)
        assert len(found) == 8
        assert device.submit(requests[8:]) == 3
        found += reap_all(device)
        assert sorted(completion.tag for completion in found) == list(range(11))
        for place in places:
            place.check(content)

    def test_nothing_outstanding_is_not_waited_for(self, device: BlockDevice) -> None:
        assert device.reap(5, 5, 20 * S) == []
        assert submit_all(device, []) == []

    def test_reap_gives_no_more_than_asked(self, device: BlockDevice) -> None:
        places = [Place(device, 0, 512 * 8) for _ in range(5)]
        assert device.submit([place.request() for place in places]) == 5
        assert [len(device.reap(2, 2, 20 * S)) for _ in range(4)] == [2, 2, 1, 0]

    @pytest.mark.parametrize(
        ("field", "offset", "num_bytes", "shift"),
        [
            ("offset", 1, 4096, 0),
            ("offset", -4096, 4096, 0),
            ("offset", 6 * MIB, 4096, 0),
            ("num_bytes", 0, 0, 0),
            ("num_bytes", 0, 1000, 0),
            ("num_bytes", 0, -4096, 0),
            ("target", 0, 4096, 1),
        ],
    )
    def test_bad_request_takes_none(
        self, device: BlockDevice, field: str, offset: int, num_bytes: int, shift: int
    ) -> None:
        good = Place(device, 0, 4096)
        bad = ReadRequest(offset, num_bytes, address(good.memory) + shift)
        with pytest.raises(ValueError, match=rf"^{field} "):
            device.submit([good.request(), bad])
        assert device.info().num_outstanding == 0

    def test_empty_file_takes_nothing(self, tmp_path: Path) -> None:
        (tmp_path / "empty").touch()
        with closing(self.open_device(tmp_path / "empty", DeviceOptions(4, 8))) as device:
            assert device.info().file_bytes == 0
            memory = aligned_bytes(4096, 4096)
            with pytest.raises(ValueError, match="offset 0"):
                device.submit([ReadRequest(0, 4096, address(memory))])

    def test_file_smaller_than_a_sector(self, tmp_path: Path) -> None:
        (tmp_path / "small").write_bytes(b"abc")
        with closing(self.open_device(tmp_path / "small", DeviceOptions(4, 8))) as device:
            place = Place(device, 0, 4096)
            [completion] = submit_all(device, [place.request()])
        assert completion.num_bytes == 3
        place.check(b"abc")

    @pytest.mark.parametrize("left", [3 * MIB + 100, 3 * MIB + 4096, 3 * MIB, 2 * MIB + 1])
    def test_truncated_file_is_an_error(self, tmp_path: Path, content: bytes, left: int) -> None:
        path = tmp_path / "truncated"
        path.write_bytes(content)
        with closing(self.open_device(path, DeviceOptions(4, 8))) as device:
            os.truncate(path, left)
            place = Place(device, 2 * MIB, 3 * MIB)
            [completion] = submit_all(device, [place.request()])
        assert completion.status == -errno.ENODATA
        assert completion.num_bytes == left - 2 * MIB
        found = place.memory[: completion.num_bytes].tobytes()
        assert found == content[2 * MIB : left]

    def test_done_word_wakes_another_process(self, path: Path, content: bytes) -> None:
        descriptor = os.memfd_create("words")
        os.ftruncate(descriptor, 4096 + 2 * MIB)
        command = [sys.executable, "-c", WAITER, str(descriptor)]
        with (
            mmap.mmap(descriptor, 0) as shared,
            closing(self.open_device(path, DeviceOptions(4, 8))) as device,
        ):
            memory = np.frombuffer(shared, np.uint8)
            waiter = subprocess.Popen(
                command, pass_fds=[descriptor], stdout=subprocess.PIPE, text=True
            )
            with waiter:
                assert waiter.stdout is not None
                assert waiter.stdout.readline() == "ready\n"
                request = ReadRequest(
                    MIB, 2 * MIB, address(memory) + 4096, done_word=address(memory), done_value=77
                )
                device.submit([request])
                reap_all(device)
                value, total = map(int, waiter.stdout.readline().split())
            del memory
        os.close(descriptor)
        assert (value, total) == (77, sum(content[MIB : 3 * MIB]))

    def test_failed_read_stores_the_other_value(self, tmp_path: Path, content: bytes) -> None:
        path = tmp_path / "truncated"
        path.write_bytes(content)
        words = np.zeros(2, np.uint32)
        with closing(self.open_device(path, DeviceOptions(4, 8))) as device:
            os.truncate(path, MIB)
            places = [Place(device, 0, 4096), Place(device, 2 * MIB, 4096)]
            device.submit(
                [
                    ReadRequest(
                        place.offset, 4096, address(place.memory), index,
                        words.ctypes.data + 4 * index, 5, 6,
                    )
                    for index, place in enumerate(places)
                ]
            )  # fmt: skip
            reap_all(device)
        assert words.tolist() == [5, 6]

    def test_close_ends_every_request(self, path: Path, content: bytes) -> None:
        device = self.open_device(path, DeviceOptions(2, 8))
        words = np.zeros(8, np.uint32)
        places = [Place(device, index * MIB // 2, 3 * MIB) for index in range(8)]
        requests = [
            ReadRequest(
                place.offset, place.num_bytes, address(place.memory), index,
                words.ctypes.data + 4 * index,
            )
            for index, place in enumerate(places)
        ]  # fmt: skip
        assert device.submit(requests) == 8
        device.close()
        assert set(words.tolist()) <= {1, 2}
        for word, place in zip(words, places, strict=True):
            if word == 1:
                place.check(content)

    def test_closed_device_refuses(self, path: Path) -> None:
        device = self.open_device(path, DeviceOptions(4, 8))
        place = Place(device, 0, 4096)
        device.close()
        device.close()
        with pytest.raises(ProtocolError, match="closed"):
            device.submit([place.request()])

    def test_signals_disturb_no_read(self, path: Path, content: bytes) -> None:
        with alarms(0.0005) as seen, closing(self.open_device(path, DeviceOptions(4, 8))) as device:
            rounds = 0
            while len(seen) < 20:
                places = [Place(device, index * MIB // 2, MIB) for index in range(8)]
                found = submit_all(device, [place.request() for place in places])
                assert [completion.status for completion in found] == [0] * 8
                for place in places:
                    place.check(content)
                rounds += 1
                assert rounds < 2000

    def test_second_thread_is_refused(self, device: BlockDevice) -> None:
        place = Place(device, 0, 4096)
        submit_all(device, [place.request()])
        errors: list[ProtocolError] = []

        def use() -> None:
            try:
                device.submit([place.request()])
            except ProtocolError as error:
                errors.append(error)

        thread = threading.Thread(target=use)
        thread.start()
        thread.join()
        assert "owner" in str(errors[0])

    def test_other_thread_may_open(self, path: Path, content: bytes) -> None:
        opened: list[BlockDevice] = []
        thread = threading.Thread(
            target=lambda: opened.append(self.open_device(path, DeviceOptions(4, 8)))
        )
        thread.start()
        thread.join()
        with closing(opened[0]) as device:
            place = Place(device, 0, MIB)
            submit_all(device, [place.request()])
            place.check(content)

    def test_missing_file_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(DeviceError, match=r"absent: cannot be opened: No such file") as caught:
            self.open_device(tmp_path / "absent", DeviceOptions(4, 8))
        assert caught.value.errno == errno.ENOENT

    def test_only_regular_files(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "pipe")
        with pytest.raises(DeviceError, match="pipe: is not a regular file"):
            self.open_device(tmp_path / "pipe", DeviceOptions(4, 8))
        with pytest.raises(DeviceError, match="Is a directory"):
            self.open_device(tmp_path, DeviceOptions(4, 8))

    def test_no_descriptor_is_left(self, path: Path, tmp_path: Path) -> None:
        before = sorted(os.listdir("/proc/self/fd"))
        self.open_device(path, DeviceOptions(4, 8)).close()
        with pytest.raises(DeviceError):
            self.open_device(tmp_path, DeviceOptions(4, 8))
        assert sorted(os.listdir("/proc/self/fd")) == before
